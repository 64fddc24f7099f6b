"""The clients: `Client` for threads and scripts, `AsyncClient` for asyncio.

They offer the same calls with the same meaning. Each is a thin shell over `octavo._wire`,
which builds the requests, folds the replies and maps the errors for both.

Every call has a deadline and raises a subclass of `OctavoError`. Leaving a stream early, by
`close()`, by the end of its `with` block or by dropping the last reference to it, cancels the
request, and the server stops computing it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from opentelemetry.trace import Tracer

from octavo import _tracing, _wire
from octavo._wire import Conversation, Prompt, UnaryCall
from octavo.errors import InvalidArgumentError, OctavoError, UnavailableError
from octavo.service.server import CHANNEL_OPTIONS, AddressError, check_address
from octavo.types import (
    Chunk,
    Generation,
    Health,
    Message,
    ModelDescription,
    RequestSummary,
    SamplingParams,
)
from octavo.v1 import inference_pb2, inference_pb2_grpc

GENERATE_TIMEOUT_S = 600.0
UNARY_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")


def checked_address(address: str) -> str:
    """`unix:/path` or `host:port`; raises InvalidArgumentError with what is wrong."""
    try:
        return check_address(address)
    except AddressError as error:
        raise InvalidArgumentError(str(error), reason="INVALID_PARAMETER") from error


class _Stubs:
    """The stubs by the names `UnaryCall.stub` uses."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    def method(self, call: UnaryCall[Any]) -> Any:
        return getattr(getattr(self, call.stub), call.method)


