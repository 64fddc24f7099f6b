"""Errors of the memory core.

KvMemoryError            a call is refused; nothing was changed
├── UnknownSession       ├── StaleEpoch        ├── StaleBootId     (fences)
├── LeaseExpired         ├── SessionHeld                           (sessions)
├── SequenceGap          ├── BatchConflict     ├── InvalidBatch    (batches)
├── StepOutOfOrder       ├── NoPool            ├── InvalidGeometry (batches, pools)
├── InvalidPin           ├── NoFreeBlocks      ├── TenantQuota     (pins)
└── UnknownSequence      └── UnknownRequest                        (queries)
OpMistake                one op of a batch is refused: becomes that op's status
InvariantViolation       a bug: the state can no longer be trusted
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvmem_svc.core.batch import OpStatus


class KvMemoryError(Exception):
    """A call is refused and nothing was changed. `reason` is the wire's name for why."""

    reason: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        retry_after_ms: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.metadata: Mapping[str, str] = metadata or {}


class UnknownSession(KvMemoryError):
    """The fence names a session that is not open."""

    reason = "UNKNOWN_SESSION"


class StaleEpoch(KvMemoryError):
    """The fence is of an epoch before the newest one."""

    reason = "STALE_EPOCH"


class StaleBootId(KvMemoryError):
    """The fence names a memory service or a worker that is gone."""

    reason = "STALE_BOOT_ID"


class LeaseExpired(KvMemoryError):
    """The session was silent for longer than its lease."""

    reason = "LEASE_EXPIRED"


class SessionHeld(KvMemoryError):
    """Another holder's session is open. metadata: `holder` and `holder_address`."""

    reason = "SESSION_HELD"


class SequenceGap(KvMemoryError):
    """batch_seq is neither the next one nor one whose result is still kept."""

    reason = "SEQUENCE_GAP"


class BatchConflict(KvMemoryError):
    """batch_seq was applied with other ops."""

    reason = "BATCH_CONFLICT"


class InvalidBatch(KvMemoryError):
    """A batch as a whole is malformed."""

    reason = "INVALID_BATCH"


class StepOutOfOrder(KvMemoryError):
    """step_id or acknowledged_step went backwards."""

    reason = "STEP_OUT_OF_ORDER"


class NoPool(KvMemoryError):
    """A batch came before the session confirmed its worker's pool."""

    reason = "NO_POOL"


class InvalidGeometry(KvMemoryError):
    """A pool geometry is out of range, or not the one its worker declared before."""

    reason = "INVALID_PARAMETER"


class UnknownSequence(KvMemoryError):
    """A query names a sequence that is not there."""

    reason = "UNKNOWN_SEQUENCE"


class UnknownRequest(KvMemoryError):
    """A query names a request that is not there."""

    reason = "UNKNOWN_REQUEST"


class InvalidPin(KvMemoryError):
    """A Pin is out of range."""

    reason = "INVALID_PARAMETER"


class NoFreeBlocks(KvMemoryError):
    """Pins hold as much as they may."""

    reason = "NO_FREE_BLOCKS"


class TenantQuota(KvMemoryError):
    """A pin would hold more than the tenant may have."""

    reason = "TENANT_QUOTA"


class OpMistake(Exception):
    """An op is a mistake of its caller and changes nothing; the batch goes on."""

    def __init__(self, status: OpStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class InvariantViolation(AssertionError):
    """The books do not balance: a bug. The process must not go on."""
