"""Many calls over one stream, and the news of all of them in one message.

A call costs a task while it begins, and none afterwards: its mailbox says when it has news, and the
stream's one writer takes what all have by the time the message before is on its way. Behind a
reader that is slow, news merge in the mailboxes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import grpc.aio

from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2
from scheduler_svc import convert
from scheduler_svc.call import Call
from scheduler_svc.convert_records import CallerMessage
from scheduler_svc.core.events import Emit

# Calls of one stream that have not ended.
MAX_CALLS: Final = 1024
# A message is sent once it is estimated to have so much; what is left goes into the next.
# Far below what gRPC takes, since the estimate is one, and a single candidate is not split.
MAX_REPLY_BYTES: Final = 1 << 20
# The parts of an entry that are not text or token ids, and what those may take at most.
ENTRY_BYTES: Final = 64
BYTES_PER_CHAR: Final = 4
BYTES_PER_TOKEN_ID: Final = 5

# Enters a request, for a caller whose span is the one named. Raises ServiceError.
Begin = Callable[[CallerMessage, str], Awaitable[Call]]


class _StreamedCall:
    """One call, as far as its stream is concerned."""

    __slots__ = ("announced", "beginning", "call", "call_id", "error", "left", "noted", "stream")

    def __init__(self, stream: CallStream, call_id: int, error: ServiceError | None = None) -> None:
        self.stream = stream
        self.call_id = call_id
        # What it was refused with before it had a mailbox.
        self.error = error
        self.beginning: asyncio.Task[None] | None = None
        self.call: Call | None = None
        # It waits in the stream's list of those with news.
        self.noted = False
        # Its first reply was sent.
        self.announced = False
        # Of what was taken from the mailbox, that for which there was no room in the last message.
        self.left: Emit | None = None

    def note(self) -> None:
        """There may be something to write."""
        if not self.noted:
            self.noted = True
            self.stream.noted.append(self)
            self.stream.news.set()

    def write_to(self, message: inference_pb2.MultiplexReply) -> int:
        """Add what is new to `message`. Returns about how many bytes that are."""
        try:
            return self._write_news(message)
        except ServiceError as error:
            status = error.to_status()
            end = inference_pb2.CallEnd(
                error=inference_pb2.CallError(
                    code=status.code, message=status.message, details=status.SerializeToString()
                )
            )
            self._write_end(message, end, complete=False)
            return end.ByteSize()

    def _write_news(self, message: inference_pb2.MultiplexReply) -> int:
        if self.error is not None:
            raise self.error
        if self.call is None:  # it was cancelled meanwhile
            return 0
        if not self.announced:
            return self._announce(message, self.call)
        mailbox = self.call.mailbox
        emit, self.left = self.left or mailbox.take(), None
        if emit is None:
            return 0
        news = message.calls.add()
        news.call_id = self.call_id
        num_bytes = self._write_emit(news.reply, emit)
        if self.left is not None:
            self.note()
        elif self.call.sent(emit):
            self._write_end(message, inference_pb2.CallEnd(), complete=True)
        elif mailbox.has_news:
            self.note()
        return num_bytes

    def _announce(self, message: inference_pb2.MultiplexReply, call: Call) -> int:
        """The first reply, once the request is accepted."""
        if not call.mailbox.accepted:
            if call.mailbox.error is not None:
                raise call.mailbox.error
            return 0
        self.announced = True
        message.calls.add(call_id=self.call_id, reply=call.header())
        if call.mailbox.has_news:  # for the next message: a message has one reply of each call
            self.note()
        return ENTRY_BYTES

    def _write_emit(self, reply: inference_pb2.GenerateReply, emit: Emit) -> int:
        """Fill `reply`; `left` is what would make it too big."""
        reply.SetInParent()  # also where it says nothing but that this is all
        if emit.num_cached_tokens is not None:
            reply.num_cached_tokens = emit.num_cached_tokens
        num_bytes = 0
        for place, delta in enumerate(emit.deltas):
            if num_bytes >= MAX_REPLY_BYTES:
                self.left = emit._replace(deltas=emit.deltas[place:], num_cached_tokens=None)
                break
            convert.write_delta(reply.deltas.add(), delta)
            num_bytes += (
                ENTRY_BYTES
                + BYTES_PER_CHAR * len(delta.text)
                + BYTES_PER_TOKEN_ID * len(delta.token_ids)
            )
        return num_bytes

    def _write_end(
        self, message: inference_pb2.MultiplexReply, end: inference_pb2.CallEnd, *, complete: bool
    ) -> None:
        message.calls.add(call_id=self.call_id, end=end)
        self.stream.ending.append((self, complete))


class CallStream:
    """The calls of one Multiplex stream."""

    def __init__(self, begin: Begin, context: grpc.aio.ServicerContext) -> None:
        self._begin = begin
        self._context = context
        self._calls: dict[int, _StreamedCall] = {}
        # Those that may have something to write, in the order in which they are served; each once.
        self.noted: deque[_StreamedCall] = deque()
        self.news = asyncio.Event()
        # Those whose end is in the message that is being written, and whether they are complete.
        self.ending: list[tuple[_StreamedCall, bool]] = []
        # More refusals than that wait to be read: nothing more is read until they are.
        self._has_room = asyncio.Event()
        # The caller begins nothing more.
        self._closed = False
        self._refusal: ServiceError | None = None

    async def run(self) -> None:
        """Until the caller has closed its side and every call has ended.

        Raises ServiceError for a caller that broke the rules of the stream. However this ends, no
        call is left.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(tasks))
                # It says that the stream is taken, for callers that have to know that first.
                await self._context.write(inference_pb2.MultiplexReply())
                await self._write()
                reading.cancel()
        finally:
            for call in list(self._calls.values()):
                self._leave(call, complete=False)
        if self._refusal is not None:
            raise self._refusal

    # ---- what comes ----

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while self._refusal is None:
            message = await self._context.read()
            if not isinstance(message, inference_pb2.MultiplexRequest):  # grpc.aio.EOF
                break
            self._take(message, tasks)
            while len(self.noted) > MAX_CALLS:
                self._has_room.clear()
                await self._has_room.wait()
        self._closed = True
        self.news.set()

    def _take(self, message: inference_pb2.MultiplexRequest, tasks: asyncio.TaskGroup) -> None:
        call_id, known = message.call_id, self._calls.get(message.call_id)
        match message.WhichOneof("action"):
            case "cancel":
                if known is not None:
                    self._leave(known, complete=False)
            case None:
                self._refusal = ServiceError(
                    "INVALID_PARAMETER",
                    f"the message of call {call_id} has no action; it must have one of generate,"
                    " chat and cancel",
                )
            case _ if known is not None:
                self._refusal = ServiceError(
                    "INVALID_PARAMETER",
                    f"call_id is {call_id}, which is the id of a call that has not ended; each"
                    " call of a stream must have another one",
                )
            case _ if len(self._calls) >= MAX_CALLS:
                error = ServiceError(
                    "TOO_MANY_CALLS",
                    f"the stream has {len(self._calls)} calls that have not ended; at most"
                    f" {MAX_CALLS} are allowed",
                )
                _StreamedCall(self, call_id, error).note()
            case _:
                call = self._calls[call_id] = _StreamedCall(self, call_id)
                call.beginning = tasks.create_task(self._begin_call(call, message))

    async def _begin_call(
        self, call: _StreamedCall, message: inference_pb2.MultiplexRequest
    ) -> None:
        request = message.chat if message.HasField("chat") else message.generate
        try:
            call.call = await self._begin(request, message.traceparent)
        except ServiceError as error:
            call.error = error
        else:
            call.call.mailbox.on_news = call.note
        call.note()

    # ---- what goes ----

    async def _write(self) -> None:
        while not self._is_over():
            await self.news.wait()
            self.news.clear()
            while self.noted and self._refusal is None:
                message = self._message()
                if message.calls:
                    await self._context.write(message)
                for call, complete in self.ending:
                    self._leave(call, complete=complete)
                self.ending.clear()

    def _is_over(self) -> bool:
        return self._refusal is not None or (self._closed and not self._calls and not self.noted)

    def _message(self) -> inference_pb2.MultiplexReply:
        message = inference_pb2.MultiplexReply()
        num_bytes = 0
        for _ in range(len(self.noted)):  # a call that is noted meanwhile is for the next one
            call = self.noted.popleft()
            call.noted = False
            num_bytes += call.write_to(message)
            if num_bytes >= MAX_REPLY_BYTES:
                break
        self._has_room.set()
        return message

    def _leave(self, call: _StreamedCall, *, complete: bool) -> None:
        """The caller has everything of it, or wants no more; once."""
        if self._calls.get(call.call_id) is not call:
            return
        del self._calls[call.call_id]
        if call.beginning is not None:
            call.beginning.cancel()
        if call.call is not None:
            call.call.leave(complete=complete)
            call.call = None
        call.error = None
        if self._closed:
            self.news.set()