class _StreamState:
    """What both kinds of stream keep: the call, the fold, the span, and whether it ended."""

    def __init__(self, call: Any, fold: _wire.GenerationFold, span: _tracing.RequestSpan) -> None:
        self._call = call
        self._fold = fold
        self._span = span
        self._ended = False

    @property
    def request_id(self) -> str:
        """The id to abort the request with; known before the first chunk."""
        return self._fold.request_id

    def generation(self) -> Generation:
        """Everything received, as one result. Raises RpcError before every candidate ended."""
        return self._fold.generation()

    def _end(self, error: OctavoError | None = None, *, cancelled: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        if error is not None or cancelled:
            self._call.cancel()
        self._span.end(
            error,
            num_prompt_tokens=self._fold.num_prompt_tokens,
            num_output_tokens=self._fold.num_output_tokens,
            cancelled=cancelled,
        )

    def _take(self, reply: Any) -> Chunk:
        try:
            return self._fold.add(reply)
        except OctavoError as error:
            self._end(error)
            raise

    def _failed(self, failure: grpc.RpcError) -> OctavoError:
        error = _wire.error_of(failure)
        self._end(error)
        return error

    def __del__(self) -> None:
        self._end(cancelled=True)


class ChunkStream(_StreamState, Iterator[Chunk]):
    """An answer as it is made: iterate over it, in a `with` block when you may leave early."""

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            reply = next(self._call)
        except StopIteration:
            self._end()
            raise
        except grpc.RpcError as failure:
            if self._ended:  # closed by another thread meanwhile
                raise StopIteration from None
            raise self._failed(failure) from failure
        return self._take(reply)

    def close(self) -> None:
        """Cancel what is still being computed; harmless after the end."""
        self._end(cancelled=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncChunkStream(_StreamState, AsyncIterator[Chunk]):
    """An answer as it is made: `async for`, in an `async with` when you may leave early."""

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            reply = await self._call.read()
        except asyncio.CancelledError:
            if self._ended and not _task_is_being_cancelled():
                raise StopAsyncIteration from None  # closed by another task meanwhile
            raise
        except grpc.RpcError as failure:
            raise self._failed(failure) from failure
        if not isinstance(reply, inference_pb2.GenerateReply):  # grpc.aio.EOF
            self._end()
            raise StopAsyncIteration
        return self._take(reply)

    async def aclose(self) -> None:
        """Cancel what is still being computed; harmless after the end."""
        self._end(cancelled=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class _Connection:
    """What both clients keep: the address, the tracer, and whether `close` was called."""

    def __init__(self, address: str, *, tracer: Tracer | None = None) -> None:
        self.address = checked_address(address)
        self._tracer = tracer
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this client has been closed", reason="CLIENT_CLOSED")


class Client(_Connection):
    """A connection to an Octavo server, safe to share between threads.

    address: `unix:/path` or `host:port`. Raises InvalidArgumentError for anything else;
        whether somebody answers there shows at the first call.
    tracer: where the span of each request goes; by default OpenTelemetry's global provider,
        and nowhere when there is none.
    """

    def __init__(self, address: str, *, tracer: Tracer | None = None) -> None:
        super().__init__(address, tracer=tracer)
        self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stubs = _Stubs(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Complete a text or a list of token ids, and return when every candidate has ended."""
        with self.stream(prompt, params, request_id=request_id, timeout_s=timeout_s) as chunks:
            return _drain(chunks)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> ChunkStream:
        """Like `generate`, chunk by chunk."""
        request = _wire.generate_request(prompt, params, request_id or _new_request_id())
        return self._stream("Generate", request, params, timeout_s)

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Answer a conversation (or one user message, given as a string)."""
        with self.stream_chat(
            messages, params, request_id=request_id, timeout_s=timeout_s
        ) as chunks:
            return _drain(chunks)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> ChunkStream:
        """Like `chat`, chunk by chunk."""
        request = _wire.chat_request(messages, params, request_id or _new_request_id())
        return self._stream("Chat", request, params, timeout_s)

    def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """Stop a request from anywhere. False: no such request is live; it may have ended."""
        return self._unary(_wire.abort_call(request_id), timeout_s)

    def health(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> Health:
        """What the server says of itself. Raises UnavailableError when nobody answers."""
        return self._unary(_wire.health_call(), timeout_s)

    def model(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> ModelDescription:
        """The served model: name, lengths, KV pool."""
        return self._unary(_wire.model_call(), timeout_s)

    def tokenize(
        self, text: str | list[Message], *, timeout_s: float = UNARY_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation put through the chat template."""
        return self._unary(_wire.tokenize_call(text), timeout_s)

    def list_requests(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> tuple[RequestSummary, ...]:
        """The live requests."""
        return self._unary(_wire.list_requests_call(), timeout_s)

    def close(self) -> None:
        """Cancel what is open and close the connection."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        self._check_open()
        try:
            reply = self._stubs.method(call)(call.request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise _wire.error_of(failure) from failure
        return call.read(reply)

    def _stream(
        self, method: str, request: Any, params: SamplingParams | None, timeout_s: float
    ) -> ChunkStream:
        self._check_open()
        fold = _wire.GenerationFold(request.request_id, _wire.num_candidates(params))
        span = _tracing.start(self._tracer, method, request.request_id)
        start = getattr(self._stubs.inference, method)
        call = start(request, timeout=timeout_s, metadata=span.metadata)
        return ChunkStream(call, fold, span)


class AsyncClient(_Connection):
    """`Client` for asyncio: use it from the event loop of its first call."""

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # Made at the first call: a channel belongs to the event loop it is made in.
        return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)

    @cached_property
    def _stubs(self) -> _Stubs:
        return _Stubs(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Complete a text or a list of token ids, and return when every candidate has ended."""
        stream = self.stream(prompt, params, request_id=request_id, timeout_s=timeout_s)
        async with stream as chunks:
            return await _drain_async(chunks)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> AsyncChunkStream:
        """Like `generate`, chunk by chunk."""
        request = _wire.generate_request(prompt, params, request_id or _new_request_id())
        return self._stream("Generate", request, params, timeout_s)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> Generation:
        """Answer a conversation (or one user message, given as a string)."""
        stream = self.stream_chat(messages, params, request_id=request_id, timeout_s=timeout_s)
        async with stream as chunks:
            return await _drain_async(chunks)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
    ) -> AsyncChunkStream:
        """Like `chat`, chunk by chunk."""
        request = _wire.chat_request(messages, params, request_id or _new_request_id())
        return self._stream("Chat", request, params, timeout_s)

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> bool:
        """Stop a request from anywhere. False: no such request is live; it may have ended."""
        return await self._unary(_wire.abort_call(request_id), timeout_s)

    async def health(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> Health:
        """What the server says of itself. Raises UnavailableError when nobody answers."""
        return await self._unary(_wire.health_call(), timeout_s)

    async def model(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> ModelDescription:
        """The served model: name, lengths, KV pool."""
        return await self._unary(_wire.model_call(), timeout_s)

    async def tokenize(
        self, text: str | list[Message], *, timeout_s: float = UNARY_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation put through the chat template."""
        return await self._unary(_wire.tokenize_call(text), timeout_s)

    async def list_requests(
        self, *, timeout_s: float = UNARY_TIMEOUT_S
    ) -> tuple[RequestSummary, ...]:
        """The live requests."""
        return await self._unary(_wire.list_requests_call(), timeout_s)

    async def aclose(self) -> None:
        """Cancel what is open and close the connection."""
        self._closed = True
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        self._check_open()
        try:
            reply = await self._stubs.method(call)(call.request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise _wire.error_of(failure) from failure
        return call.read(reply)

    def _stream(
        self, method: str, request: Any, params: SamplingParams | None, timeout_s: float
    ) -> AsyncChunkStream:
        self._check_open()
        fold = _wire.GenerationFold(request.request_id, _wire.num_candidates(params))
        span = _tracing.start(self._tracer, method, request.request_id)
        start = getattr(self._stubs.inference, method)
        call = start(request, timeout=timeout_s, metadata=span.metadata)
        return AsyncChunkStream(call, fold, span)


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _new_request_id() -> str:
    return uuid.uuid4().hex


def _drain(chunks: ChunkStream) -> Generation:
    for _ in chunks:
        pass
    return chunks.generation()


async def _drain_async(chunks: AsyncChunkStream) -> Generation:
    async for _ in chunks:
        pass
    return chunks.generation()
