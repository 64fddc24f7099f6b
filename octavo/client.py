"""The clients: `Client` for threads and scripts, `AsyncClient` for asyncio.

They offer the same calls with the same meaning. Each is a thin shell over `octavo._wire`,
which builds the requests and maps the errors for both, and over `octavo._streams`, which opens
another stream when one breaks.

Every call has a deadline and raises a subclass of `OctavoError`.

A request outlives the processes that work on it: when its stream breaks, because a server died,
stopped or lost its place, the client comes back to the request, at whichever server has it, and
goes on after what was received. No chunk comes twice and none is left out. It keeps trying until
the call's `timeout_s` is over, and then raises the last error; a request that no server has
accepted yet is tried for `connect_timeout_s` only. A server keeps a request whose caller is away
for `detach_ttl_s` and then aborts it.

cache_salt separates what would be shared otherwise: the KV of a prompt's beginning is found again
by requests of the same caller with the same salt (64 bytes at most), and by nobody else's.

priority, -8 to 8, moves a request among those of the same caller: each step counts as having come
32 requests earlier.

Leaving a stream early, by `close()`, by the end of its `with` block or by dropping the last
reference to it, aborts the request, and the server stops computing it.
"""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Self, TypeVar

from opentelemetry.trace import Tracer

from octavo import _tracing, _wire
from octavo._reconnect import Addresses, Patience
from octavo._streams import (
    AsyncChunkStream,
    ChunkStream,
    Submission,
    WireRequest,
    client_closed,
)
from octavo._transport import Aborter, AsyncTransport, Transport
from octavo._wire import Conversation, Prompt, UnaryCall
from octavo.errors import InvalidArgumentError
from octavo.service.server import AddressError, check_address
from octavo.types import (
    Generation,
    Health,
    Message,
    ModelDescription,
    RequestSummary,
    SamplingParams,
)

__all__ = ["AsyncChunkStream", "AsyncClient", "ChunkStream", "Client"]

GENERATE_TIMEOUT_S: Final = 600.0
UNARY_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5.0
DETACH_TTL_S: Final = 10.0

Reply = TypeVar("Reply")


def checked_address(address: str) -> str:
    """`unix:/path` or `host:port`; raises InvalidArgumentError with what is wrong."""
    try:
        return check_address(address)
    except AddressError as error:
        raise InvalidArgumentError(str(error), reason="INVALID_PARAMETER") from error


def checked_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """One or several, each as `checked_address` has it; a string may hold several, with commas."""
    several = address.split(",") if isinstance(address, str) else address
    addresses = tuple(dict.fromkeys(checked_address(each.strip()) for each in several))
    if not addresses:
        raise InvalidArgumentError(
            "there is no address; at least one is needed", reason="INVALID_PARAMETER"
        )
    return addresses


