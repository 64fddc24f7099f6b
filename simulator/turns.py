"""Whose turn it is, and who gives way: what `scheduler_svc.core.policy` promises, looked at from
the outside, in the batches that a scheduler sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_svc.core import ops
from scheduler_svc.core.sequence import GroupStatus, SequenceGroup
from simulator.worker import expect

# So many requests more than came before it, for each step of its priority, may be overtaken.
ARRIVALS_PER_PRIORITY = 32


def check_turns(
    batch: ops.Batch, groups: Iterable[SequenceGroup], block_size: int, *, uses_cache: bool
) -> int:
    """Of one tenant's requests nobody is admitted before one whose turn is earlier; nor is
    anybody preempted whose turn comes first. How many are admitted before others that came
    earlier."""
    everybody = list(groups)
    named = {s.sequence_id: group for group in everybody for s in group.sequences}
    _check_victims(batch, named, everybody)
    admitted = [
        named[op.members[0].sequence_id]
        for op in batch.ops
        if isinstance(op, ops.Admit | ops.SwapIn) and op.members[0].sequence_id in named
    ]
    waiting = [
        group
        for group in everybody
        if group.status in (GroupStatus.WAITING, GroupStatus.SWAPPED)
        and not any(group is other for other in admitted)
    ]
    if uses_cache:
        computing = [g for g in everybody if g.status is GroupStatus.RUNNING] + admitted
        waiting = [group for group in waiting if not _waits_for(group, computing, block_size)]
    num_overtaken = 0
    for group in admitted:
        for other in waiting:
            if other.request.tenant == group.request.tenant:
                expect(
                    _turn(group) < _turn(other),
                    "turns",
                    f"{group.request.request_id} is admitted before {other.request.request_id}:"
                    f" {_turn(group)}, {_turn(other)}",
                )
                num_overtaken += group.arrival_number > other.arrival_number
    return num_overtaken


def _check_victims(
    batch: ops.Batch, named: dict[int, SequenceGroup], everybody: Sequence[SequenceGroup]
) -> None:
    for op in batch.ops:
        if not isinstance(op, ops.Preempt | ops.SwapOut):
            continue
        victim = named.get(op.sequence_ids[0])
        if victim is not None:
            stays = any(
                group.status is GroupStatus.RUNNING and _turn(group) < _turn(victim)
                for group in everybody
            )
            name = victim.request.request_id
            expect(stays, "turns", f"{name} gives way, and nobody before it runs on")


def _turn(group: SequenceGroup) -> tuple[int, int]:
    number = group.arrival_number
    return number - ARRIVALS_PER_PRIORITY * group.request.priority, number


def _waits_for(group: SequenceGroup, computing: Sequence[SequenceGroup], block_size: int) -> bool:
    """Whether somebody may be computing what the group will find."""
    request = group.request
    beginning = request.prompt_token_ids[:block_size]
    return group.status is GroupStatus.WAITING and any(
        (other.request.tenant, other.request.cache_salt) == (request.tenant, request.cache_salt)
        and other.request.prompt_token_ids[:block_size] == beginning
        and other.live
        and other.live[0].num_computed_tokens < len(other.request.prompt_token_ids)
        for other in computing
    )
