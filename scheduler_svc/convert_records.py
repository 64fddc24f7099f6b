"""Between the wire and the scheduler's core: what survives a scheduler, and what callers bring."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence

from octavo.service.columns import I32, U64, unpack
from octavo.v1 import inference_pb2, kvmem_pb2, types_pb2, worker_pb2
from scheduler_svc.convert import params_message, params_of, step_result_of
from scheduler_svc.core import events, ops
from scheduler_svc.core.params import PRIORITY, InvalidRequestError, SamplingParams
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason

MAX_ATTACH_SECRET_BYTES = 64
MAX_DETACH_TTL_MS = 600_000
MAX_CACHE_SALT_BYTES = 64
DIGEST_BYTES = 16
STATE_WORD_BYTES = 8

CallerMessage = inference_pb2.GenerateRequest | inference_pb2.ChatRequest


# ---- what callers bring ----


def request_of(
    tenant: str,
    request_id: str,
    token_ids: tuple[int, ...],
    params: SamplingParams,
    message: CallerMessage,
    traceparent: str,
) -> Request:
    """A request of `tenant` with its spec: what another scheduler would need beside the prompt,
    which the record holds anyway; the seed is drawn already. request_id: the one it has inside.
    Raises InvalidRequestError."""
    attachment = message.attachment
    if len(attachment.secret) > MAX_ATTACH_SECRET_BYTES:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"attachment.secret has {len(attachment.secret)} bytes; at most"
            f" {MAX_ATTACH_SECRET_BYTES} are allowed",
        )
    if attachment.detach_ttl_ms > MAX_DETACH_TTL_MS:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"attachment.detach_ttl_ms is {attachment.detach_ttl_ms}; it must be in"
            f" [0, {MAX_DETACH_TTL_MS}]",
        )
    num_salt_bytes = len(message.cache_salt.encode())
    if num_salt_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"cache_salt has {num_salt_bytes} bytes; at most {MAX_CACHE_SALT_BYTES} are allowed",
        )
    if message.priority not in PRIORITY:
        raise InvalidRequestError(
            "INVALID_PARAMETER", f"priority is {message.priority}; it must be in {PRIORITY}"
        )
    secret_digest = secret_digest_of(attachment.secret)
    detach_ttl_ms = attachment.detach_ttl_ms if secret_digest else 0
    spec = types_pb2.RequestSpec(
        params=params_message(params),
        attach_secret_digest=secret_digest,
        detach_ttl_ms=detach_ttl_ms,
        traceparent=traceparent,
        priority=message.priority,
    )
    return Request(
        request_id,
        token_ids,
        params,
        tenant=tenant,
        cache_salt=message.cache_salt,
        priority=message.priority,
        spec=spec.SerializeToString(deterministic=True),
        digest=_content_digest(message),
        traceparent=traceparent,
        attach_secret_digest=secret_digest,
        detach_ttl_ms=detach_ttl_ms,
    )


def _content_digest(message: CallerMessage) -> bytes:
    """Stands for what a caller asked for: the message less what changes when it comes back."""
    content = copy.deepcopy(message)
    content.ClearField("attachment")
    return _digest(content.SerializeToString(deterministic=True))


def secret_digest_of(secret: bytes) -> bytes:
    """What is kept of an attach secret; empty for none."""
    return _digest(secret) if secret else b""


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def received_of(
    attachment: inference_pb2.Attachment, params: SamplingParams, vocab_size: int
) -> dict[int, events.Received]:
    """What a caller says it has, by candidate. Raises InvalidRequestError."""
    received = {}
    for candidate in attachment.received:
        if candidate.index >= params.n or candidate.index in received:
            raise InvalidRequestError(
                "INVALID_PARAMETER",
                f"attachment.received names candidate {candidate.index}; each must be named once"
                f" and be in [0, {params.n - 1}]",
            )
        _check_received(candidate, params, vocab_size)
        reason = candidate.finish_reason
        received[candidate.index] = events.Received(
            tuple(candidate.token_ids),
            FinishReason(reason) if reason else None,
            candidate.cumulative_logprob,
        )
    return received


def _check_received(
    candidate: inference_pb2.ReceivedCandidate, params: SamplingParams, vocab_size: int
) -> None:
    if len(candidate.token_ids) > params.max_tokens:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"attachment.received has {len(candidate.token_ids)} tokens of candidate"
            f" {candidate.index}; max_tokens is {params.max_tokens}",
        )
    for token_id in candidate.token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                "TOKEN_OUT_OF_VOCABULARY",
                f"attachment.received has the token id {token_id}; ids are in"
                f" [0, {vocab_size - 1}]",
            )


# ---- what the memory service has ----


def adopted_of(message: kvmem_pb2.AdoptedRequest) -> ops.AdoptedRequest:
    """A record as the core takes it."""
    spec = types_pb2.RequestSpec.FromString(message.request_spec)
    params, max_tokens = params_of(spec.params)
    assert max_tokens is not None, f"{message.request_id}: a spec without max_tokens"
    request = Request(
        message.request_id,
        tuple(unpack(message.prompt_token_ids, I32, "prompt_token_ids").tolist()),
        SamplingParams(**{**_fields_of(params), "max_tokens": max_tokens}),
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        priority=spec.priority,
        spec=message.request_spec,
        digest=message.request_digest,
        traceparent=spec.traceparent,
        attach_secret_digest=spec.attach_secret_digest,
        detach_ttl_ms=spec.detach_ttl_ms,
    )
    sequences = tuple(map(_adopted_sequence, message.sequences))
    return ops.AdoptedRequest(request, message.arrival_number, sequences)


def _fields_of(params: SamplingParams) -> Mapping[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def _adopted_sequence(message: kvmem_pb2.AdoptedSequence) -> ops.AdoptedSequence:
    finished = message.status == kvmem_pb2.SEQUENCE_STATUS_FINISHED
    reason = FinishReason(message.finish_reason) if message.finish_reason else None
    return ops.AdoptedSequence(
        message.sequence_id,
        message.candidate,
        running=message.status == kvmem_pb2.SEQUENCE_STATUS_RUNNING,
        finish_reason=reason,
        pruned=finished and reason is None,
        output_token_ids=tuple(unpack(message.output_token_ids, I32, "output_token_ids").tolist()),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(unpack(message.block_ids, I32, "block_ids").tolist()),
        table_version=message.table_version,
        state_word=int.from_bytes(message.scheduler_state[:STATE_WORD_BYTES], "little"),
        swapped=message.status == kvmem_pb2.SEQUENCE_STATUS_SWAPPED,
    )


def pending_copies_of(message: kvmem_pb2.AttachPoolReply) -> tuple[ops.PendingCopy, ...]:
    columns: Sequence[list[int]] = (
        unpack(message.pending_copy_sequence_ids, U64, "pending_copy_sequence_ids").tolist(),
        unpack(message.pending_copies.src_block_ids, I32, "src_block_ids").tolist(),
        unpack(message.pending_copies.dst_block_ids, I32, "dst_block_ids").tolist(),
    )
    return tuple(ops.PendingCopy(*row) for row in zip(*columns, strict=True))


# ---- what the worker has ----


def retained_of(message: worker_pb2.RetainedStep) -> ops.RetainedStep:
    return ops.RetainedStep(
        step_result_of(message.reply),
        unpack(message.sequence_ids, U64, "sequence_ids"),
        unpack(message.num_input_tokens, I32, "num_input_tokens"),
        unpack(message.num_computed_tokens, I32, "num_computed_tokens"),
        unpack(message.num_samples, I32, "num_samples"),
    )
