"""The calls of an AsyncClient at one address, all over one stream.

So a server can send in one message what a step has made for all of them, and the client takes it in
at once. To whoever reads a call it is like an RPC of its own: it has its own deadline and its own
end, and can be cancelled without the others. When the stream breaks, its calls fail as RPCs would.
A stream lasts for as long as it has calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import replace
from typing import Any, Final

import grpc
import grpc.aio

from octavo._stubs import Attempt, Stubs
from octavo._tracing import METADATA_KEY as TRACEPARENT_KEY
from octavo._wire import CallFailed, code_of
from octavo.v1 import inference_pb2

# Of one stream; a server takes some more. The next call begins another stream.
MAX_CALLS: Final = 512
# A bigger request goes by an RPC of its own: others do not wait behind it, and what is too big for
# a message does not break their stream.
MAX_REQUEST_BYTES: Final = 1 << 20
# For so long a server that knows no Multiplex is not asked for it again.
SINGLE_S: Final = 60.0
# Replies to a call that nobody has read yet which are kept as they came. Each keeps the whole
# message that it came with in memory; so those beyond, max_tokens at most, are kept as bytes.
MAX_HELD_REPLIES: Final = 16


class MultiplexedCall:
    """One call of a stream, read as a grpc.aio call is."""

    def __init__(self, stream: _Stream, call_id: int, attempt: Attempt) -> None:
        self.call_id = call_id
        self.timer: asyncio.TimerHandle | None = None
        self._stream = stream
        self._attempt = attempt
        self._deadline_s = time.monotonic() + attempt.timeout_s
        self._held: deque[inference_pb2.GenerateReply | bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._failure: grpc.RpcError | None = None
        # The RPC that does instead, where the server knows no Multiplex.
        self._instead: Any = None

    async def read(self) -> Any:
        """The next reply; what is none, once it has ended well or was cancelled.

        Raises grpc.RpcError when the call has failed.
        """
        while not self._held:
            if self._instead is not None:
                return await self._instead.read()
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        reply = self._held.popleft()
        return inference_pb2.GenerateReply.FromString(reply) if isinstance(reply, bytes) else reply

    def cancel(self) -> None:
        """From any thread, also in the middle of a garbage collection."""
        self._stream.cancel_soon(self)

    # ---- for the stream ----

    def take(self, reply: inference_pb2.GenerateReply) -> None:
        held = self._held
        held.append(reply if len(held) < MAX_HELD_REPLIES else reply.SerializeToString())
        self._wake()

    def end(self, failure: grpc.RpcError | None = None) -> None:
        """What came before can still be read."""
        self._ended, self._failure = True, failure
        self._wake()

    def go_by_rpc(self, stubs: Stubs) -> None:
        """Nothing has come of it, and nothing will over this stream."""
        left_s = self._deadline_s - time.monotonic()
        self._instead = stubs.start(replace(self._attempt, timeout_s=left_s))
        self._wake()

    def cancel_rpc(self) -> None:
        """Cancel what does instead, if anything does."""
        if self._instead is not None:
            self._instead.cancel()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Multiplexer:
    """The streams to one address: the newest takes what begins."""

    def __init__(self, stubs: Stubs) -> None:
        self.stubs = stubs
        # The server has taken the last stream of which something is known.
        self.is_trusted = False
        self._stream: _Stream | None = None
        self._single_until_s = 0.0

    def start(self, attempt: Attempt) -> Any:
        """A call whose replies can be read."""
        is_big = attempt.request.ByteSize() > MAX_REQUEST_BYTES
        if is_big or time.monotonic() < self._single_until_s:
            return self.stubs.start(attempt)
        if self._stream is None or not self._stream.takes_calls:
            self._stream = _Stream(self)
        return self._stream.start(attempt)

    def is_unimplemented(self) -> None:
        """The server knows no Multiplex."""
        self._single_until_s = time.monotonic() + SINGLE_S


class _Stream:
    """One Multiplex stream: a task that reads, and one that writes while there is something to."""

    def __init__(self, multiplexer: Multiplexer) -> None:
        self._multiplexer = multiplexer
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, MultiplexedCall] = {}
        self._last_id = 0
        self._outbox: deque[inference_pb2.MultiplexRequest] = deque()
        # It has no calls any more, or is broken.
        self._closed = False
        # The server has taken the stream, or it is broken.
        self._settled = asyncio.Event()
        self._broke_in_write = False
        stubs = multiplexer.stubs
        self._rpc = stubs.inference.Multiplex(metadata=stubs.metadata)
        self._reading = self._loop.create_task(self._read())
        self._writing: asyncio.Task[None] | None = None

    @property
    def takes_calls(self) -> bool:
        return not self._closed and len(self._calls) < MAX_CALLS

    def start(self, attempt: Attempt) -> MultiplexedCall:
        self._last_id += 1
        call = MultiplexedCall(self, self._last_id, attempt)
        call.timer = self._loop.call_later(attempt.timeout_s, self._expire, call)
        self._calls[call.call_id] = call
        self._send(
            inference_pb2.MultiplexRequest(
                call_id=call.call_id,
                traceparent=dict(attempt.metadata).get(TRACEPARENT_KEY, ""),
                **{attempt.method.lower(): attempt.request},
            )
        )
        return call

    def cancel_soon(self, call: MultiplexedCall) -> None:
        """From any thread, and in vain once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel, call, None)

    # ---- what comes ----

    async def _read(self) -> None:
        failure = None
        try:
            while isinstance(message := await self._rpc.read(), inference_pb2.MultiplexReply):
                if not self._settled.is_set():
                    self._multiplexer.is_trusted = True
                    self._settled.set()
                self._dispatch(message)
        except grpc.RpcError as error:
            failure = error
            if self._broke_in_write:
                failure = CallFailed(grpc.StatusCode.UNAVAILABLE, "the stream broke")
        finally:
            self._break(failure)

    def _dispatch(self, message: inference_pb2.MultiplexReply) -> None:
        for news in message.calls:
            call = self._calls.get(news.call_id)
            if call is None:
                continue  # cancelled
            if news.HasField("reply"):
                call.take(news.reply)
            else:
                self._forget(call)
                call.end(CallFailed.of(news.end.error) if news.end.HasField("error") else None)

    def _break(self, failure: grpc.RpcError | None) -> None:
        """Nothing more comes."""
        self._closed = True
        is_unimplemented = False
        if failure is not None:
            self._multiplexer.is_trusted = False
            was_taken = self._settled.is_set()
            is_unimplemented = not was_taken and code_of(failure) is grpc.StatusCode.UNIMPLEMENTED
        self._settled.set()
        if is_unimplemented:
            self._multiplexer.is_unimplemented()
        for call in list(self._calls.values()):
            self._forget(call)
            if is_unimplemented:
                call.go_by_rpc(self._multiplexer.stubs)
            else:
                call.end(failure)

    def _expire(self, call: MultiplexedCall) -> None:
        self._cancel(call, CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _cancel(self, call: MultiplexedCall, failure: grpc.RpcError | None) -> None:
        if call.call_id not in self._calls:
            call.cancel_rpc()
            return
        self._send(
            inference_pb2.MultiplexRequest(call_id=call.call_id, cancel=inference_pb2.CancelCall())
        )
        self._forget(call)
        call.end(failure)

    def _forget(self, call: MultiplexedCall) -> None:
        """It has ended; with the last one the stream does."""
        del self._calls[call.call_id]
        if call.timer is not None:
            call.timer.cancel()
        if not self._calls and not self._closed:
            self._closed = True
            self._wake_writer()

    # ---- what goes ----

    def _send(self, message: inference_pb2.MultiplexRequest) -> None:
        self._outbox.append(message)
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._writing is None:
            self._writing = self._loop.create_task(self._write())

    async def _write(self) -> None:
        """Where the stream breaks, it is the reader who tells the calls."""
        try:
            if not self._multiplexer.is_trusted:
                # In an RPC that ends while something is written, grpc.aio reports INTERNAL in place
                # of what the server says. So a server that may refuse the stream is let do that.
                await self._settled.wait()
            while self._outbox:
                await self._rpc.write(self._outbox.popleft())
            if self._closed:
                await self._rpc.done_writing()
        except grpc.RpcError as error:
            self._broke_in_write = code_of(error) is grpc.StatusCode.INTERNAL
        except (asyncio.InvalidStateError, grpc.aio.InternalError):
            pass  # it had ended before
        self._writing = None
