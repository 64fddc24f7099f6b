"""The public Inference service."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import grpc.aio

from octavo.service.errors import ServiceError, abort
from octavo.service.telemetry import Telemetry, traceparent
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from scheduler_svc import convert, convert_records
from scheduler_svc.api_keys import ApiKeys, Metadata, NoApiKeys
from scheduler_svc.call import Call
from scheduler_svc.convert_records import CallerMessage
from scheduler_svc.core.params import InvalidRequestError, resolve
from scheduler_svc.loop import Engine
from scheduler_svc.mailbox import Mailbox, Waiter
from scheduler_svc.multiplex import CallStream
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
        return self.api_keys.tenant_of(_metadata_of(context))

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

    async def _serve(
        self, request: CallerMessage, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateReply]:
        """Replies of one request, from its record's safety to its last token.

        However this ends early (the caller cancels, vanishes, or its deadline passes), the
        request is aborted, or waits for its caller to come back, for as long as that one said.
        """
        try:
            metadata = _metadata_of(context)
            call = await self._begin(request, metadata, _traceparent_in(metadata))
            waiter, complete = Waiter(call.mailbox), False
            try:
                await waiter.accepted()
                yield call.header()
                while not complete:
                    emit = await waiter.next()
                    reply = inference_pb2.GenerateReply(num_cached_tokens=emit.num_cached_tokens)
                    for delta in emit.deltas:
                        convert.write_delta(reply.deltas.add(), delta)
                    yield reply
                    complete = call.sent(emit)
            finally:
                call.leave(complete=complete)
        except ServiceError as error:
            await abort(context, error)

    # They differ in what is sent to begin with.
    Generate = _serve
    Chat = _serve

    async def Multiplex(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        metadata = _metadata_of(context)

        async def begin(request: CallerMessage, parent: str) -> Call:
            return await self._begin(request, metadata, parent)

        try:
            self._tenant(context)
            await CallStream(begin, context).run()
        except ServiceError as error:
            await abort(context, error)

    async def _begin(self, message: CallerMessage, metadata: Metadata, parent: str) -> Call:
        """Check, tokenize and enter what somebody asks for. parent: the caller's span.

        Raises ServiceError for what is refused at once.
        """
        tenant = self.api_keys.tenant_of(metadata)
        token_ids = await self._token_ids_of(message)
        self._check_model(message.model)
        span = None
        if self._telemetry.enabled:
            span = self._telemetry.start("scheduler.generate", parent=parent)
        started_ns = time.time_ns()
        mailbox = self._submit(tenant, message, token_ids, traceparent(span) if span else "")
        return Call(self._engine, self._telemetry, mailbox, span, started_ns)

    async def _token_ids_of(self, message: CallerMessage) -> tuple[int, ...]:
        if isinstance(message, inference_pb2.ChatRequest):
            return await self._encode_chat(message.messages)
        match message.WhichOneof("input"):
            case "prompt":
                return await self._encode(message.prompt)
            case "prompt_token_ids":
                return tuple(message.prompt_token_ids.ids)
        return ()

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


def _metadata_of(context: grpc.aio.ServicerContext) -> Metadata:
    return tuple(context.invocation_metadata() or ())


def _traceparent_in(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == "traceparent":
            return value if isinstance(value, str) else value.decode()
    return ""
