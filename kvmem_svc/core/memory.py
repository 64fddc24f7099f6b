"""The memory service's state machine: every mutation goes through here, in one order.

Deterministic and without time: the same mutations give the same replies, so a log of them is
the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmem_svc.core.batch import Batch, BatchResult, Column, PoolGeometry, PoolLevels
from kvmem_svc.core.errors import (
    InvalidBatch,
    InvalidGeometry,
    NoPool,
    StepOutOfOrder,
    UnknownSession,
)
from kvmem_svc.core.invariants import check_integrity, check_levels
from kvmem_svc.core.limits import GEOMETRY_RANGES, MAX_OPS_PER_BATCH, MAX_TOKEN_CELLS
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.mutations import (
    ApplyBatch,
    CloseSession,
    Configure,
    Configured,
    ConfirmPool,
    Expire,
    Expired,
    GrantSession,
    Mutation,
    PendingCopy,
    PendingSwap,
    Pin,
    Pinned,
    PoolConfirmed,
    Reply,
    Session,
    SessionClosed,
    Unpin,
    Unpinned,
)
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.session import SessionLedger

# How many blocks may be read for every one that was handed out or taken back since the last time.
BLOCKS_CHECKED_PER_MOVE = 16


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
    num_finished_sequences: int = 0
    num_expired_requests: int = 0
    num_pending_copies: int = 0
    num_prefix_lookups: int = 0
    num_prefix_hits: int = 0
    num_prefix_lookup_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_published: int = 0
    num_evictions: int = 0
    num_pins: int = 0
    num_tenants: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


class KvMemory:
    """Blocks, sequences and sessions. Raises KvMemoryError when a call is refused."""

    def __init__(self, kvmem_boot_id: str, *, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.ledger = SessionLedger(kvmem_boot_id)
        # None until the first worker's pool is attached.
        self.manager: BlockManager | None = None
        self.last_step_id = 0
        self.acknowledged_step = 0
        self.num_batches = 0
        self.configuration = Configure()
        # When everything is to be checked again, in blocks handed out and taken back. No part of
        # the state: checking changes nothing.
        self._checked_at = 0
        self._carry_out: dict[type, Callable[[Any], Reply]] = {
            GrantSession: self._grant_session,
            ConfirmPool: self._confirm_pool,
            ApplyBatch: self._apply_batch,
            CloseSession: self._close_session,
            Expire: self._expire,
            Configure: self._configure,
            Pin: self._pin,
            Unpin: self._unpin,
        }

    def commit(self, mutation: Mutation) -> Reply:
        """Carry out a mutation. Deterministic; when it raises, nothing was changed.

        Of ApplyBatch the reply is the BatchResult. A batch that came before gets its kept result
        again; it was no mutation, and `num_batches` stays.
        Raises InvalidGeometry (ConfirmPool); NoPool, NoFreeBlocks or TenantQuota (Pin);
        StaleBootId, StaleEpoch, UnknownSession, NoPool, SequenceGap, BatchConflict, InvalidBatch
        or StepOutOfOrder (ApplyBatch).
        """
        self.settle()
        return self._carry_out[type(mutation)](mutation)

    def settle(self) -> None:
        """Do what the newest mutation has left to do: its reply does not depend on it. To be
        called when the reply is under way; the next mutation does it first, so the state is the
        same whether this is called or not."""
        if self.manager is not None:
            self.manager.publish_filled()

    # --- sessions ----------------------------------------------------------------------

    def _grant_session(self, mutation: GrantSession) -> Session:
        return self.ledger.grant(mutation.holder, mutation.holder_address)

    def _close_session(self, _: CloseSession) -> SessionClosed:
        return SessionClosed(self.ledger.close())

    def _expire(self, mutation: Expire) -> Expired:
        """The last holder may have issued the step it was preparing: what it could touch waits
        for that one."""
        manager = self.manager
        if manager is None:
            return Expired(0, 0)
        manager.begin_step(self.last_step_id + 1, self.acknowledged_step)
        expired = manager.expire(mutation.request_ids)
        check_integrity(manager)
        return expired

    # --- configuration and pins --------------------------------------------------------

    def _configure(self, mutation: Configure) -> Configured:
        self.configuration = mutation
        if self.manager is not None:
            self.manager.configure(mutation)
            check_integrity(self.manager)
        return Configured()

    def _pin(self, mutation: Pin) -> Pinned:
        if self.manager is None:
            raise NoPool("no worker's pool is attached: nothing is cached")
        pinned = self.manager.pin(mutation)
        check_levels(self.manager)
        return pinned

    def _unpin(self, mutation: Unpin) -> Unpinned:
        manager = self.manager
        was_there = manager is not None and mutation.pin_id in manager.pins
        if manager is not None:
            manager.unpin(mutation.pin_id)
            check_levels(manager)
        return Unpinned(was_there)

    # --- pools -------------------------------------------------------------------------

    def _confirm_pool(self, mutation: ConfirmPool) -> PoolConfirmed:
        ledger = self.ledger
        if ledger.session is None:
            raise UnknownSession("no session is open")
        is_new = mutation.worker_boot_id != ledger.worker_boot_id
        if is_new:
            self._replace_pool(mutation)
        elif self.manager is not None and mutation.geometry != self.manager.geometry:
            raise InvalidGeometry(
                f"worker {mutation.worker_boot_id!r} declared {self.manager.geometry} before and"
                f" {mutation.geometry} now"
            )
        assert self.manager is not None, "a worker is attached without its pool"
        if is_new or not ledger.mutations_open:
            self._go_on_from(mutation.last_executed_step)
        ledger.mutations_open = True
        check_integrity(self.manager)
        pending = self.manager.pool.moves.pending
        return PoolConfirmed(
            is_new,
            self.pending_copies(),
            tuple(PendingSwap(src, dst) for dst, src in pending.swap_ins.items()),
            tuple(PendingSwap(src, dst) for dst, src in pending.swap_outs.items()),
        )

    def _replace_pool(self, mutation: ConfirmPool) -> None:
        self._check_geometry(mutation.worker_boot_id, mutation.geometry)
        try:
            if self.manager is None:
                self.manager = BlockManager(self.max_sequences, mutation.geometry)
                self.manager.configure(self.configuration)
            else:
                self.manager.replace_pool(mutation.geometry)
        except MemoryError as error:
            raise InvalidGeometry(f"there is no memory for {mutation.geometry}: {error}") from error
        self.ledger.attach_worker(mutation.worker_boot_id)

    def _go_on_from(self, last_executed_step: int) -> None:
        """No step of a former epoch will be executed any more: number and books go on from the
        one that was being prepared, or from the one after the last executed."""
        assert self.manager is not None
        self.last_step_id = max(self.last_step_id, last_executed_step + 1)
        self.acknowledged_step = max(self.acknowledged_step, last_executed_step)
        self.manager.take_over(self.last_step_id, last_executed_step, self.acknowledged_step)

    def pending_copies(self) -> tuple[PendingCopy, ...]:
        """Copies that a former epoch's steps were to make and the next step is to make instead,
        until it is acknowledged. Each is for the first of the sequences that hold its
        destination; those that nobody holds any more are left out."""
        manager = self.manager
        copies = manager.pool.moves.pending.copies if manager is not None else {}
        if manager is None or not copies:
            return ()
        holders = manager.sequences.holders()
        return tuple(
            PendingCopy(src, dst, holders[dst]) for dst, src in copies.items() if dst in holders
        )

    def _check_geometry(self, worker_boot_id: str, geometry: PoolGeometry) -> None:
        if not worker_boot_id:
            raise InvalidGeometry("worker_boot_id is empty")
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

    def _apply_batch(self, mutation: ApplyBatch) -> BatchResult:
        batch = mutation.batch
        self.ledger.check_mutation(batch.fence)
        kept = self.ledger.kept_result(batch.batch_seq, batch.digest)
        if kept is not None:
            return kept
        self._check_batch(batch)
        self.last_step_id = batch.step_id
        self.acknowledged_step = batch.acknowledged_step
        self.num_batches += 1
        result = self._carry_out_ops(batch)
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

    def _carry_out_ops(self, batch: Batch) -> BatchResult:
        manager = self.manager
        assert manager is not None, "mutations are open without a pool"
        pool = manager.pool
        manager.begin_step(batch.step_id, batch.acknowledged_step)
        allocated, freed = pool.num_allocations, pool.num_freed
        was_busy = manager.sequences.num_free_rows < self.max_sequences
        results, effects = manager.apply(batch.ops)
        check_levels(manager)
        if was_busy and manager.sequences.num_free_rows == self.max_sequences:
            self._check_when_worth_it(manager)
        return BatchResult(
            batch.batch_seq,
            results,
            effects.deltas(),
            effects.copies(),
            self.levels(),
            pool.num_allocations - allocated,
            pool.num_freed - freed,
            effects.swap_ins(),
            effects.swap_outs(),
        )

    def _check_when_worth_it(self, manager: BlockManager) -> None:
        """A full cache takes a while to read: not after every little request."""
        pool = manager.pool
        num_moved = pool.num_allocations + pool.num_freed
        if not 0 <= num_moved - self._checked_at < pool.num_ever_used // BLOCKS_CHECKED_PER_MOVE:
            check_integrity(manager)
            self._checked_at = num_moved

    # --- reading -----------------------------------------------------------------------

    def levels(self) -> PoolLevels:
        """Where the blocks are now."""
        manager = self.manager
        if manager is None:
            return PoolLevels(num_free_sequences=self.max_sequences)
        return PoolLevels(
            num_free_blocks=manager.pool.num_free,
            num_cached_blocks=manager.pool.num_cached,
            num_in_use_blocks=manager.pool.num_in_use,
            num_quarantined_blocks=manager.pool.num_quarantined,
            num_free_sequences=manager.sequences.num_free_rows,
            num_free_host_blocks=manager.host.num_free,
        )

    def num_cached_tokens(self, domain: Domain, token_ids: Column) -> int:
        """How much of a prefix is cached for `domain`, in whole blocks."""
        self.settle()
        return self.manager.num_cached_tokens(domain, token_ids) if self.manager else 0

    def stats(self) -> PoolStats:
        """Levels and counters. O(blocks ever used): not for every step."""
        self.settle()
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
            num_finished_sequences=len(manager.sequences.finished),
            num_expired_requests=manager.num_expired_requests,
            num_pending_copies=len(pool.moves.pending.copies),
            num_prefix_lookups=pool.cache.counters.num_lookups,
            num_prefix_hits=pool.cache.counters.num_hits,
            num_prefix_lookup_tokens=pool.cache.counters.num_lookup_tokens,
            num_prefix_hit_tokens=pool.cache.counters.num_hit_tokens,
            num_published=pool.cache.num_published,
            num_evictions=pool.num_evictions,
            num_pins=len(manager.pins),
            num_tenants=manager.tenants.num_active(pool.num_blocks_of.tolist()),
            num_swapped_out_blocks=manager.host.num_swapped_out,
            num_swapped_in_blocks=manager.host.num_swapped_in,
        )
