"""Fork: children that hold what their parent holds (Kwon et al. 2023, §4.4, parallel sampling)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvmem_svc.core.batch import Column, Fork, Forked, OpStatus
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.records import RequestRecord
from kvmem_svc.core.sequences import SequenceTable, Status, require
from kvmem_svc.core.tokens import check_token_ids


def plan_fork(table: SequenceTable, op: Fork) -> list[int]:
    """Check a Fork; the candidate numbers of the children. Raises OpMistake."""
    parent = table.row_of(op.sequence_id)
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


def commit_fork(table: SequenceTable, pool: BlockPool, op: Fork, candidates: list[int]) -> Forked:
    """Create the children of a planned Fork; there are rows for them."""
    parent = table.row_of(op.sequence_id)
    record, blocks = table.record_of(parent), table.table(parent)
    tokens = table.tokens[parent, : table.length[parent]]
    pool.reference(blocks, op.num_children)
    children = [_create_child(table, record, number, parent, tokens) for number in candidates]
    family = np.array([parent, *children], np.intp)
    if op.state_words.size:
        table.set_words(family, op.state_words)
    if op.token_ids.size:
        table.tokens[family, table.length[family]] = op.token_ids
        table.length[family] += 1
    table.may_share[parent] = True
    ids = [table.id_of(child) for child in children]
    return Forked(ids, blocks, int(table.table_version[children[0]]))


def _create_child(
    table: SequenceTable, record: RequestRecord, candidate: int, parent: int, tokens: Column
) -> int:
    """A sequence that holds what the parent holds; its table starts at version 1."""
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
