"""The memory service's state machine: every mutation goes through here, in one order.

Deterministic: the same calls with the same times give the same results, so a log of the calls
is the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmem_svc.core.batch import (
    NO_COPIES,
    NO_DELTAS,
    Batch,
    BatchResult,
    Fence,
    PoolGeometry,
    PoolLevels,
)
from kvmem_svc.core.errors import InvalidBatch, InvalidGeometry, NoPool, StepOutOfOrder
from kvmem_svc.core.invariants import check_integrity, check_levels
from kvmem_svc.core.limits import GEOMETRY_RANGES, MAX_OPS_PER_BATCH, MAX_TOKEN_CELLS
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.session import Session, SessionLedger


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What GetPoolStats tells, boot ids aside."""

    geometry: PoolGeometry | None
    levels: PoolLevels
    num_requests: int = 0
    num_sequences: int = 0
    num_shared_blocks: int = 0
    peak_in_use_blocks: int = 0
    num_allocations: int = 0
    num_copies_on_write: int = 0
    num_preemptions: int = 0
    num_batches: int = 0


class KvMemory:
    """Blocks, sequences and sessions. Raises KvMemoryError when a call is refused."""

    def __init__(
        self,
        kvmem_boot_id: str,
        *,
        max_sequences: int,
        lease_ttl_ms: int = 5_000,
        resume_grace_ms: int = 1_000,
    ) -> None:
        self.max_sequences = max_sequences
        self.ledger = SessionLedger(kvmem_boot_id, lease_ttl_ms, resume_grace_ms)
        # None until the first worker's pool is attached.
        self.manager: BlockManager | None = None
        self.last_step_id = 0
        self.acknowledged_step = 0
        self.num_batches = 0

    # --- sessions ----------------------------------------------------------------------

    def open_session(self, holder: str, now_ms: int, *, held_by_stream: bool) -> Session:
        """Begin a new epoch and take back what former ones held. Raises SessionHeld."""
        session = self.ledger.open(holder, now_ms, held_by_stream=held_by_stream)
        self._settle_former_epochs()
        return session

    def _settle_former_epochs(self) -> None:
        """The policy of a takeover: nothing of former epochs stays.

        Steps of the former holder may still be in flight, up to the last one prepared, so the
        blocks go free only when that one is acknowledged or another pool is attached.
        """
        if self.manager is not None:
            self.manager.pool.begin_step(self.last_step_id + 1, self.acknowledged_step)
            self.manager.reclaim_all()
            check_integrity(self.manager)

    def resume_session(
        self, fence: Fence, last_result_batch_seq: int, now_ms: int, *, held_by_stream: bool
    ) -> Session:
        """Go on with the open session after its stream broke; see `SessionLedger.resume`."""
        return self.ledger.resume(
            fence, last_result_batch_seq, now_ms, held_by_stream=held_by_stream
        )

    def close_session(self, fence: Fence, now_ms: int) -> None:
        """The holder is done. Raises what a stale or unknown fence raises."""
        self.ledger.close(self.ledger.check_fence(fence, now_ms, check_worker=False).session_id)

    # --- pools -------------------------------------------------------------------------

    def attach_pool(
        self, fence: Fence, worker_boot_id: str, geometry: PoolGeometry, now_ms: int
    ) -> bool:
        """Declare the pool of a worker; True when it is another one than before.

        Raises InvalidGeometry, and what a stale or unknown fence raises.
        """
        self.ledger.check_fence(fence, now_ms, check_worker=False)
        if not worker_boot_id:
            raise InvalidGeometry("worker_boot_id is empty")
        if worker_boot_id == self.ledger.worker_boot_id:
            assert self.manager is not None
            if geometry != self.manager.geometry:
                raise InvalidGeometry(
                    f"worker {worker_boot_id!r} declared {self.manager.geometry} before and"
                    f" {geometry} now"
                )
            return False
        self._check_geometry(geometry)
        try:
            if self.manager is None:
                self.manager = BlockManager(self.max_sequences, geometry)
            else:
                self.manager.replace_pool(geometry)
        except MemoryError as error:
            raise InvalidGeometry(f"there is no memory for {geometry}: {error}") from error
        self.ledger.attach_worker(worker_boot_id)
        check_integrity(self.manager)
        return True

    def _check_geometry(self, geometry: PoolGeometry) -> None:
        for name, allowed in GEOMETRY_RANGES.items():
            value = getattr(geometry, name)
            if value not in allowed:
                raise InvalidGeometry(f"{name} is {value}, it must be {allowed}")
        cells = self.max_sequences * (geometry.max_model_len + 1)
        if cells > MAX_TOKEN_CELLS:
            raise InvalidGeometry(
                f"max_model_len {geometry.max_model_len} with max_sequences"
                f" {self.max_sequences} makes {cells} tokens, at most {MAX_TOKEN_CELLS} fit"
            )
        if self.manager is not None:
            longest = int(self.manager.sequences.length.max())
            if longest > geometry.max_model_len + 1:
                raise InvalidGeometry(
                    f"max_model_len is {geometry.max_model_len} and a live sequence has"
                    f" {longest} tokens: free it first"
                )

    # --- batches -----------------------------------------------------------------------

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        """Carry out a batch, or give again the result of one that came before.

        Raises UnknownSession, StaleEpoch, StaleBootId, LeaseExpired, SequenceGap,
        BatchConflict, InvalidBatch, StepOutOfOrder or NoPool: then nothing was changed and
        batch_seq is not used up.
        """
        self.ledger.check_fence(batch.fence, now_ms)
        self.ledger.renew(now_ms)
        kept = self.ledger.replay(batch.batch_seq, batch.digest)
        if kept is not None:
            return kept
        self._check_batch(batch)
        self.last_step_id = batch.step_id
        self.acknowledged_step = batch.acknowledged_step
        self.num_batches += 1
        result = self._carry_out(batch)
        self.ledger.record(batch.digest, result)
        return result

    def _check_batch(self, batch: Batch) -> None:
        if len(batch.ops) > MAX_OPS_PER_BATCH:
            raise InvalidBatch(f"{len(batch.ops)} ops in a batch, at most {MAX_OPS_PER_BATCH}")
        if batch.acknowledged_step > batch.step_id:
            raise InvalidBatch(
                f"acknowledged_step {batch.acknowledged_step} is above step_id {batch.step_id}"
            )
        for name, value, last in (
            ("step_id", batch.step_id, self.last_step_id),
            ("acknowledged_step", batch.acknowledged_step, self.acknowledged_step),
        ):
            if value < last:
                raise StepOutOfOrder(f"{name} {value} is below the last one, {last}")
        if batch.ops and self.manager is None:
            raise NoPool(f"{len(batch.ops)} ops and no worker's pool attached yet")

    def _carry_out(self, batch: Batch) -> BatchResult:
        manager = self.manager
        if manager is None:
            return BatchResult(batch.batch_seq, [], NO_DELTAS, NO_COPIES, self.levels())
        pool = manager.pool
        pool.begin_step(batch.step_id, batch.acknowledged_step)
        allocated, freed = pool.num_allocations, pool.num_freed
        was_busy = manager.sequences.num_free_rows < self.max_sequences
        results, effects = manager.apply(batch.ops)
        check_levels(pool)
        if was_busy and manager.sequences.num_free_rows == self.max_sequences:
            check_integrity(manager)
        return BatchResult(
            batch.batch_seq,
            results,
            effects.deltas(),
            effects.copies(),
            self.levels(),
            pool.num_allocations - allocated,
            pool.num_freed - freed,
        )

    # --- reading -----------------------------------------------------------------------

    def levels(self) -> PoolLevels:
        """Where the blocks are now."""
        manager = self.manager
        if manager is None:
            return PoolLevels(num_free_sequences=self.max_sequences)
        return PoolLevels(
            num_free_blocks=manager.pool.num_free,
            num_in_use_blocks=manager.pool.num_in_use,
            num_quarantined_blocks=manager.pool.num_quarantined,
            num_free_sequences=manager.sequences.num_free_rows,
        )

    def stats(self) -> PoolStats:
        """Levels and counters. O(blocks ever used): not for every step."""
        manager = self.manager
        if manager is None:
            return PoolStats(None, self.levels(), num_batches=self.num_batches)
        pool = manager.pool
        return PoolStats(
            manager.geometry,
            self.levels(),
            num_requests=len(manager.requests),
            num_sequences=self.max_sequences - manager.sequences.num_free_rows,
            num_shared_blocks=int((pool.ref_counts[: pool.num_ever_used] >= 2).sum()),
            peak_in_use_blocks=pool.peak_in_use,
            num_allocations=pool.num_allocations,
            num_copies_on_write=pool.num_copies_on_write,
            num_preemptions=manager.num_preemptions,
            num_batches=self.num_batches,
        )
