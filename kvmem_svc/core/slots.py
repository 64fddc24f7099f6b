"""Making slots: new blocks at the end of tables, copies of shared blocks about to be written.

Plan, then commit: a plan reads the tables and says what is needed; committing it takes the
blocks and cannot fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvmem_svc.core.batch import (
    NO_COPIES,
    NO_DELTAS,
    NO_INT32,
    BlockCopies,
    Column,
    TableDeltas,
)
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import Rows, SequenceTable


class StepEffects:
    """What the ops of one batch change for the worker, gathered op by op."""

    def __init__(self) -> None:
        self._deltas: list[TableDeltas] = []
        self._copies: list[BlockCopies] = []
        self._swap_ins: list[BlockCopies] = []
        self._swap_outs: list[BlockCopies] = []

    def add(self, deltas: TableDeltas, copies: BlockCopies) -> None:
        if deltas.sequence_ids.size:
            self._deltas.append(deltas)
        if copies.src_block_ids.size:
            self._copies.append(copies)

    def add_swap_ins(self, swap_ins: BlockCopies) -> None:
        if swap_ins.src_block_ids.size:
            self._swap_ins.append(swap_ins)

    def add_swap_outs(self, swap_outs: BlockCopies) -> None:
        if swap_outs.src_block_ids.size:
            self._swap_outs.append(swap_outs)

    def deltas(self) -> TableDeltas:
        if len(self._deltas) < 2:
            return self._deltas[0] if self._deltas else NO_DELTAS
        return TableDeltas(
            np.concatenate([d.sequence_ids for d in self._deltas]),
            np.concatenate([d.table_indices for d in self._deltas]),
            np.concatenate([d.block_ids for d in self._deltas]),
            np.concatenate([d.table_versions for d in self._deltas]),
        )

    def copies(self) -> BlockCopies:
        return _joined(self._copies) if self._copies else NO_COPIES

    def swap_ins(self) -> BlockCopies:
        return _joined(self._swap_ins) if self._swap_ins else NO_COPIES

    def swap_outs(self) -> BlockCopies:
        return _joined(self._swap_outs) if self._swap_outs else NO_COPIES


def _joined(parts: list[BlockCopies]) -> BlockCopies:
    if len(parts) == 1:
        return parts[0]
    return BlockCopies(
        np.concatenate([one.src_block_ids for one in parts]),
        np.concatenate([one.dst_block_ids for one in parts]),
    )


@dataclass(slots=True)
class SharedWrites:
    """Existing blocks in a range about to be written that are shared: with ref_count > 1, or
    published, since whoever has the same prefix may come to hold those.

    One a row, in order of the plan's rows: `owner` is a position in the plan's rows,
    `table_index` the entry and `block_id` what it holds. int32/intp[W].
    """

    owner: Column
    table_index: Column
    block_id: Column


NO_SHARED_WRITES = SharedWrites(NO_INT32, NO_INT32, NO_INT32)


@dataclass(slots=True)
class SlotPlan:
    """What it takes to make slots for `rows`.

    `num_new[i]` blocks at the end of table i; a copy for the shared writes in `to_copy`
    (positions in `shared`): of m writers of a block with ref_count r the first min(m, r - 1)
    copy, and if nobody else holds it the last one writes in place; of a published one all copy.
    """

    rows: Rows
    num_new: Column
    shared: SharedWrites
    to_copy: Column
    num_blocks: int


def plan_slots(
    sequences: SequenceTable,
    pool: BlockPool,
    rows: Rows,
    num_computed: Column,
    num_slots: Column,
) -> SlotPlan:
    """Plan slots [num_computed, num_slots) of each of `rows` to exist and be writable."""
    block_size = sequences.block_size
    num_blocks = (num_slots + (block_size - 1)) // block_size
    table_len = sequences.table_len[rows]
    num_new = np.maximum(num_blocks - table_len, 0)
    shared, to_copy = NO_SHARED_WRITES, NO_INT32
    may_share = sequences.may_share[rows]
    if may_share.any():
        first = num_computed // block_size
        end = np.minimum(num_blocks, table_len)
        writes = may_share & (num_slots > num_computed) & (end > first)
        shared = _shared_writes(sequences, pool, rows, first, np.where(writes, end - first, 0))
        to_copy = _first_writers(pool, shared.block_id)
    return SlotPlan(rows, num_new, shared, to_copy, int(num_new.sum()) + to_copy.size)


def _shared_writes(
    sequences: SequenceTable, pool: BlockPool, rows: Rows, first: Column, span: Column
) -> SharedWrites:
    owner, offset = expand(span)
    table_index = first[owner] + offset
    block_id = sequences.tables[rows[owner], table_index]
    is_shared = (pool.ref_counts[block_id] > 1) | pool.cache.is_published(block_id)
    return SharedWrites(owner[is_shared], table_index[is_shared], block_id[is_shared])


def _first_writers(pool: BlockPool, block_id: Column) -> Column:
    """Positions of the writers that must copy, in order."""
    num_copies = pool.ref_counts[block_id] - 1 + pool.cache.is_published(block_id)
    return np.flatnonzero(ranks(block_id) < num_copies).astype(np.int32)


def ranks(values: Column) -> Column:
    """For each how many before it are equal to it: of [7, 3, 7, 7] it is [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    grouped = values[order]
    starts = np.flatnonzero(np.diff(grouped, prepend=-1))
    rank = np.empty(values.size, np.intp)
    rank[order] = np.arange(grouped.size) - np.repeat(starts, np.diff(starts, append=grouped.size))
    return rank


def expand(counts: Column) -> tuple[Rows, Column]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and offsets [0, 1, 0, 1, 2]."""
    if (counts == 1).all():  # steady decode
        return np.arange(counts.size), np.zeros(counts.size, np.intp)
    owner = np.repeat(np.arange(counts.size), counts)
    start = np.cumsum(counts) - counts
    return owner, np.arange(owner.size) - start[owner]


def commit_slots(
    sequences: SequenceTable, pool: BlockPool, plan: SlotPlan, effects: StepEffects
) -> None:
    """Carry out a plan that fits: `plan.num_blocks` are available."""
    if not plan.num_blocks:
        return
    rows = plan.rows
    num_copies = plan.to_copy.size
    if int(plan.num_new.max()) == 1 and not num_copies:  # steady decode: one more at the end
        owner = plan.num_new.nonzero()[0]
        table_index = sequences.table_len[rows[owner]]
    else:
        owner, offset = expand(plan.num_new)
        table_index = sequences.table_len[rows[owner]] + offset
    if num_copies:
        owner = np.concatenate((plan.shared.owner[plan.to_copy], owner))
        table_index = np.concatenate((plan.shared.table_index[plan.to_copy], table_index))
    changed_rows = rows[owner]
    blocks = pool.allocate(plan.num_blocks, sequences.tenant[changed_rows])
    copies = NO_COPIES
    if num_copies:
        sources = plan.shared.block_id[plan.to_copy]
        copies = BlockCopies(pool.copy_on_write(sources, blocks[:num_copies]), blocks[:num_copies])
    sequences.tables[changed_rows, table_index] = blocks
    sequences.table_len[rows] += plan.num_new
    # Once per sequence, however many entries changed: assignment, not accumulation.
    versions = sequences.table_version[changed_rows] + 1
    sequences.table_version[changed_rows] = versions
    deltas = TableDeltas(
        sequences.live_ids[changed_rows],
        table_index.astype(np.int32),
        blocks,
        versions.astype(np.uint32),
    )
    effects.add(deltas, copies)


def blocks_by_tenant(sequences: SequenceTable, plan: SlotPlan) -> Column:
    """What a plan needs for each tenant, by number; int64."""
    tenants = sequences.tenant[plan.rows]
    copies = tenants[plan.shared.owner[plan.to_copy]]
    return np.bincount(tenants, plan.num_new).astype(np.int64) + np.bincount(
        copies, minlength=int(tenants.max(initial=-1)) + 1
    )


class Verdict(IntEnum):
    """What became of a group of sequences that want slots."""

    FITS = 0
    NO_BLOCKS = 1
    OVER_QUOTA = 2


def groups_that_fit(
    sequences: SequenceTable, plan: SlotPlan, group_sizes: Column, pool: BlockPool, max_blocks: int
) -> list[Verdict]:
    """Which groups get their blocks when not all can: each in order, if it still fits.

    A group that fails leaves its shared blocks shared, so what the later ones must copy is
    counted along the way. max_blocks: of each tenant, 0 for no limit.
    """
    num_free = pool.num_available
    tenants = sequences.tenant[plan.rows].tolist()
    room = [max_blocks - count for count in pool.num_blocks_of.tolist()]
    shared_of: dict[int, list[int]] = {}
    for owner, block in zip(plan.shared.owner.tolist(), plan.shared.block_id.tolist(), strict=True):
        shared_of.setdefault(owner, []).append(block)
    num_new = plan.num_new.tolist()
    ref_counts: dict[int, int] = {}
    verdicts: list[Verdict] = []
    member = 0
    for size in group_sizes.tolist():
        needed, dropped = 0, {}
        needed_by: dict[int, int] = {}
        for owner in range(member, member + size):
            needed_before = needed
            needed += num_new[owner]
            for block in shared_of.get(owner, ()):
                left = ref_counts.get(block, int(pool.ref_counts[block])) - dropped.get(block, 0)
                if left > 1 or pool.cache.serials[block]:
                    needed += 1
                    dropped[block] = dropped.get(block, 0) + 1
            tenant = tenants[owner]
            needed_by[tenant] = needed_by.get(tenant, 0) + needed - needed_before
        member += size
        if max_blocks and any(count > max(room[t], 0) for t, count in needed_by.items()):
            verdicts.append(Verdict.OVER_QUOTA)
        elif needed > num_free:
            verdicts.append(Verdict.NO_BLOCKS)
        else:
            verdicts.append(Verdict.FITS)
            num_free -= needed
            for tenant, count in needed_by.items():
                room[tenant] -= count
            for block, count in dropped.items():
                ref_counts[block] = ref_counts.get(block, int(pool.ref_counts[block])) - count
    return verdicts
