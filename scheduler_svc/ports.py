"""The scheduler's two ways out, as the engine uses them.

One transport seam each, so that the same engine also runs with both in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler_svc.core import ops
from scheduler_svc.core.preemption import TierRates


class PeerLostError(Exception):
    """A peer went away or refused us. `reason` is a key of the error table."""

    def __init__(
        self, reason: str, message: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = metadata or {}


@dataclass(frozen=True)
class Holder:
    """Who opens a session. `address`: where its callers reach it."""

    name: str
    address: str = ""


@dataclass(frozen=True)
class Opened:
    """A session whose mutations are closed until `attach`."""

    next_batch_seq: int
    last_step_id: int


@dataclass(frozen=True)
class PoolAttached:
    """The session's mutations are open."""

    levels: ops.PoolLevels
    pending_copies: tuple[ops.PendingCopy, ...] = ()
    pending_swap_ins: ops.BlockCopies = field(default_factory=ops.BlockCopies)
    pending_swap_outs: ops.BlockCopies = field(default_factory=ops.BlockCopies)


@dataclass(frozen=True)
class Installed:
    """The worker obeys the session alone, and nothing runs. last_step_id 0: none was executed."""

    last_step_id: int
    retained: tuple[ops.RetainedStep, ...] = ()


@dataclass(frozen=True)
class WorkerDescription:
    """What the worker says of itself."""

    boot_id: str
    model_name: str
    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_inflight_steps: int = 1
    rates: TierRates = field(default_factory=TierRates)
    # The whole geometry, for the memory service; opaque here.
    geometry: Any = field(repr=False, default=None)


class KvMemoryPort(Protocol):
    """The memory service, as the engine uses it. Every method raises PeerLostError.

    Taking over is in this order: `open`, the worker's `install`, `attach`, `adopt`.
    """

    async def open(self, holder: Holder, worker: WorkerDescription) -> Opened:
        """Begin a session, after ending a former one of ours. SESSION_HELD: another has it."""
        ...

    async def attach(self, worker: WorkerDescription, last_executed_step: int) -> PoolAttached: ...

    async def adopt(self) -> tuple[ops.AdoptedRequest, ...]:
        """Every request there is, in order of arrival."""
        ...

    async def apply(self, batch: ops.Batch, traceparent: str) -> ops.BatchResult:
        """Resumes the session by itself where only the connection broke or the service
        restarted with its state."""
        ...

    async def watch(self) -> None:
        """Keeps the session alive. Waits, with nothing to do as well, and raises when the peer
        is gone or unwell. To be run from `open` on."""
        ...

    async def close(self) -> None:
        """Let the session go, so that another may have it at once."""
        ...


class WorkerPort(Protocol):
    """The model worker, as the engine uses it. Every method raises PeerLostError."""

    async def describe(self) -> WorkerDescription: ...

    async def install(self) -> Installed:
        """Take the worker over for the session just opened; waits for the step that runs."""
        ...

    async def execute(self, step: ops.Step, traceparent: str) -> ops.StepResult: ...

    async def watch(self) -> None:
        """Waits, with nothing to do as well, and raises when the peer is gone or unwell."""
        ...

    async def close(self) -> None: ...
