"""The public Inference service."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import grpc.aio
from opentelemetry.trace import Span

from octavo.service.errors import ServiceError, abort
from octavo.service.telemetry import Telemetry, traceparent
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from scheduler_svc import convert, convert_records
from scheduler_svc.api_keys import ApiKeys, Metadata, NoApiKeys
from scheduler_svc.convert_records import CallerMessage
from scheduler_svc.core.events import RequestTimes
from scheduler_svc.core.params import InvalidRequestError, resolve
from scheduler_svc.core.sequence import Request
from scheduler_svc.loop import Engine
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.tenants import checked_inner_id, inner_id, outer_id
from scheduler_svc.tokenizer import NoChatTemplateError, Tokenizer

MAX_MESSAGES = 1024
# Shorter texts are tokenized where they arrive, in a millisecond at most. Longer ones, one at a
# time, beside the event loop: 10 MB take seconds, and nobody else's tokens wait for them.
MAX_INLINE_CHARS = 4096


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Checks and tokenizes requests, and streams what the engine makes of them.

    Every call is one of a tenant, which `api_keys` tells; a tenant's requests are its own: to
    everybody else they are not there.
    """

    def __init__(
        self, engine: Engine, telemetry: Telemetry, api_keys: ApiKeys | NoApiKeys | None = None
    ) -> None:
        self.api_keys = api_keys or NoApiKeys()
        self._engine = engine
        self._telemetry = telemetry
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self.tokenizer: Tokenizer | None = None

    def _tenant(self, context: grpc.aio.ServicerContext) -> str:
        """Who calls. Raises ServiceError UNAUTHENTICATED."""
        metadata: Metadata = tuple(context.invocation_metadata() or ())
        return self.api_keys.tenant_of(metadata)

    def _tokenizer(self) -> Tokenizer:
        self._engine.limits()
        assert self.tokenizer is not None
        return self.tokenizer

    async def _tokenized(
        self, num_chars: int, encode: Callable[[], tuple[int, ...]]
    ) -> tuple[int, ...]:
        if num_chars <= MAX_INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, encode)

    async def _encode(self, text: str) -> tuple[int, ...]:
        return await self._tokenized(len(text), partial(self._tokenizer().encode, text))

    # ---- generation ----

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateReply]:
        try:
            tenant = self._tenant(context)
            match request.WhichOneof("input"):
                case "prompt":
                    token_ids = await self._encode(request.prompt)
                case "prompt_token_ids":
                    token_ids = tuple(request.prompt_token_ids.ids)
                case _:
                    token_ids = ()
            async with aclosing(self._serve(tenant, request, token_ids, context)) as replies:
                async for reply in replies:
                    yield reply
        except ServiceError as error:
            await abort(context, error)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateReply]:
        try:
            tenant = self._tenant(context)
            token_ids = await self._encode_chat(request.messages)
            async with aclosing(self._serve(tenant, request, token_ids, context)) as replies:
                async for reply in replies:
                    yield reply
        except ServiceError as error:
            await abort(context, error)

    async def _serve(
        self,
        tenant: str,
        message: CallerMessage,
        token_ids: tuple[int, ...],
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[inference_pb2.GenerateReply, None]:
        """Replies of one request, from its record's safety to its last token.

        However this ends early (the caller cancels, vanishes, or its deadline passes), the
        request is aborted, or waits for its caller to come back, for as long as that one said.
        """
        self._check_model(message.model)
        span = self._open_span(context)
        started_ns = time.time_ns()
        mailbox = self._submit(tenant, message, token_ids, traceparent(span) if span else "")
        request = mailbox.request
        complete = False
        try:
            await mailbox.accepted()
            yield inference_pb2.GenerateReply(
                request_id=outer_id(request),
                seed=request.params.seed,
                num_prompt_tokens=len(token_ids),
            )
            while not complete:
                delivery = await mailbox.next()
                yield inference_pb2.GenerateReply(
                    deltas=[convert.delta_message(delta) for delta in delivery.deltas],
                    num_cached_tokens=delivery.num_cached_tokens,
                )
                complete = delivery.last
                if delivery.times is not None:
                    self._record_phases(request, delivery.times, started_ns)
        finally:
            self._engine.leave(request.request_id, mailbox, complete=complete)
            if span is not None:
                span.set_attribute("octavo.request_id", request.request_id)
                span.set_attribute("octavo.tenant", tenant)
                span.set_attribute("octavo.num_prompt_tokens", len(token_ids))
                span.set_attribute("octavo.aborted", not complete)
                span.end()

    def _submit(
        self, tenant: str, message: CallerMessage, token_ids: tuple[int, ...], parent: str
    ) -> Mailbox:
        request_id = checked_inner_id(tenant, message.request_id or f"req-{secrets.token_hex(8)}")
        params, max_tokens = convert.params_of(message.params)
        if not message.params.HasField("seed"):
            drawn_before = message.attachment.HasField("drawn_seed")
            seed = message.attachment.drawn_seed if drawn_before else secrets.randbits(63)
            params = replace(params, seed=seed)
        limits = self._engine.limits()
        try:
            params = resolve(
                params,
                max_tokens=max_tokens,
                prompt_token_ids=token_ids,
                limits=limits,
            )
            request = convert_records.request_of(
                tenant, request_id, token_ids, params, message, parent
            )
            received = convert_records.received_of(message.attachment, params, limits.vocab_size)
        except InvalidRequestError as error:
            raise ServiceError(error.reason, error.message) from error
        return self._engine.submit(request, received)

    def _check_model(self, asked: str) -> None:
        self._engine.limits()
        worker = self._engine.worker_description
        if worker is not None and asked and asked != worker.model_name:
            raise ServiceError(
                "UNKNOWN_MODEL", f"model {asked!r} is not served here; {worker.model_name!r} is"
            )

    async def _encode_chat(self, messages: Sequence[inference_pb2.ChatMessage]) -> tuple[int, ...]:
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ServiceError(
                "INVALID_PARAMETER",
                f"a chat of {len(messages)} messages; it must have 1 to {MAX_MESSAGES}",
            )
        turns: list[Mapping[str, str]] = [
            {"role": message.role, "content": message.content} for message in messages
        ]
        num_chars = sum(len(message.content) for message in messages)
        try:
            return await self._tokenized(num_chars, partial(self._tokenizer().encode_chat, turns))
        except NoChatTemplateError as error:
            raise ServiceError("NO_CHAT_TEMPLATE", str(error)) from error
        except ValueError as error:
            raise ServiceError("INVALID_PARAMETER", str(error)) from error

    # ---- traces ----

    def _open_span(self, context: grpc.aio.ServicerContext) -> Span | None:
        if not self._telemetry.enabled:
            return None
        parent = ""
        for key, value in context.invocation_metadata() or ():
            if key == "traceparent":
                parent = value if isinstance(value, str) else value.decode()
        return self._telemetry.start("scheduler.generate", parent=parent)

    def _record_phases(self, request: Request, times: RequestTimes, started_ns: int) -> None:
        """Queue, prefill and decode as spans of the request's own trace."""
        if not (self._telemetry.enabled and request.traceparent):
            return

        def at_ns(moment_s: float) -> int:
            return started_ns + int((moment_s - times.arrived_at_s) * 1e9)

        marks = [
            started_ns,
            at_ns(times.first_scheduled_at_s or times.arrived_at_s),
            at_ns(times.first_token_at_s or times.arrived_at_s),
            time.time_ns(),
        ]
        names = ("scheduler.queue", "scheduler.prefill", "scheduler.decode")
        for name, start_ns, end_ns in zip(names, marks, marks[1:], strict=False):
            self._telemetry.record(
                name, (start_ns, max(start_ns, end_ns)), parent=request.traceparent
            )

    # ---- the rest ----

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeReply:
        try:
            self._tenant(context)
            if request.WhichOneof("input") == "chat":
                return inference_pb2.TokenizeReply(
                    token_ids=await self._encode_chat(request.chat.messages)
                )
            return inference_pb2.TokenizeReply(token_ids=await self._encode(request.text))
        except ServiceError as error:
            await abort(context, error)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.AbortReply:
        try:
            request_id = inner_id(self._tenant(context), request.request_id)
            secret_digest = convert_records.secret_digest_of(request.attach_secret)
            aborted = self._engine.abort(request_id, secret_digest)
            return inference_pb2.AbortReply(aborted=aborted)
        except ServiceError as error:
            await abort(context, error)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ModelDescription:
        try:
            self._tenant(context)
            tokenizer = self._tokenizer()
        except ServiceError as error:
            await abort(context, error)
        worker = self._engine.worker_description
        assert worker is not None
        return inference_pb2.ModelDescription(
            name=worker.model_name,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            eos_token_ids=worker.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            geometry=worker.geometry or types_pb2.PoolGeometry(),
            attention_backend=worker.attention_backend,
        )

    async def ListRequests(
        self, request: inference_pb2.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListRequestsReply:
        try:
            tenant = self._tenant(context)
            groups = self._engine.machine.groups.values()
        except ServiceError as error:
            await abort(context, error)
        return inference_pb2.ListRequestsReply(
            requests=[
                inference_pb2.RequestSummary(
                    request_id=outer_id(group.request),
                    status=group.status.value,
                    num_prompt_tokens=len(group.request.prompt_token_ids),
                    num_candidates=group.request.params.n,
                    num_output_tokens=sum(len(s.output_token_ids) for s in group.sequences),
                )
                for group in groups
                if group.request.tenant == tenant
            ]
        )
