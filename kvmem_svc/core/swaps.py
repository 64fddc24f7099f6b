"""SwapOut and SwapIn: the sequences of a group leave the pool for the host tier, and come back.

Preemption by swapping (Kwon et al. 2023, §4.5). Plan, then commit, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmem_svc.core.batch import (
    NO_DELTAS,
    NO_INT32,
    BlockCopies,
    BlockTable,
    Column,
    OpStatus,
    SwapIn,
    SwapOut,
)
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.host_tier import HostTier
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import Chain
from kvmem_svc.core.sequences import SequenceTable, require
from kvmem_svc.core.slots import StepEffects, expand, ranks


def _require_one_group(table: SequenceTable, rows: Sequence[int], op: str) -> None:
    for row in rows[1:]:
        if table.record_of(row) is not table.record_of(rows[0]):
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"{op}: sequences {table.id_of(rows[0])} and {table.id_of(row)} are of different"
                " requests",
            )


# --- out -------------------------------------------------------------------------------


@dataclass(slots=True)
class SwapOutPlan:
    """blocks: those of the rows' tables, each once, int32[B]; num_holders: how many of the rows
    hold each, int32[B]; places: for every entry of the tables, one table after the other, where it
    stands in `blocks`."""

    rows: Sequence[int]
    blocks: Column
    num_holders: Column
    places: Column


def plan_swap_out(table: SequenceTable, op: SwapOut) -> SwapOutPlan:
    """Check a SwapOut against the table. Raises OpMistake."""
    rows = table.distinct_rows(list(op.sequence_ids))
    for row, sequence_id in zip(rows, op.sequence_ids, strict=True):
        require(table.status_of(row), "swap out", sequence_id)
    _require_one_group(table, rows, "swap out")
    entries = np.concatenate([NO_INT32, *(table.table(row) for row in rows)])
    blocks, places, counts = np.unique(entries, return_inverse=True, return_counts=True)
    return SwapOutPlan(rows, blocks, counts.astype(np.int32), places)


def commit_swap_out(
    table: SequenceTable,
    pool: BlockPool,
    host: HostTier,
    plan: SwapOutPlan,
    effects: StepEffects,
) -> None:
    """Carry out a plan that fits: as many host blocks are free."""
    host_blocks = host.allocate(plan.num_holders)
    sources = pool.moves.of_step().add_swap_outs(plan.blocks, host_blocks)
    effects.add_swap_outs(BlockCopies(sources, host_blocks))
    entries, start = host_blocks[plan.places], 0
    for row in plan.rows:
        blocks = table.table(row)
        table.swap_out(row, entries[start : start + blocks.size])
        pool.unreference(blocks)
        start += blocks.size


# --- in --------------------------------------------------------------------------------


@dataclass(slots=True)
class SwapInPlan:
    """sources: the host block that each new block is filled from, int32[B]. One that members share
    is there once, and once more for each of them that will write to its own.

    num_holders: how many members will hold each, int32[B]. places: for every entry of the swap
    maps, one map after the other, where it stands in `sources`. num_new: blocks at the end of each
    member's table, int32[members].
    """

    rows: Sequence[int]
    sources: Column
    num_holders: Column
    places: Column
    num_new: Column

    @property
    def num_blocks(self) -> int:
        return self.sources.size + int(self.num_new.sum())


def plan_swap_in(table: SequenceTable, op: SwapIn) -> SwapInPlan:
    """Check a SwapIn against the table. Raises OpMistake.

    Of m members that will write to what r of them share the first min(m, r - 1) get a block of
    their own, as with a copy on write; but no copy is made, since the content comes from the host.
    """
    rows = table.distinct_rows([member.sequence_id for member in op.members])
    for member, row in zip(op.members, rows, strict=True):
        require(table.status_of(row), "swap in", member.sequence_id)
        if not 1 <= member.num_slots <= table.max_model_len:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"swap in: num_slots of sequence {member.sequence_id} is {member.num_slots}, it"
                f" must be 1 .. {table.max_model_len}",
            )
    _require_one_group(table, rows, "swap in")
    num_slots = np.array([member.num_slots for member in op.members], np.int32)
    num_computed = table.num_computed[np.array(rows, np.intp)]
    num_blocks = -(-num_slots // table.block_size)
    maps = [table.swap_maps[row].host_blocks for row in rows]
    map_len = np.array([one.size for one in maps], np.int32)
    sources, places = np.unique(np.concatenate([NO_INT32, *maps]), return_inverse=True)
    owner, index = expand(map_len)
    is_written = (
        (index >= (num_computed // table.block_size)[owner])
        & (index < num_blocks[owner])
        & (num_slots > num_computed)[owner]
    )
    shared = np.bincount(places, minlength=sources.size)
    writes = np.flatnonzero(is_written)
    own = writes[ranks(places[writes]) < shared[places[writes]] - 1]
    sources = np.concatenate((sources, sources[places[own]]))
    places[own] = np.arange(sources.size - own.size, sources.size)
    num_holders = np.bincount(places, minlength=sources.size).astype(np.int32)
    return SwapInPlan(rows, sources, num_holders, places, np.maximum(num_blocks - map_len, 0))


def commit_swap_in(
    table: SequenceTable,
    pool: BlockPool,
    host: HostTier,
    plan: SwapInPlan,
    effects: StepEffects,
) -> list[BlockTable]:
    """Carry out a plan that fits: `plan.num_blocks` are available. Rows are of one tenant."""
    if not plan.rows:
        return []
    given = pool.allocate(plan.num_blocks, int(table.tenant[plan.rows[0]]))
    blocks, new = given[: plan.sources.size], given[plan.sources.size :]
    pool.reference(blocks, plan.num_holders - 1)
    swap_ins, copies = pool.moves.of_step().add_swap_ins(plan.sources, blocks)
    effects.add_swap_ins(swap_ins)
    effects.add(NO_DELTAS, copies)
    host.num_swapped_in += blocks.size
    entries, is_shared = blocks[plan.places], (plan.num_holders > 1)[plan.places]
    entry = first_new = 0
    tables = []
    for row, num_new in zip(plan.rows, plan.num_new.tolist(), strict=True):
        swap_map = table.swap_maps[row]
        end = entry + swap_map.host_blocks.size
        mine = np.concatenate((entries[entry:end], new[first_new : first_new + num_new]))
        table.swap_in(row, mine)
        table.may_share[row] = bool(is_shared[entry:end].any())
        if swap_map.was_caching and pool.cache.enabled:
            # From the beginning: what is cached of it by now is not known, and will be found.
            table.begin_caching(row, Chain.at_root(table.record_of(row).domain), 0)
        host.unreference(swap_map.host_blocks)
        tables.append(_table_of(table, row))
        entry, first_new = end, first_new + num_new
    return tables


def _table_of(table: SequenceTable, row: int) -> BlockTable:
    return BlockTable(
        table.id_of(row),
        table.table(row),
        int(table.table_version[row]),
        int(table.num_computed[row]),
    )
