"""Multiplex for the SDK's test servers, which have Generate and Chat: a thread for each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NoReturn

import grpc

from octavo.service.errors import DETAILS_KEY, ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc


class _Aborted(Exception):
    """What `abort` of a call's context raises."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _CallContext:
    """To a handler, the context of an RPC."""

    def __init__(self, metadata: list[tuple[str, str | bytes]]) -> None:
        self._metadata = metadata
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.trailing_metadata: dict[str, bytes] = {}
        self.is_over = False

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._metadata

    def time_remaining(self) -> None:
        """The wire has no deadline of a call."""

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.trailing_metadata = dict(metadata)

    def abort(self, code: grpc.StatusCode, message: str) -> NoReturn:
        raise _Aborted(code, message)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if not self.is_over:
                self._callbacks.append(callback)
            return not self.is_over

    def end(self) -> None:
        with self._lock:
            self.is_over, callbacks = True, self._callbacks
            self._callbacks = []
        for callback in callbacks:
            callback()


def fail(error: ServiceError, context: Any) -> NoReturn:
    """End the call with `error`."""
    context.set_trailing_metadata(((DETAILS_KEY, error.to_status().SerializeToString()),))
    context.abort(error.code, error.message)
    raise AssertionError("unreachable: context.abort raises")


class ByCall(inference_pb2_grpc.InferenceServicer):
    """`multiplexes` False: an older server, which knows no Multiplex."""

    multiplexes = True
    refuses_streams: ServiceError | None = None
    # Streams that were taken.
    num_streams = 0

    def Multiplex(self, request_iterator: Iterator[pb.MultiplexRequest], context: Any) -> Any:
        if not self.multiplexes:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.refuses_streams is not None:
            fail(self.refuses_streams, context)
        self.num_streams += 1
        return _Stream(self, context).replies(request_iterator)


class _Stream:
    def __init__(self, servicer: ByCall, context: Any) -> None:
        self._servicer = servicer
        self._context = context
        self._calls: dict[int, _CallContext] = {}
        # None: it is over.
        self._outbox: SimpleQueue[pb.CallNews | _Aborted | None] = SimpleQueue()
        context.add_callback(self._end)

    def replies(self, requests: Iterator[pb.MultiplexRequest]) -> Iterator[pb.MultiplexReply]:
        yield pb.MultiplexReply()
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        while (news := self._outbox.get()) is not None:
            if isinstance(news, pb.CallNews):
                yield pb.MultiplexReply(calls=[news])
            else:
                self._context.abort(news.code, news.message)

    def _end(self) -> None:
        for call in list(self._calls.values()):
            call.end()
        self._outbox.put(None)

    def _read(self, requests: Iterator[pb.MultiplexRequest]) -> None:
        threads = []
        try:
            for request in requests:
                if request.HasField("cancel"):
                    if request.call_id in self._calls:
                        self._calls[request.call_id].end()
                    continue
                assert request.call_id not in self._calls
                metadata = list(self._context.invocation_metadata())
                if request.traceparent:
                    metadata.append(("traceparent", request.traceparent))
                call = self._calls[request.call_id] = _CallContext(metadata)
                threads.append(
                    threading.Thread(target=self._serve, args=(request, call), daemon=True)
                )
                threads[-1].start()
        except grpc.RpcError:
            return  # its caller is gone
        for thread in threads:
            thread.join()
        self._outbox.put(None)

    def _serve(self, request: pb.MultiplexRequest, call: _CallContext) -> None:
        end = pb.CallEnd()
        try:
            if request.HasField("chat"):
                replies = self._servicer.Chat(request.chat, call)
            else:
                replies = self._servicer.Generate(request.generate, call)
            for reply in replies:
                if call.is_over:
                    return
                self._outbox.put(pb.CallNews(call_id=request.call_id, reply=reply))
        except _Aborted as aborted:
            details = call.trailing_metadata.get(DETAILS_KEY, b"")
            if aborted.code is grpc.StatusCode.UNAVAILABLE and not details:
                self._outbox.put(aborted)  # what breaks a connection breaks all its calls
                return
            end.error.code = aborted.code.value[0]
            end.error.message = aborted.message
            end.error.details = details
        if not call.is_over:
            call.end()
            self._outbox.put(pb.CallNews(call_id=request.call_id, end=end))
