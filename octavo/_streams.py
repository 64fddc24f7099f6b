"""An answer as it is made, over as many streams as it takes: `ChunkStream`, `AsyncChunkStream`.

When a stream breaks, the next one is opened at whichever server has the request, which goes on
after what was received; whoever iterates notices nothing but the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
import grpc.aio

from octavo import _tracing, _wire
from octavo._fold import GenerationFold
from octavo._reconnect import Addresses, Failure, Patience, Reconnect
from octavo._stubs import Attempt
from octavo._transport import Aborter, AsyncTransport, Transport
from octavo.errors import DeadlineExceededError, OctavoError, UnavailableError
from octavo.types import Chunk, Generation
from octavo.v1 import inference_pb2

WireRequest = inference_pb2.GenerateRequest | inference_pb2.ChatRequest


@dataclass(frozen=True)
class Submission:
    """A request as it is to be made, before its first attempt."""

    method: str
    request: WireRequest
    num_candidates: int
    patience: Patience
    span: _tracing.RequestSpan


class _Answer:
    """What both kinds of stream keep: the attempts, what was received, and how it ended."""

    def __init__(self, submission: Submission, addresses: Addresses) -> None:
        self._ended = False
        self._error: OctavoError | None = None
        self._submission: Final = submission
        self._fold: Final = GenerationFold(submission.request.request_id, submission.num_candidates)
        self._reconnect: Final = Reconnect(
            addresses, submission.patience, time.monotonic(), random.random
        )
        self._call: Any = None

    @property
    def request_id(self) -> str:
        """The id to abort the request with; known before the first chunk."""
        return self._fold.request_id

    def generation(self) -> Generation:
        """Everything received, as one result.

        Raises what the stream failed with, or RpcError before every candidate has ended.
        """
        if self._error is not None and not self._fold.complete:
            raise self._error
        return self._fold.generation()

    def _attempt(self) -> Attempt:
        """The next attempt, which begins after what was received."""
        request = self._submission.request
        self._fold.begin_stream()
        self._fold.write_received(request.attachment)
        return Attempt(
            self._reconnect.address,
            self._submission.method,
            request,
            self._reconnect.time_left_s(time.monotonic()),
            self._submission.span.metadata,
        )

    def _take(self, reply: inference_pb2.GenerateReply) -> Chunk | None:
        """Raises RpcError, having ended, for a reply that continues nothing."""
        try:
            chunk = self._fold.add(reply)
        except OctavoError as error:
            self._end(error, leave=True)
            raise
        self._reconnect.answered(progress=chunk is not None)
        return chunk

    def _delay_s(self, failure: Failure) -> float | None:
        """How long to wait before the next attempt; None when the answer is complete.

        Raises the failure, having ended, when there is to be no other attempt.
        """
        if self._fold.complete:
            self._end()
            return None
        accepted = self._fold.accepted
        delay_s = self._reconnect.after(failure, accepted=accepted, now_s=time.monotonic())
        if delay_s is not None:
            return delay_s
        # Whoever gives up tells the server; whom the server has refused has nothing there.
        leave = isinstance(failure.error, DeadlineExceededError) or self._reconnect.out_of_time
        failure = self._reconnect.told_of(failure)
        self._end(failure.error, leave=leave)
        raise failure.error from failure.cause

    def _cut_short(self) -> Failure:
        """The failure of a stream that ended in peace, before every candidate had."""
        try:
            self._fold.check_complete()
        except OctavoError as error:
            return Failure(error, cut_short=True)
        raise AssertionError("a complete answer was not cut short")

    def _end(self, error: OctavoError | None = None, *, leave: bool = False) -> None:
        """Once: cancel the call, and have the request aborted if it is left before its end."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        leave = leave and not self._fold.complete
        if self._call is not None and (leave or error is not None or not self._fold.complete):
            self._call.cancel()
        if leave:
            request = self._submission.request
            self._send_abort(_wire.abort_call(self._fold.request_id, request.attachment.secret))
        self._submission.span.end(
            error,
            num_prompt_tokens=self._fold.num_prompt_tokens,
            num_output_tokens=self._fold.num_output_tokens,
            num_reconnects=self._reconnect.num_reconnects,
            cancelled=leave and error is None,
        )

    def _send_abort(self, call: _wire.UnaryCall[bool]) -> None:
        raise NotImplementedError

    def end_with_client(self) -> None:
        """The client is closed: end as if left, with an error that says why."""
        self._end(client_closed(), leave=True)

    def __del__(self) -> None:
        self._end(leave=True)


