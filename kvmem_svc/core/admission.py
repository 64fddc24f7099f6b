"""Admit: the first blocks of waiting sequences, some of them shared with a running one.

Sharing a prompt's full blocks is PagedAttention's shared prefix (Kwon et al. 2023, §4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmem_svc.core.batch import Admit, AdmitMember, BlockTable, OpStatus
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import SequenceTable, Status, require


@dataclass(slots=True)
class AdmissionPlan:
    """members: (member, its row, blocks its table will have). num_blocks: new ones in all."""

    members: Sequence[tuple[AdmitMember, int, int]]
    num_blocks: int


def plan_admission(table: SequenceTable, op: Admit) -> AdmissionPlan:
    """Check an Admit against the table. Raises OpMistake."""
    rows = table.distinct_rows([member.sequence_id for member in op.members])
    members: list[tuple[AdmitMember, int, int]] = []
    num_blocks_of: dict[int, int] = {}  # of the rows of earlier members
    for member, row in zip(op.members, rows, strict=True):
        require(table.status_of(row), "admit", member.sequence_id)
        num_blocks = _num_blocks(table, member)
        if member.num_shared_blocks:
            _check_share(table, member, row, num_blocks_of)
        num_blocks_of[row] = num_blocks
        members.append((member, row, num_blocks))
    needed = sum(num_blocks - member.num_shared_blocks for member, _, num_blocks in members)
    return AdmissionPlan(members, needed)


def commit_admission(
    table: SequenceTable, pool: BlockPool, plan: AdmissionPlan
) -> list[BlockTable]:
    """Carry out a plan that fits: `plan.num_blocks` are free."""
    return [_give_table(table, pool, *planned) for planned in plan.members]


def _num_blocks(table: SequenceTable, member: AdmitMember) -> int:
    if not 1 <= member.num_slots <= table.max_model_len:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"admit: num_slots of sequence {member.sequence_id} is {member.num_slots}, it"
            f" must be 1 .. {table.max_model_len}",
        )
    num_blocks = -(-member.num_slots // table.block_size)
    if not 0 <= member.num_shared_blocks <= num_blocks:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"admit: num_shared_blocks of sequence {member.sequence_id} is"
            f" {member.num_shared_blocks}, it must be 0 .. {num_blocks}",
        )
    return num_blocks


def _check_share(
    table: SequenceTable, member: AdmitMember, row: int, num_blocks_of: dict[int, int]
) -> None:
    """Only the same tokens of the same tenant may be shared: anything else is corruption."""
    source = table.row_of(member.share_from)
    available = num_blocks_of.get(source)
    if available is None:
        require(table.status_of(source), "share from", member.share_from)
        available = int(table.table_len[source])
    num_tokens = member.num_shared_blocks * table.block_size
    shortest = int(min(table.length[source], table.length[row]))
    if member.num_shared_blocks > available:
        why = f"it has {available}"
    elif table.record_of(source).tenant != table.record_of(row).tenant:
        why = "it is another tenant's"
    elif num_tokens > shortest or not np.array_equal(
        table.tokens[source, :num_tokens], table.tokens[row, :num_tokens]
    ):
        why = f"their first {num_tokens} tokens are not the same"
    else:
        return
    raise OpMistake(
        OpStatus.INVALID_ARGUMENT,
        f"admit: sequence {member.sequence_id} cannot share {member.num_shared_blocks} blocks of"
        f" sequence {member.share_from}: {why}",
    )


def _give_table(
    table: SequenceTable, pool: BlockPool, member: AdmitMember, row: int, num_blocks: int
) -> BlockTable:
    num_shared = member.num_shared_blocks
    if num_shared:
        source = table.row_of(member.share_from)
        shared = table.tables[source, :num_shared]
        pool.reference(shared)
        table.tables[row, :num_shared] = shared
        table.may_share[source] = table.may_share[row] = True
    table.tables[row, num_shared:num_blocks] = pool.allocate(num_blocks - num_shared)
    table.table_len[row] = num_blocks
    table.num_computed[row] = num_shared * table.block_size
    table.table_version[row] += 1
    table.status[row] = Status.RUNNING
    return BlockTable(member.sequence_id, table.table(row), int(table.table_version[row]))
