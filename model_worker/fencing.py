"""Who may execute: the newest session alone, of a memory service that is not gone.

A worker hears of sessions only through the fences on what it is asked for. Epochs grow within
one life of the memory service's state, which its boot id names; another boot id is a newer life,
and the one it replaces is never obeyed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from model_worker.errors import StepError

# Lives of the memory service that are remembered as over. A stale holder that outlasts this many
# restarts is refused no longer; it would have to sleep through all of them.
MAX_RETIRED_BOOT_IDS = 64


@dataclass(frozen=True)
class Fence:
    """Who sends a step, and what it believes the other processes to be."""

    session_id: str
    epoch: int
    kvmem_boot_id: str
    worker_boot_id: str


@dataclass
class Fencing:
    """What this worker has seen of fences and steps."""

    worker_boot_id: str
    newest: Fence | None = None
    last_step_id: int = 0
    _running: Fence | None = None
    _retired_boot_ids: deque[str] = field(
        default_factory=lambda: deque(maxlen=MAX_RETIRED_BOOT_IDS)
    )

    def check(self, fence: Fence) -> bool:
        """True when `fence` is of a newer session than any before, False when of the newest.

        Changes nothing. Raises StepError (STALE_BOOT_ID, STALE_EPOCH).
        """
        if fence.worker_boot_id != self.worker_boot_id:
            raise StepError(
                "STALE_BOOT_ID",
                f"the step is for worker {fence.worker_boot_id!r}, this is {self.worker_boot_id!r}",
            )
        if fence.kvmem_boot_id in self._retired_boot_ids:
            raise StepError(
                "STALE_BOOT_ID",
                f"the memory service {fence.kvmem_boot_id!r} has been replaced by"
                f" {self.newest.kvmem_boot_id if self.newest else None!r}",
            )
        newest = self.newest
        if newest is None or fence.kvmem_boot_id != newest.kvmem_boot_id:
            return True
        if fence.epoch < newest.epoch:
            raise StepError(
                "STALE_EPOCH", f"epoch {fence.epoch} is over, the newest is {newest.epoch}"
            )
        if fence.epoch == newest.epoch and fence != newest:
            raise StepError(
                "STALE_EPOCH",
                f"epoch {fence.epoch} is session {newest.session_id!r}, not {fence.session_id!r}",
            )
        return fence.epoch > newest.epoch

    def install(self, fence: Fence) -> None:
        """Make `fence`, which `check` found newer, the newest: older ones are refused from now."""
        if self.newest is not None and self.newest.kvmem_boot_id != fence.kvmem_boot_id:
            self._retired_boot_ids.append(self.newest.kvmem_boot_id)
        self.newest = fence

    def begin_step(self, fence: Fence, step_id: int) -> bool:
        """Let a step run, now that it is its turn; True for the first one of its session.

        The first step of another life of the memory service may have any id from 1 on: one that
        lost its journal counts from the start. Raises StepError (STALE_EPOCH, STEP_OUT_OF_ORDER).
        """
        if fence != self.newest:
            raise StepError("STALE_EPOCH", f"epoch {fence.epoch} ended before its step began")
        last_step_id = self.last_step_id_of(fence.kvmem_boot_id)
        if step_id <= last_step_id:
            raise StepError(
                "STEP_OUT_OF_ORDER",
                f"step {step_id} is not above {last_step_id}, the last one executed",
            )
        is_first = self._running != fence
        # Counted anew from here on in another life, also when this very step then fails.
        self.last_step_id = last_step_id
        self._running = fence
        return is_first

    def end_step(self, step_id: int) -> None:
        """Count `step_id` as executed: ids up to it are refused from now."""
        self.last_step_id = step_id

    def last_step_id_of(self, kvmem_boot_id: str) -> int:
        """The newest step executed for this life of the memory service; 0: none."""
        running = self._running
        if running is None or running.kvmem_boot_id != kvmem_boot_id:
            return 0
        return self.last_step_id