class ChunkStream(_Answer, Iterator[Chunk]):
    """An answer as it is made: iterate over it, in a `with` block when you may leave early."""

    def __init__(self, submission: Submission, transport: Transport, aborter: Aborter) -> None:
        self._transport = transport
        self._aborter = aborter
        self._left = threading.Event()
        # Between whoever iterates, and begins attempts, and whoever closes from elsewhere.
        self._lock = threading.RLock()
        super().__init__(submission, transport.addresses)
        self._start()

    def __next__(self) -> Chunk:
        while not self._ended:
            try:
                reply = next(self._call)
            except StopIteration:
                self._come_back(None)
            except grpc.RpcError as failure:
                self._come_back(_wire.failure_of(failure))
            else:
                if (chunk := self._take(reply)) is not None:
                    return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancel what is still being computed; harmless after the end."""
        self._end(leave=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        with self._lock:
            if not self._ended:
                self._call = self._transport.start(self._attempt())

    def _come_back(self, failure: Failure | None) -> None:
        """After a stream's end (None: in peace), open the next one if it has to go on."""
        with self._lock:
            if self._ended:  # closed by another thread meanwhile
                return
            if failure is None and not self._fold.complete:
                failure = self._cut_short()
            delay_s = None if failure is None else self._delay_s(failure)
            if delay_s is None:
                self._end()
                return
        if not self._left.wait(delay_s):
            self._start()

    def _end(self, error: OctavoError | None = None, *, leave: bool = False) -> None:
        with self._lock:
            super()._end(error, leave=leave)
        self._left.set()

    def _send_abort(self, call: _wire.UnaryCall[bool]) -> None:
        self._aborter.abort(call)


class AsyncChunkStream(_Answer, AsyncIterator[Chunk]):
    """An answer as it is made: `async for`, in an `async with` when you may leave early."""

    def __init__(self, submission: Submission, transport: AsyncTransport) -> None:
        self._transport = transport
        self._left = asyncio.Event()
        super().__init__(submission, transport.addresses)
        self._call = transport.start(self._attempt())

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                reply = await self._call.read()
            except asyncio.CancelledError:
                if self._ended and not _task_is_being_cancelled():
                    break  # closed by another task meanwhile
                raise
            except grpc.RpcError as failure:
                await self._come_back(_wire.failure_of(failure))
                continue
            if not isinstance(reply, inference_pb2.GenerateReply):  # grpc.aio.EOF
                await self._come_back(None)
            elif (chunk := self._take(reply)) is not None:
                return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel what is still being computed; harmless after the end."""
        self._end(leave=True)
        await asyncio.sleep(0)  # until that is on its way, also if the event loop ends now

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _come_back(self, failure: Failure | None) -> None:
        """After a stream's end (None: in peace), open the next one if it has to go on."""
        if self._ended:  # closed by another task meanwhile
            return
        if failure is None and not self._fold.complete:
            failure = self._cut_short()
        delay_s = None if failure is None else self._delay_s(failure)
        if delay_s is None:
            self._end()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), delay_s)
        if not self._ended:
            self._call = self._transport.start(self._attempt())

    def _end(self, error: OctavoError | None = None, *, leave: bool = False) -> None:
        super()._end(error, leave=leave)
        self._left.set()

    def _send_abort(self, call: _wire.UnaryCall[bool]) -> None:
        self._transport.abort(call)


def client_closed() -> UnavailableError:
    """What a client that was closed answers, and what its open streams end with."""
    return UnavailableError("this client has been closed", reason="CLIENT_CLOSED")


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
