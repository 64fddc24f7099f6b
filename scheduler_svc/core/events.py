"""What happens to the scheduler, and what it wants done: the machine's whole surface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.ops import (
    AdoptedRequest,
    Batch,
    BatchResult,
    BlockCopies,
    PendingCopy,
    PoolLevels,
    RetainedStep,
    Step,
    StepResult,
)
from scheduler_svc.core.preemption import TierRates
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason

# ---- events ----


@dataclass(frozen=True)
class Connected:
    """A session is open and a pool attached: work can begin, or go on with what is adopted.

    last_step_id: the newest step that will never be issued again; all up to it are over.
    """

    next_batch_seq: int
    last_step_id: int
    num_blocks: int
    block_size: int
    levels: PoolLevels
    # In order of arrival.
    adopted: tuple[AdoptedRequest, ...] = ()
    pending_copies: tuple[PendingCopy, ...] = ()
    retained: tuple[RetainedStep, ...] = ()
    # Steps that may be at the worker at a time.
    max_inflight_steps: int = 1
    # Swaps that no executed step has made.
    pending_swap_ins: BlockCopies = field(default_factory=BlockCopies)
    pending_swap_outs: BlockCopies = field(default_factory=BlockCopies)
    rates: TierRates = field(default_factory=TierRates)


@dataclass(frozen=True)
class Disconnected:
    """The memory service or the worker is gone. Requests wait for `Connected`."""


@dataclass(frozen=True)
class Received:
    """What a caller has of one candidate already."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0


@dataclass(frozen=True)
class RequestArrived:
    """received, by candidate: of a request that nobody knows any more but its caller."""

    request: Request
    received: Mapping[int, Received] = field(default_factory=dict)


@dataclass(frozen=True)
class Attached:
    """A caller (another one than before, or none was there) goes on with a live request."""

    request_id: str
    received: Mapping[int, Received] = field(default_factory=dict)


@dataclass(frozen=True)
class Detached:
    """Nobody listens to the request for now; it goes on."""

    request_id: str


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
    | Attached
    | Detached
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
    # Trace contexts of the requests it serves.
    links: tuple[str, ...] = ()


class CandidateDelta(NamedTuple):
    """What one candidate gained; `finish_reason` is set with its last delta.

    token_offset: output tokens of the candidate before these.
    """

    candidate: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    token_offset: int = 0


class RequestTimes(NamedTuple):
    """Seconds on the caller's clock; None for what never came."""

    arrived_at_s: float
    first_scheduled_at_s: float | None
    first_token_at_s: float | None
    num_preemptions: int


@dataclass(frozen=True)
class Adopted:
    """The request goes on here, and nobody has attached to it yet."""

    request_id: str


@dataclass(frozen=True)
class Accepted:
    """The record is safe: the request may be acknowledged."""

    request_id: str


class Emit(NamedTuple):
    """Committed output, safe to show. `times` comes with the last one.

    num_cached_tokens: with the first one a caller gets, where it is known: of the prompt, those
    whose KV was there when the request was first admitted.
    """

    request_id: str
    deltas: tuple[CandidateDelta, ...]
    times: RequestTimes | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True)
class Reject:
    """The request ends with an error; `reason` is a key of the error table."""

    request_id: str
    reason: str
    message: str
    retry_after_ms: int | None = None


Command = ApplyBatch | ExecuteStep | Adopted | Accepted | Emit | Reject
