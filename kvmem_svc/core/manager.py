"""The block manager: carries out the ops of a batch against the pool and the sequence table.

Every op is all or nothing. Its method first checks and plans, raising OpMistake for a
caller's mistake and returning NO_FREE_* when the memory is full; only then does it write,
and from there on it cannot fail. So there is never half an op to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.admission import AdmissionPlan, commit_admission, plan_admission
from kvmem_svc.core.arrival import commit_arrival, plan_arrival
from kvmem_svc.core.batch import OK, OpResult, OpStatus, PoolGeometry
from kvmem_svc.core.errors import NoFreeBlocks, OpMistake, TenantQuota
from kvmem_svc.core.fork import commit_fork, plan_fork
from kvmem_svc.core.host_tier import HostTier
from kvmem_svc.core.limits import MAX_PINS, MAX_RECORDS_PER_SEQUENCE
from kvmem_svc.core.mutations import Configure, Expired, Pin, Pinned
from kvmem_svc.core.pins import HeldPrefix
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import Chain, Domain
from kvmem_svc.core.publication import Filled, filled_blocks, publish
from kvmem_svc.core.quotas import exceeds, too_long_a_prompt, too_many_blocks, too_many_sequences
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.reservation import (
    check_reserve,
    commit_append,
    plan_append,
    reserve_what_fits,
)
from kvmem_svc.core.sequences import SequenceTable, Status, require
from kvmem_svc.core.slots import StepEffects, commit_slots, plan_slots
from kvmem_svc.core.swaps import commit_swap_in, commit_swap_out, plan_swap_in, plan_swap_out
from kvmem_svc.core.tenants import Quota, Tenants
from kvmem_svc.core.tokens import commit_tokens, plan_commit


class BlockManager:
    """Owner of one worker's blocks and of every request and sequence."""

    def __init__(self, max_sequences: int, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self.pool = BlockPool(geometry.num_blocks, geometry.block_size)
        self.host = HostTier(geometry.num_host_blocks, self.pool.moves)
        self.sequences = SequenceTable(max_sequences, geometry)
        self.requests: dict[str, RequestRecord] = {}
        self.tenants = Tenants()
        self.quota = Quota()
        self.pins: dict[int, HeldPrefix] = {}
        self._next_pin_id = 1
        self.num_preemptions = 0
        self.num_expired_requests = 0
        self._next_arrival_number = 1
        self._effects = StepEffects()
        self._filled: list[Filled] = []
        self._carry_out: dict[type, Callable[[Any], OpResult]] = {
            b.Arrive: self._arrive,
            b.Admit: self._admit,
            b.Commit: self._commit,
            b.Reserve: self._reserve,
            b.Append: self._append,
            b.Fork: self._fork,
            b.Preempt: self._preempt,
            b.SwapOut: self._swap_out,
            b.SwapIn: self._swap_in,
            b.Free: self._free,
            b.Confirm: self._confirm,
        }

    def apply(self, ops: Sequence[b.Op]) -> tuple[list[OpResult], StepEffects]:
        """Carry out `ops` in order. A mistaken or unlucky one leaves the others alone."""
        self._effects = StepEffects()
        return [self._apply_one(op) for op in ops], self._effects

    def publish_filled(self) -> None:
        """Publish what Commits have filled. It is half the work of a decode step, and the results
        of a Commit and of the Reserve after it do not depend on it: so it is put off until any
        other op is carried out, or until there is time, and no step waits for it."""
        if self._filled:
            for filled in self._filled:
                publish(self.sequences, self.pool, filled)
            self._filled.clear()

    def _apply_one(self, op: b.Op) -> OpResult:
        if self._filled and type(op) is not b.Reserve:
            self.publish_filled()
        try:
            return self._carry_out[type(op)](op)
        except OpMistake as mistake:
            return OpResult(mistake.status, mistake.message)

    # --- pools and epochs --------------------------------------------------------------

    def replace_pool(self, geometry: PoolGeometry) -> None:
        """Take on a new worker's pool: the KV of the old one is gone, everybody waits again.

        Raises MemoryError, with nothing changed.
        """
        pool = BlockPool(geometry.num_blocks, geometry.block_size)
        host = HostTier(geometry.num_host_blocks, pool.moves)
        self.sequences.reshape(geometry)
        pool.reserve_tenants(self.tenants.capacity)
        pool.cache.enabled = self.pool.cache.enabled
        self.pool, self.host, self.geometry = pool, host, geometry
        self.pins.clear()

    def begin_step(self, step_id: int, acknowledged_step: int) -> None:
        """Step `step_id` is being prepared; what waited for `acknowledged_step` is free."""
        self.pool.begin_step(step_id, acknowledged_step)
        self.host.begin_step(acknowledged_step)

    def take_over(self, step_id: int, last_executed_step: int, acknowledged_step: int) -> None:
        """A new epoch goes on with step `step_id`, the one that was being prepared or a later one.

        Of the former epoch's steps those up to `last_executed_step` were executed, and no other
        ever will be. The copies and swaps that those were to make become the next step's; what
        they read and write stays held for it.
        """
        pool, host = self.pool, self.host
        pending = pool.moves.take_over(step_id, last_executed_step, pool.ref_counts)
        pool.hold_longer(pending.blocks(), step_id)
        host.hold_longer(pending.host_blocks(), step_id)
        self.begin_step(step_id, acknowledged_step)

    def configure(self, configuration: Configure) -> None:
        """Keep to other quotas from now on; let go of everything cached if that is not wanted."""
        self.quota = configuration.quota
        cache = self.pool.cache
        cache.enabled = configuration.use_prefix_cache
        if cache.enabled:
            return
        for pin_id in list(self.pins):
            self.unpin(pin_id)
        for row in list(self.sequences.chains):
            self.sequences.end_caching(row)
        blocks = np.array(sorted(cache.index.values()), np.int32)
        cache.forget(blocks)
        self.pool.drop_content(blocks)

    def expire(self, request_ids: Sequence[str]) -> Expired:
        """Drop records that are there, and take the blocks of their sequences back as of the step
        the pool is at."""
        table = self.sequences
        records = [
            self.requests[name] for name in dict.fromkeys(request_ids) if name in self.requests
        ]
        rows = [table.row_of(i) for record in records for i in record.live.values()]
        for row in rows:
            self._let_go(row)
        for record in records:
            self.tenants.tenant(record.tenant_number).num_sequences -= record.num_seats
        for row in rows:
            table.remove(row)
        for record in records:
            self._drop(record)
        self.num_expired_requests += len(records)
        return Expired(len(records), len(rows))

    # --- cached prefixes ---------------------------------------------------------------

    def num_cached_tokens(self, domain: Domain, token_ids: b.Column) -> int:
        """Of the longest prefix that is cached for `domain`: whole blocks."""
        return len(self._cached_prefix(domain, token_ids)) * self.geometry.block_size

    def _cached_prefix(self, domain: Domain, token_ids: b.Column) -> list[int]:
        return self.pool.cache.match(Chain.at_root(domain), token_ids)

    def pin(self, mutation: Pin) -> Pinned:
        """Raises NoFreeBlocks or TenantQuota, with nothing changed."""
        blocks = np.array(self._cached_prefix(mutation.domain, mutation.token_ids), np.int32)
        if not blocks.size:
            return Pinned(0, 0)
        num_pinned = sum(pin.blocks.size for pin in self.pins.values()) + blocks.size
        if len(self.pins) == MAX_PINS or 2 * num_pinned > self.pool.num_blocks:
            raise NoFreeBlocks(
                f"{len(self.pins)} pins hold {num_pinned - blocks.size} blocks and this one would"
                f" hold {blocks.size}: there may be {MAX_PINS}, of half the"
                f" {self.pool.num_blocks} blocks in all"
            )
        tenant = self._tenant_number(mutation.domain.tenant)
        num_idle = int(np.count_nonzero(self.pool.ref_counts[blocks] == 0))
        over = self._over_quota({tenant: num_idle}, "pin")
        if over is not None:
            raise TenantQuota(over.message)
        self.pool.hold(blocks, tenant)
        tokens = mutation.token_ids[: blocks.size * self.geometry.block_size].copy()
        pin = HeldPrefix(
            self._next_pin_id,
            mutation.domain,
            blocks,
            tokens,
            mutation.ttl_ms,
            mutation.is_public,
        )
        self._next_pin_id += 1
        self.pins[pin.pin_id] = pin
        self._tell_what_is_pinned()
        return Pinned(pin.pin_id, tokens.size)

    def unpin(self, pin_id: int) -> None:
        """Let go of a pin; of one that is not there any more nothing needs to be done."""
        pin = self.pins.pop(pin_id, None)
        if pin is not None:
            self._tell_what_is_pinned()
            self.pool.unreference(pin.blocks)

    def _tell_what_is_pinned(self) -> None:
        self.pool.cache.pinned = [pin.prefix() for pin in self.pins.values()]

    # --- tenants -----------------------------------------------------------------------

    def _tenant_number(self, name: str) -> int:
        number = self.tenants.number_of(name, self.pool.num_blocks_of.tolist())
        self.pool.reserve_tenants(self.tenants.capacity)
        return number

    def _over_quota(self, num_blocks_of: Mapping[int, int], op: str) -> OpResult | None:
        return too_many_blocks(self.quota, self.tenants, self.pool, num_blocks_of, op)

    # --- requests ----------------------------------------------------------------------

    def _arrive(self, op: b.Arrive) -> OpResult:
        if op.request_id in self.requests:
            raise OpMistake(OpStatus.ALREADY_EXISTS, f"request {op.request_id!r} is live already")
        num_rows = plan_arrival(self.sequences, op)
        if num_rows > self.sequences.num_free_rows:
            return self._no_free_sequences(num_rows)
        if len(self.requests) >= MAX_RECORDS_PER_SEQUENCE * self.sequences.max_sequences:
            return OpResult(
                OpStatus.NO_FREE_SEQUENCES,
                f"{len(self.requests)} requests are not confirmed yet",
            )
        ended = sum(one.finish_reason != b.FinishReason.UNSPECIFIED for one in op.candidates)
        num_seats = op.num_candidates - ended if num_rows else 0
        over = too_many_sequences(self.quota, self.tenants, op.tenant, num_seats)
        if over is None and num_rows:
            num_tokens, block_size = op.prompt_token_ids.size, self.geometry.block_size
            over = too_long_a_prompt(self.quota, op.tenant, num_tokens, block_size)
        if over is not None:
            return over
        tenant_number = self._tenant_number(op.tenant)
        record = RequestRecord(
            op.request_id,
            self._next_arrival_number,
            op.num_candidates,
            op.prompt_token_ids.size,
            op.tenant,
            op.request_spec,
            op.request_digest,
            op.cache_salt,
            tenant_number,
        )
        self._next_arrival_number += 1
        self.requests[op.request_id] = record
        tenant = self.tenants.tenant(tenant_number)
        tenant.num_records += 1
        tenant.num_sequences += num_seats
        ids = commit_arrival(self.sequences, record, op)
        arrived = b.Arrived(ids[0], record.arrival_number, ids if op.candidates else ())
        return OpResult(OpStatus.OK, value=arrived)

    def _confirm(self, op: b.Confirm) -> OpResult:
        record = self.requests.get(op.request_id)
        if record is None:
            raise OpMistake(OpStatus.UNKNOWN_REQUEST, f"there is no request {op.request_id!r}")
        if record.live:
            raise OpMistake(
                OpStatus.INVALID_STATE,
                f"confirm: request {op.request_id!r} still has {len(record.live)} live"
                f" sequences, {sorted(record.live.values())}",
            )
        self._drop(record)
        return OK

    def _drop(self, record: RequestRecord) -> None:
        for finished in record.finished.values():
            del self.sequences.finished[finished.sequence_id]
        del self.requests[record.request_id]
        self.tenants.tenant(record.tenant_number).num_records -= 1

    # --- blocks for a first time, and back ---------------------------------------------

    def _admit(self, op: b.Admit) -> OpResult:
        plan = plan_admission(self.sequences, self.pool, op, may_copy=True)
        refused = self._refuse_admission(plan)
        if refused is not None and plan.copies:
            plan = plan_admission(self.sequences, self.pool, op, may_copy=False)
            refused = self._refuse_admission(plan)
        if refused is not None:
            return refused
        tables = commit_admission(self.sequences, self.pool, plan, self._effects)
        return OpResult(OpStatus.OK, value=b.Admitted(tables))

    def _refuse_admission(self, plan: AdmissionPlan) -> OpResult | None:
        """What an Admit is told that does not fit."""
        if plan.num_blocks > self.pool.num_available:
            over = self._over_quota(plan.num_blocks_of, "admit")
            return over or self._no_free_blocks("admit", plan.num_blocks)
        return self._over_quota(plan.num_blocks_of, "admit")

    def _preempt(self, op: b.Preempt) -> OpResult:
        table = self.sequences
        rows = table.distinct_rows(list(op.sequence_ids))
        for row, sequence_id in zip(rows, op.sequence_ids, strict=True):
            require(table.status_of(row), "preempt", sequence_id)
        for row in rows:
            self.num_preemptions += table.status_of(row) is Status.RUNNING
            self._let_go(row)
            table.empty_table(row)
            table.status[row] = Status.WAITING
        return OK

    def _let_go(self, row: int) -> None:
        """Give the row's blocks back, wherever they are."""
        table = self.sequences
        swap_map = table.swap_maps.pop(row, None)
        if swap_map is not None:
            self.host.unreference(swap_map.host_blocks)
        self.pool.unreference(table.table(row))

    def _swap_out(self, op: b.SwapOut) -> OpResult:
        plan = plan_swap_out(self.sequences, op)
        if plan.blocks.size > self.host.num_free:
            return OpResult(
                OpStatus.NO_FREE_HOST_BLOCKS,
                f"swap out: {plan.blocks.size} host blocks are needed, {self.host.num_free} of"
                f" {self.host.num_blocks} are free",
            )
        commit_swap_out(self.sequences, self.pool, self.host, plan, self._effects)
        self.num_preemptions += len(plan.rows)
        return OK

    def _swap_in(self, op: b.SwapIn) -> OpResult:
        table = self.sequences
        plan = plan_swap_in(table, op)
        over = self._over_quota(
            {int(table.tenant[row]): plan.num_blocks for row in plan.rows[:1]}, "swap in"
        )
        if over is not None:
            return over
        if plan.num_blocks > self.pool.num_available:
            return self._no_free_blocks("swap in", plan.num_blocks)
        tables = commit_swap_in(table, self.pool, self.host, plan, self._effects)
        return OpResult(OpStatus.OK, value=b.SwappedIn(tables))

    def _free(self, op: b.Free) -> OpResult:
        if op.finish_reason not in b.FINISH_REASONS:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT, f"free: there is no finish_reason {op.finish_reason}"
            )
        table = self.sequences
        rows = table.distinct_rows(list(op.sequence_ids))
        for row, sequence_id in zip(rows, op.sequence_ids, strict=True):
            require(table.status_of(row), "free", sequence_id)
        for row in rows:
            self._finish(row, b.FinishReason(op.finish_reason))
        return OK

    def _finish(self, row: int, reason: b.FinishReason) -> None:
        table = self.sequences
        record = table.record_of(row)
        num_seats = record.num_seats
        self._let_go(row)
        finished = FinishedSequence(
            table.id_of(row),
            record.request_id,
            int(table.candidate[row]),
            table.tokens[row, : table.length[row]].copy(),
            int(table.num_prompt_tokens[row]),
            int(table.num_computed[row]),
            int(table.table_version[row]),
            reason,
            table.scheduler_state(row),
        )
        table.remove(row)
        record.finished[finished.candidate] = finished
        table.finished[finished.sequence_id] = finished
        self.tenants.tenant(record.tenant_number).num_sequences += record.num_seats - num_seats

    # --- steps -------------------------------------------------------------------------

    def _commit(self, op: b.Commit) -> OpResult:
        plan = plan_commit(self.sequences, op)
        before = self.sequences.num_computed[plan.rows]
        commit_tokens(self.sequences, plan, op)
        filled = filled_blocks(self.sequences, plan.rows, before)
        if filled is not None:
            self._filled.append(filled)
        return OK

    def _reserve(self, op: b.Reserve) -> OpResult:
        table, pool = self.sequences, self.pool
        rows = table.rows_of(op.sequence_ids)
        check_reserve(table, op, rows)
        plan = plan_slots(table, pool, rows, table.num_computed[rows], op.num_slots)
        if plan.num_blocks <= pool.num_available and not exceeds(self.quota, table, pool, plan):
            commit_slots(table, pool, plan, self._effects)
            return OK
        return reserve_what_fits(table, pool, op, plan, self.quota.max_blocks, self._effects)

    def _append(self, op: b.Append) -> OpResult:
        table = self.sequences
        plan = plan_append(table, self.pool, op)
        rows = plan.rows
        over = self._over_quota({int(table.tenant[rows[0]]): plan.num_blocks}, "append")
        if over is not None:
            return over
        if plan.num_blocks > self.pool.num_available:
            return self._no_free_blocks("append", plan.num_blocks)
        before = table.num_computed[rows]
        commit_append(table, self.pool, op, plan, self._effects)
        filled = filled_blocks(table, rows, before)
        if filled is not None:
            publish(table, self.pool, filled)
        return OK

    def _fork(self, op: b.Fork) -> OpResult:
        table = self.sequences
        candidates = plan_fork(table, op)
        if op.num_children > table.num_free_rows:
            return self._no_free_sequences(op.num_children)
        return OpResult(OpStatus.OK, value=commit_fork(table, self.pool, op, candidates))

    # --- normal results of a full memory -----------------------------------------------

    def _no_free_blocks(self, op: str, needed: int) -> OpResult:
        return OpResult(
            OpStatus.NO_FREE_BLOCKS,
            f"{op}: {needed} blocks are needed, {self.pool.num_available} are free",
        )

    def _no_free_sequences(self, needed: int) -> OpResult:
        return OpResult(
            OpStatus.NO_FREE_SEQUENCES,
            f"{needed} sequences are needed, {self.sequences.num_free_rows} are free",
        )
