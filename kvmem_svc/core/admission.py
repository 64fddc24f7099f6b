"""Admit: the first blocks of waiting sequences, some of them found in the prefix cache or shared
with a running sequence.

Sharing a prompt's full blocks is PagedAttention's shared prefix (Kwon et al. 2023, §4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmem_svc.core.batch import (
    NO_DELTAS,
    NO_INT32,
    Admit,
    AdmitMember,
    BlockCopies,
    BlockTable,
    Column,
    OpStatus,
)
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import Chain
from kvmem_svc.core.sequences import SequenceTable, Status, require
from kvmem_svc.core.slots import StepEffects


@dataclass(slots=True)
class MemberPlan:
    """A member and its row. num_blocks: of its table. num_shared: blocks of another sequence.

    found: published blocks that its table begins with, int32. num_computed: in tokens; where it
    ends inside of the last block found, that one is copied. chain: what comes after them, None
    for a sequence that is not to be cached.
    """

    member: AdmitMember
    row: int
    num_blocks: int
    num_shared: int
    num_computed: int
    found: Column
    copies_last: bool
    chain: Chain | None

    @property
    def num_new(self) -> int:
        return self.num_blocks - self.num_shared - self.found.size + self.copies_last


@dataclass(slots=True)
class AdmissionPlan:
    """num_blocks: to be available. They are new ones, and found ones that could be evicted.

    num_blocks_of: by number of a tenant what will be counted for it: new ones, and found ones that
    nobody holds.
    """

    members: Sequence[MemberPlan]
    num_blocks: int
    num_blocks_of: dict[int, int]

    @property
    def copies(self) -> bool:
        return any(member.copies_last for member in self.members)


def plan_admission(
    table: SequenceTable, pool: BlockPool, op: Admit, *, may_copy: bool
) -> AdmissionPlan:
    """Check an Admit against the table, and look its prefixes up. Raises OpMistake.

    may_copy: whether a prompt that is found to the end may take a block more, for a copy of the
    last one. Without, that one is computed again: it takes no more than if nothing were cached.
    """
    rows = table.distinct_rows([member.sequence_id for member in op.members])
    members: list[MemberPlan] = []
    num_blocks_of: dict[int, int] = {}  # of the rows of earlier members
    for member, row in zip(op.members, rows, strict=True):
        require(table.status_of(row), "admit", member.sequence_id)
        _check_slots(table, member)
        if member.num_shared_blocks:
            _check_share(table, member, row, num_blocks_of)
        plan = _plan_member(table, pool, member, row, may_copy)
        num_blocks_of[row] = plan.num_blocks
        members.append(plan)
    found = np.unique(np.concatenate([NO_INT32, *(plan.found for plan in members)]))
    num_evictable = int(np.count_nonzero(pool.is_cached(found)))
    num_new = sum(plan.num_new for plan in members)
    return AdmissionPlan(members, num_new + num_evictable, _by_tenant(table, pool, members))


def _by_tenant(
    table: SequenceTable, pool: BlockPool, members: Sequence[MemberPlan]
) -> dict[int, int]:
    num_blocks_of: dict[int, int] = {}
    seen: set[int] = set()
    for plan in members:
        tenant = int(table.tenant[plan.row])
        idle = set(plan.found[pool.ref_counts[plan.found] == 0].tolist()) - seen
        seen |= idle
        num_blocks_of[tenant] = num_blocks_of.get(tenant, 0) + plan.num_new + len(idle)
    return num_blocks_of


def _plan_member(
    table: SequenceTable, pool: BlockPool, member: AdmitMember, row: int, may_copy: bool
) -> MemberPlan:
    found, chain = NO_INT32, None
    if member.use_prefix_cache and pool.cache.enabled:
        num_tokens = _num_lookup_tokens(table, row)
        found, chain = _look_up(table, pool, row, num_tokens if may_copy else num_tokens - 1)
        if found.size < member.num_shared_blocks:
            found, chain = NO_INT32, Chain.at_root(chain.domain)
    num_shared = 0 if found.size else member.num_shared_blocks
    num_filled = (found.size + num_shared) * table.block_size
    num_computed, num_slots = num_filled, member.num_slots
    if found.size:
        # At least one token is computed: its step is what the next token comes from.
        num_computed = min(num_filled, _num_lookup_tokens(table, row) - 1)
        num_slots = max(num_slots, num_computed + 1)
    return MemberPlan(
        member,
        row,
        -(-num_slots // table.block_size),
        num_shared,
        num_computed,
        found,
        num_computed < num_filled,
        chain,
    )


def _look_up(
    table: SequenceTable, pool: BlockPool, row: int, num_tokens: int
) -> tuple[Column, Chain]:
    """The published blocks of the longest prefix of so many tokens, and the chain after them."""
    chain = Chain.at_root(table.record_of(row).domain)
    found = pool.cache.match(chain, table.tokens[row, :num_tokens])
    return np.array(found, np.int32), chain


def _num_lookup_tokens(table: SequenceTable, row: int) -> int:
    """The row's tokens that have slots."""
    return min(int(table.length[row]), table.max_model_len)


def commit_admission(
    table: SequenceTable, pool: BlockPool, plan: AdmissionPlan, effects: StepEffects
) -> list[BlockTable]:
    """Carry out a plan that fits: `plan.num_blocks` are available. What was found is held before
    anything is evicted."""
    for member in plan.members:
        pool.hold(member.found, int(table.tenant[member.row]))
        if member.chain is not None:
            num_tokens = _num_lookup_tokens(table, member.row)
            pool.cache.counters.count(num_tokens, member.num_computed if member.found.size else 0)
    return [_give_table(table, pool, member, effects) for member in plan.members]


def _check_slots(table: SequenceTable, member: AdmitMember) -> None:
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


def _check_share(
    table: SequenceTable, member: AdmitMember, row: int, num_blocks_of: dict[int, int]
) -> None:
    """Only the same tokens of the same domain may be shared: anything else is corruption, or tells
    one tenant what another one has."""
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
    elif table.record_of(source).domain != table.record_of(row).domain:
        why = "it has another cache_salt"
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
    table: SequenceTable, pool: BlockPool, plan: MemberPlan, effects: StepEffects
) -> BlockTable:
    row, num_shared = plan.row, plan.num_shared
    blocks = pool.allocate(plan.num_new, int(table.tenant[row]))
    given = plan.found
    if plan.copies_last:
        copy = blocks[:1]
        effects.add(NO_DELTAS, BlockCopies(pool.copy_on_write(given[-1:], copy), copy))
        given = given[:-1]
    if num_shared:
        source = table.row_of(plan.member.share_from)
        given = table.tables[source, :num_shared]
        pool.reference(given)
        table.may_share[source] = table.may_share[row] = True
    table.tables[row, : plan.num_blocks] = np.concatenate((given, blocks))
    table.table_len[row] = plan.num_blocks
    table.num_computed[row] = plan.num_computed
    if plan.chain is not None:
        table.begin_caching(row, plan.chain, plan.found.size * table.block_size)
    table.table_version[row] += 1
    table.status[row] = Status.RUNNING
    return BlockTable(
        plan.member.sequence_id,
        table.table(row),
        int(table.table_version[row]),
        plan.num_computed,
    )
