"""The block manager: carries out the ops of a batch against the pool and the sequence table.

Every op is all or nothing. Its method first checks and plans, raising OpMistake for a
caller's mistake and returning NO_FREE_* when the memory is full; only then does it write,
and from there on it cannot fail. So there is never half an op to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.admission import AdmissionPlan, commit_admission, plan_admission
from kvmem_svc.core.arrival import commit_arrival, plan_arrival
from kvmem_svc.core.batch import OK, OpResult, OpStatus, PoolGeometry
from kvmem_svc.core.errors import NoFreeBlocks, OpMistake, TenantQuota
from kvmem_svc.core.limits import MAX_PINS, MAX_RECORDS_PER_SEQUENCE
from kvmem_svc.core.mutations import Configure, Expired, Pin, Pinned
from kvmem_svc.core.pins import HeldPrefix
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import Chain, Domain
from kvmem_svc.core.publication import Filled, filled_blocks, publish
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import RUNNING, SequenceTable, Status, require
from kvmem_svc.core.slots import (
    SlotPlan,
    StepEffects,
    Verdict,
    blocks_by_tenant,
    commit_slots,
    groups_that_fit,
    plan_slots,
)
from kvmem_svc.core.tenants import Quota, Tenants
from kvmem_svc.core.tokens import check_token_ids, commit_tokens, plan_commit


class BlockManager:
    """Owner of one worker's blocks and of every request and sequence."""

    def __init__(self, max_sequences: int, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self.pool = BlockPool(geometry.num_blocks, geometry.block_size)
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
        self.sequences.reshape(geometry)
        pool.reserve_tenants(self.tenants.capacity)
        pool.cache.enabled = self.pool.cache.enabled
        self.pool, self.geometry = pool, geometry
        self.pins.clear()

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
            self.pool.unreference(table.table(row))
            self._remove(row)
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
        self._tell_what_is_public()
        return Pinned(pin.pin_id, tokens.size)

    def unpin(self, pin_id: int) -> None:
        """Let go of a pin; of one that is not there any more nothing needs to be done."""
        pin = self.pins.pop(pin_id, None)
        if pin is not None:
            self._tell_what_is_public()
            self.pool.unreference(pin.blocks)

    def _tell_what_is_public(self) -> None:
        self.pool.cache.public = [pin.public() for pin in self.pins.values() if pin.is_public]

    # --- tenants -----------------------------------------------------------------------

    def _tenant_number(self, name: str) -> int:
        number = self.tenants.number_of(name, self.pool.num_blocks_of.tolist())
        self.pool.reserve_tenants(self.tenants.capacity)
        return number

    def _too_many_sequences(self, tenant: str, count: int) -> OpResult | None:
        """What an op is told that would make `count` more."""
        limit = self.quota.max_sequences
        number = self.tenants.numbers.get(tenant)
        current = self.tenants.tenant(number).num_sequences if number is not None else 0
        if not limit or current + count <= limit:
            return None
        return OpResult(
            OpStatus.TENANT_QUOTA,
            f"tenant {tenant!r} has {current} sequences and wants {count} more, its quota is"
            f" {limit}",
        )

    def _over_quota(self, num_blocks_of: Mapping[int, int], op: str) -> OpResult | None:
        """What an op is told that would take so many blocks more, by number of a tenant."""
        limit = self.quota.max_blocks
        if not limit:
            return None
        for number, count in num_blocks_of.items():
            current = int(self.pool.num_blocks_of[number])
            if count and current + count > limit:
                return OpResult(
                    OpStatus.TENANT_QUOTA,
                    f"{op}: tenant {self.tenants.tenant(number).name!r} has {current} blocks and"
                    f" needs {count} more, its quota is {limit}",
                )
        return None

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
        over = self._too_many_sequences(op.tenant, num_rows)
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
        tenant.num_sequences += num_rows
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

    def _remove(self, row: int) -> RequestRecord:
        """Clear the row of a sequence whose blocks are gone."""
        record = self.sequences.remove(row)
        self.tenants.tenant(record.tenant_number).num_sequences -= 1
        return record

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
            self.pool.unreference(table.table(row))
            table.empty_table(row)
            table.status[row] = Status.WAITING
        self.num_preemptions += len(rows)
        return OK

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
        self.pool.unreference(table.table(row))
        finished = FinishedSequence(
            table.id_of(row),
            table.record_of(row).request_id,
            int(table.candidate[row]),
            table.tokens[row, : table.length[row]].copy(),
            int(table.num_prompt_tokens[row]),
            int(table.num_computed[row]),
            int(table.table_version[row]),
            reason,
            table.scheduler_state(row),
        )
        record = self._remove(row)
        record.finished[finished.candidate] = finished
        table.finished[finished.sequence_id] = finished

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
        table = self.sequences
        rows = table.rows_of(op.sequence_ids)
        self._check_reserve(op, rows)
        plan = plan_slots(table, self.pool, rows, table.num_computed[rows], op.num_slots)
        max_blocks = self.quota.max_blocks
        if plan.num_blocks <= self.pool.num_available and not self._exceeds(plan):
            commit_slots(table, self.pool, plan, self._effects)
            return OK
        sizes = op.group_sizes if op.group_sizes.size else np.ones(rows.size, np.int32)
        verdicts = np.array(groups_that_fit(table, plan, sizes, self.pool, max_blocks))
        fits = verdicts == Verdict.FITS
        kept = np.repeat(fits, sizes)
        rows = rows[kept]
        plan = plan_slots(table, self.pool, rows, table.num_computed[rows], op.num_slots[kept])
        commit_slots(table, self.pool, plan, self._effects)
        failed = np.flatnonzero(~fits).astype(np.int32)
        over_quota = np.flatnonzero(verdicts == Verdict.OVER_QUOTA).astype(np.int32)
        only_quotas = over_quota.size == failed.size
        return OpResult(
            OpStatus.TENANT_QUOTA if only_quotas else OpStatus.NO_FREE_BLOCKS,
            f"reserve: {failed.size} of {fits.size} groups got no blocks, {over_quota.size} by"
            f" their tenant's quota, {self.pool.num_available} are free",
            b.Reserved(failed, over_quota),
        )

    def _exceeds(self, plan: SlotPlan) -> bool:
        """Whether a plan is too much for the quota of any tenant."""
        limit = self.quota.max_blocks
        if not limit or not plan.num_blocks:
            return False
        needed = blocks_by_tenant(self.sequences, plan)
        current = self.pool.num_blocks_of[: needed.size]
        return bool(((current + needed > limit) & (needed > 0)).any())

    def _check_reserve(self, op: b.Reserve, rows: np.ndarray) -> None:
        table = self.sequences
        running = table.status[rows] == RUNNING
        if not running.all():
            at = int(running.argmin())
            require(table.status_of(int(rows[at])), "reserve", int(op.sequence_ids[at]))
        if op.num_slots.size != rows.size:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"reserve: {op.num_slots.size} num_slots for {rows.size} sequences",
            )
        if rows.size and not 0 <= op.num_slots.min() <= op.num_slots.max() <= table.max_model_len:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"reserve: num_slots of {int(op.num_slots.min())} .. {int(op.num_slots.max())},"
                f" they must be 0 .. {table.max_model_len}",
            )
        sizes = op.group_sizes
        if sizes.size and (sizes.min() < 1 or int(sizes.sum(dtype=np.int64)) != rows.size):
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"reserve: group_sizes must be from 1 on and add up to {rows.size}, not from"
                f" {int(sizes.min())} on and {int(sizes.sum(dtype=np.int64))}",
            )

    def _append(self, op: b.Append) -> OpResult:
        table = self.sequences
        row = table.row_of(op.sequence_id)
        require(table.status_of(row), "append", op.sequence_id)
        check_token_ids(op.token_ids)
        length = int(table.length[row])
        new_length = length + op.token_ids.size
        if new_length > table.max_model_len:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"append: sequence {op.sequence_id} would have {new_length} tokens, at most"
                f" {table.max_model_len} have slots",
            )
        rows = np.array([row], np.intp)
        plan = plan_slots(
            table, self.pool, rows, np.array([length], np.int32), np.array([new_length], np.int32)
        )
        over = self._over_quota({int(table.tenant[row]): plan.num_blocks}, "append")
        if over is not None:
            return over
        if plan.num_blocks > self.pool.num_available:
            return self._no_free_blocks("append", plan.num_blocks)
        before = table.num_computed[rows]
        table.tokens[row, length:new_length] = op.token_ids
        table.length[row] = new_length
        table.num_computed[row] = length
        commit_slots(table, self.pool, plan, self._effects)
        filled = filled_blocks(table, rows, before)
        if filled is not None:
            publish(table, self.pool, filled)
        return OK

    def _fork(self, op: b.Fork) -> OpResult:
        table = self.sequences
        parent = table.row_of(op.sequence_id)
        candidates = self._check_fork(op, parent)
        if op.num_children > table.num_free_rows:
            return self._no_free_sequences(op.num_children)
        over = self._too_many_sequences(table.record_of(parent).tenant, op.num_children)
        if over is not None:
            return over
        record, blocks = table.record_of(parent), table.table(parent)
        tokens = table.tokens[parent, : table.length[parent]]
        self.pool.reference(blocks, op.num_children)
        children = [self._create_child(record, c, parent, tokens) for c in candidates]
        self.tenants.tenant(record.tenant_number).num_sequences += op.num_children
        family = np.array([parent, *children], np.intp)
        if op.state_words.size:
            table.set_words(family, op.state_words)
        if op.token_ids.size:
            table.tokens[family, table.length[family]] = op.token_ids
            table.length[family] += 1
        table.may_share[parent] = True
        ids = [table.id_of(child) for child in children]
        version = int(table.table_version[children[0]])
        return OpResult(OpStatus.OK, value=b.Forked(ids, blocks, version))

    def _check_fork(self, op: b.Fork, parent: int) -> list[int]:
        """The candidate numbers of the children. Raises OpMistake."""
        table = self.sequences
        require(table.status_of(parent), "fork", op.sequence_id)
        check_token_ids(op.token_ids)
        candidates = table.record_of(parent).free_candidates()
        if not 1 <= op.num_children <= len(candidates):
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"fork: num_children of sequence {op.sequence_id} is {op.num_children}, its"
                f" request has {len(candidates)} free candidate numbers",
            )
        for what, column in (("token ids", op.token_ids), ("state_words", op.state_words)):
            if column.size not in (0, 1 + op.num_children):
                raise OpMistake(
                    OpStatus.INVALID_ARGUMENT,
                    f"fork: {column.size} {what} for a parent and {op.num_children} children",
                )
        if op.token_ids.size and table.length[parent] > table.max_model_len:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"fork: sequence {op.sequence_id} has {int(table.length[parent])} tokens and no"
                " room for another",
            )
        return candidates[: op.num_children]

    def _create_child(
        self, record: RequestRecord, candidate: int, parent: int, tokens: b.Column
    ) -> int:
        """A sequence that holds what the parent holds; its table starts at version 1."""
        table = self.sequences
        pruned = record.finished.pop(candidate, None)
        if pruned is not None:
            del table.finished[pruned.sequence_id]
        child = table.create(record, candidate, tokens)
        num_blocks = table.table_len[parent]
        table.tables[child, :num_blocks] = table.tables[parent, :num_blocks]
        table.table_len[child] = num_blocks
        table.table_version[child] = 1
        table.num_computed[child] = table.num_computed[parent]
        table.set_state(child, table.scheduler_state(parent))
        table.status[child] = Status.RUNNING
        table.may_share[child] = True
        if table.is_caching[parent]:
            chain = replace(table.chain_of(parent))
            table.begin_caching(child, chain, int(table.chained_len[parent]))
        return child

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
