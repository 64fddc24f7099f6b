"""What happens to the scheduler, and what it wants done: the machine's whole surface."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.ops import Batch, BatchResult, PoolLevels, Step, StepResult
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason

# ---- events ----


@dataclass(frozen=True)
class Connected:
    """A session is open and a pool attached: work can begin."""

    next_batch_seq: int
    last_step_id: int
    num_blocks: int
    block_size: int
    levels: PoolLevels


@dataclass(frozen=True)
class Disconnected:
    """The memory service or the worker is gone, and with it every sequence in flight."""

    reason: str
    message: str


@dataclass(frozen=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True)
class AbortRequested:
    request_id: str


@dataclass(frozen=True)
class Delivered:
    """The caller has the last of it."""

    request_id: str


@dataclass(frozen=True)
class BatchApplied:
    result: BatchResult


@dataclass(frozen=True)
class StepExecuted:
    result: StepResult


Event = (
    Connected
    | Disconnected
    | RequestArrived
    | AbortRequested
    | Delivered
    | BatchApplied
    | StepExecuted
)

# ---- commands ----


@dataclass(frozen=True)
class ApplyBatch:
    batch: Batch
    # Trace contexts of the requests that the step serves; empty for a control batch.
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExecuteStep:
    step: Step


@dataclass(frozen=True)
class CandidateDelta:
    """What one candidate gained; `finish_reason` is set with its last delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on the caller's clock; None for what never came."""

    arrived_at_s: float
    first_scheduled_at_s: float | None
    first_token_at_s: float | None
    num_preemptions: int


@dataclass(frozen=True)
class Accepted:
    """The record is safe: the request may be acknowledged."""

    request_id: str


@dataclass(frozen=True)
class Emit:
    """Committed output, safe to show. `times` comes with the last one."""

    request_id: str
    deltas: tuple[CandidateDelta, ...]
    times: RequestTimes | None = None


@dataclass(frozen=True)
class Reject:
    """The request ends with an error; `reason` is a key of the error table."""

    request_id: str
    reason: str
    message: str
    retry_after_ms: int | None = None


Command = ApplyBatch | ExecuteStep | Accepted | Emit | Reject