class _Connection:
    """What both clients keep, and how they make a request."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tracer: Tracer | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        self.addresses = checked_addresses(address)
        self._turn = Addresses(self.addresses)
        self._authorization = _wire.authorization(api_key)
        self._tracer = tracer
        self._connect_timeout_s = connect_timeout_s
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise client_closed()

    def _submission(
        self,
        method: str,
        request: WireRequest,
        params: SamplingParams | None,
        timeout_s: float,
        detach_ttl_s: float,
    ) -> Submission:
        self._check_open()
        _wire.attach(request, secrets.token_bytes(_wire.SECRET_BYTES), detach_ttl_s)
        return Submission(
            method,
            request,
            _wire.num_candidates(params),
            Patience(timeout_s, self._connect_timeout_s),
            _tracing.start(self._tracer, method, request.request_id),
        )


class Client(_Connection):
    """A connection to an Octavo server, safe to share between threads.

    address: `unix:/path` or `host:port`; several, in a list or with commas, are the servers of
        one system, of which one has the requests. Raises InvalidArgumentError for anything else;
        whether somebody answers there shows at the first call.
    tracer: where the span of each request goes; by default OpenTelemetry's global provider,
        and nowhere when there is none.
    connect_timeout_s: how long a request is tried until a server accepts it. 0: once.
    api_key: what the server knows its caller by, where it asks for that.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tracer: Tracer | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        super().__init__(
            address, tracer=tracer, connect_timeout_s=connect_timeout_s, api_key=api_key
        )
        self._transport = Transport(self._turn, self._authorization)
        self._streams: weakref.WeakSet[ChunkStream] = weakref.WeakSet()

    @cached_property
    def _aborter(self) -> Aborter:
        return Aborter(self._transport)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Complete a text or a list of token ids, and return when every candidate has ended."""
        with self.stream(
            prompt,
            params,
            request_id=request_id,
            timeout_s=timeout_s,
            detach_ttl_s=detach_ttl_s,
            cache_salt=cache_salt,
            priority=priority,
        ) as chunks:
            return _drain(chunks)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> ChunkStream:
        """Like `generate`, chunk by chunk."""
        request = _wire.generate_request(
            prompt, params, request_id or _new_request_id(), cache_salt, priority
        )
        return self._begin(self._submission("Generate", request, params, timeout_s, detach_ttl_s))

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Answer a conversation (or one user message, given as a string)."""
        with self.stream_chat(
            messages,
            params,
            request_id=request_id,
            timeout_s=timeout_s,
            detach_ttl_s=detach_ttl_s,
            cache_salt=cache_salt,
            priority=priority,
        ) as chunks:
            return _drain(chunks)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> ChunkStream:
        """Like `chat`, chunk by chunk."""
        request = _wire.chat_request(
            messages, params, request_id or _new_request_id(), cache_salt, priority
        )
        return self._begin(self._submission("Chat", request, params, timeout_s, detach_ttl_s))

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
        """Abort what is open and close the connection."""
        self._closed = True
        for stream in list(self._streams):
            stream.end_with_client()
        if "_aborter" in self.__dict__:
            self._aborter.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        self._check_open()
        return self._transport.unary(call, timeout_s)

    def _begin(self, submission: Submission) -> ChunkStream:
        stream = ChunkStream(submission, self._transport, self._aborter)
        self._streams.add(stream)
        return stream


class AsyncClient(_Connection):
    """`Client` for asyncio: use it from the event loop of its first call.

    Requests at a time to one server share a stream, where the server can do that: what a step has
    made for all of them comes in one message.
    """

    @cached_property
    def _transport(self) -> AsyncTransport:
        # Made at the first call: a channel belongs to the event loop it is made in.
        return AsyncTransport(self._turn, self._authorization)

    @cached_property
    def _streams(self) -> weakref.WeakSet[AsyncChunkStream]:
        return weakref.WeakSet()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Complete a text or a list of token ids, and return when every candidate has ended."""
        stream = self.stream(
            prompt,
            params,
            request_id=request_id,
            timeout_s=timeout_s,
            detach_ttl_s=detach_ttl_s,
            cache_salt=cache_salt,
            priority=priority,
        )
        async with stream as chunks:
            return await _drain_async(chunks)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncChunkStream:
        """Like `generate`, chunk by chunk."""
        request = _wire.generate_request(
            prompt, params, request_id or _new_request_id(), cache_salt, priority
        )
        return self._begin(self._submission("Generate", request, params, timeout_s, detach_ttl_s))

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Answer a conversation (or one user message, given as a string)."""
        stream = self.stream_chat(
            messages,
            params,
            request_id=request_id,
            timeout_s=timeout_s,
            detach_ttl_s=detach_ttl_s,
            cache_salt=cache_salt,
            priority=priority,
        )
        async with stream as chunks:
            return await _drain_async(chunks)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float = GENERATE_TIMEOUT_S,
        detach_ttl_s: float = DETACH_TTL_S,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncChunkStream:
        """Like `chat`, chunk by chunk."""
        request = _wire.chat_request(
            messages, params, request_id or _new_request_id(), cache_salt, priority
        )
        return self._begin(self._submission("Chat", request, params, timeout_s, detach_ttl_s))

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
        """Abort what is open and close the connection."""
        self._closed = True
        for stream in list(self._streams):
            stream.end_with_client()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        self._check_open()
        return await self._transport.unary(call, timeout_s)

    def _begin(self, submission: Submission) -> AsyncChunkStream:
        stream = AsyncChunkStream(submission, self._transport)
        self._streams.add(stream)
        return stream


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
