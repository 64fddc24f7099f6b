"""Reserve and Append: what they may ask for, and which of many are told no."""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpResult, OpStatus
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import RUNNING, Rows, SequenceTable, require
from kvmem_svc.core.slots import (
    SlotPlan,
    StepEffects,
    Verdict,
    commit_slots,
    groups_that_fit,
    plan_slots,
)
from kvmem_svc.core.tokens import check_token_ids


def check_reserve(table: SequenceTable, op: b.Reserve, rows: Rows) -> None:
    """Check a Reserve of `rows` against the table. Raises OpMistake."""
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


def reserve_what_fits(
    table: SequenceTable,
    pool: BlockPool,
    op: b.Reserve,
    plan: SlotPlan,
    max_blocks: int,
    effects: StepEffects,
) -> OpResult:
    """Slots for those groups of a planned Reserve that can have them, when not all can.
    max_blocks: of each tenant, 0 for no limit."""
    rows = plan.rows
    sizes = op.group_sizes if op.group_sizes.size else np.ones(rows.size, np.int32)
    verdicts = np.array(groups_that_fit(table, plan, sizes, pool, max_blocks))
    fits = verdicts == Verdict.FITS
    kept = np.repeat(fits, sizes)
    rows = rows[kept]
    plan = plan_slots(table, pool, rows, table.num_computed[rows], op.num_slots[kept])
    commit_slots(table, pool, plan, effects)
    failed = np.flatnonzero(~fits).astype(np.int32)
    over_quota = np.flatnonzero(verdicts == Verdict.OVER_QUOTA).astype(np.int32)
    only_quotas = over_quota.size == failed.size
    return OpResult(
        OpStatus.TENANT_QUOTA if only_quotas else OpStatus.NO_FREE_BLOCKS,
        f"reserve: {failed.size} of {fits.size} groups got no blocks, {over_quota.size} by"
        f" their tenant's quota, {pool.num_available} are free",
        b.Reserved(failed, over_quota),
    )


def plan_append(table: SequenceTable, pool: BlockPool, op: b.Append) -> SlotPlan:
    """Check an Append, and plan the slots of its tokens. Raises OpMistake."""
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
    return plan_slots(
        table, pool, rows, np.array([length], np.int32), np.array([new_length], np.int32)
    )


def commit_append(
    table: SequenceTable, pool: BlockPool, op: b.Append, plan: SlotPlan, effects: StepEffects
) -> None:
    """Enter the tokens of a plan that fits; all before them count as computed."""
    row = int(plan.rows[0])
    length = int(table.length[row])
    new_length = length + op.token_ids.size
    table.tokens[row, length:new_length] = op.token_ids
    table.length[row] = new_length
    table.num_computed[row] = length
    commit_slots(table, pool, plan, effects)
