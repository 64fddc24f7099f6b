"""Errors on the wire: `google.rpc.Status` with `ErrorInfo.reason`, and RetryInfo where it helps.

The reasons are data: the code a reason travels under stands in `REASONS`, and
`docs/errors.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "octavo"
DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class Reason:
    """A reason's status code and the sentence the docs give it."""

    code: grpc.StatusCode
    meaning: str


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

REASONS: Mapping[str, Reason] = {
    "INVALID_PARAMETER": Reason(_INVALID, "A value is outside its allowed range."),
    "EMPTY_PROMPT": Reason(_INVALID, "The prompt has no tokens."),
    "TOKEN_OUT_OF_VOCABULARY": Reason(_INVALID, "A token id is not one the model has."),
    "PROMPT_TOO_LONG": Reason(_INVALID, "Prompt + max_tokens exceed the model's length."),
    "PROMPT_EXCEEDS_POOL": Reason(_INVALID, "The prompt can never fit the KV pool."),
    "NO_CHAT_TEMPLATE": Reason(_INVALID, "The model has no chat template; use Generate."),
    "INVALID_BATCH": Reason(_INVALID, "A batch of ops is malformed."),
    "UNKNOWN_MODEL": Reason(grpc.StatusCode.NOT_FOUND, "Another model is served here."),
    "UNKNOWN_REQUEST": Reason(grpc.StatusCode.NOT_FOUND, "No such request is live."),
    "UNKNOWN_SEQUENCE": Reason(grpc.StatusCode.NOT_FOUND, "No such sequence is live."),
    "REQUEST_EXISTS": Reason(
        grpc.StatusCode.ALREADY_EXISTS, "A live request has this id; the first is unaffected."
    ),
    "QUEUE_FULL": Reason(_EXHAUSTED, "Too many requests wait; try again after RetryInfo."),
    "TOO_MANY_CALLS": Reason(_EXHAUSTED, "The stream has too many calls that have not ended."),
    "NO_FREE_BLOCKS": Reason(_EXHAUSTED, "The pool has no block left for this."),
    "TENANT_QUOTA": Reason(_EXHAUSTED, "The tenant's share is used up."),
    "UNAUTHENTICATED": Reason(
        grpc.StatusCode.UNAUTHENTICATED, "The call has no API key, or one that is not known."
    ),
    "STALE_EPOCH": Reason(_PRECONDITION, "A newer session holds the memory service."),
    "UNKNOWN_SESSION": Reason(_PRECONDITION, "The session is not (or no longer) open."),
    "STALE_BOOT_ID": Reason(_PRECONDITION, "The fence names a process that is gone."),
    "LEASE_EXPIRED": Reason(_PRECONDITION, "The session was silent for longer than its lease."),
    "SESSION_HELD": Reason(_PRECONDITION, "Another holder has the session; it must end first."),
    "SEQUENCE_GAP": Reason(_PRECONDITION, "batch_seq is not the next one."),
    "BATCH_CONFLICT": Reason(_PRECONDITION, "This batch_seq was applied with other ops."),
    "NO_POOL": Reason(_PRECONDITION, "No worker's pool is attached yet."),
    "TABLE_VERSION_MISMATCH": Reason(
        _PRECONDITION, "The worker's block table is at another version."
    ),
    "STEP_OUT_OF_ORDER": Reason(_PRECONDITION, "step_id is not above the last one."),
    "NOT_LEADER": Reason(
        grpc.StatusCode.UNAVAILABLE,
        "Another scheduler owns the requests; its address is in the metadata.",
    ),
    "ATTACH_REPLACED": Reason(
        grpc.StatusCode.ABORTED, "Another stream was attached to this request."
    ),
    "JOURNAL_FAILED": Reason(
        grpc.StatusCode.UNAVAILABLE,
        "The journal cannot be written; nothing is acknowledged meanwhile.",
    ),
    "NOT_READY": Reason(grpc.StatusCode.UNAVAILABLE, "The service is starting or reconnecting."),
    "WORKER_LOST": Reason(grpc.StatusCode.UNAVAILABLE, "The model worker went away."),
    "KVMEM_LOST": Reason(grpc.StatusCode.UNAVAILABLE, "The KV memory service went away."),
    "DRAINING": Reason(grpc.StatusCode.UNAVAILABLE, "The service is shutting down."),
    "INTERNAL": Reason(grpc.StatusCode.INTERNAL, "A bug: please report it."),
}


@dataclass(eq=False)
class ServiceError(Exception):
    """An error a caller is told about. `reason` must be a key of REASONS."""

    reason: str
    message: str
    retry_after_ms: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)
        if self.reason not in REASONS:
            raise KeyError(f"{self.reason} is not in REASONS")

    @property
    def code(self) -> grpc.StatusCode:
        return REASONS[self.reason].code

    def to_status(self) -> status_pb2.Status:
        details = [
            _packed(
                error_details_pb2.ErrorInfo(
                    reason=self.reason, domain=DOMAIN, metadata=dict(self.metadata)
                )
            )
        ]
        if self.retry_after_ms is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(self.retry_after_ms)
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=details)

    @classmethod
    def from_status_bytes(cls, raw: bytes) -> ServiceError | None:
        """Read what `to_status` wrote; None when there is no ErrorInfo of ours in it."""
        status = status_pb2.Status.FromString(raw)
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        found, retry_ms = False, None
        for detail in status.details:
            if detail.Unpack(info):
                found = info.domain == DOMAIN and info.reason in REASONS
            elif detail.Unpack(retry):
                retry_ms = retry.retry_delay.ToMilliseconds()
        if not found:
            return None
        return cls(info.reason, status.message, retry_ms, dict(info.metadata))

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> ServiceError | None:
        """The ServiceError a call failed with, or None when the peer sent none."""
        trailing: Any = getattr(error, "trailing_metadata", lambda: None)()
        for key, value in trailing or ():
            if key == DETAILS_KEY:
                return cls.from_status_bytes(value)
        return None


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: grpc.aio.ServicerContext, error: ServiceError) -> NoReturn:
    """End the call with `error`; never returns."""
    await context.abort(
        error.code,
        error.message,
        trailing_metadata=((DETAILS_KEY, error.to_status().SerializeToString()),),
    )
    raise AssertionError("unreachable: context.abort raises")
