"""Whose turn it is: priorities that age, and tenants that get equal shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.policy import ARRIVALS_PER_PRIORITY, FairTurns
from scheduler_svc.core.sequence import Request, SequenceGroup
from tests.scheduler.test_machine import prompt
from tests.scheduler.world import World


def group(number: int, tenant: str = "a", priority: int = 0, n: int = 1) -> SequenceGroup:
    request = Request(f"r{number}", (1,), SamplingParams(n=n), tenant, priority=priority)
    return SequenceGroup(request, 0.0, arrival_number=number)


def order(waiting: list[SequenceGroup], running: list[SequenceGroup] | None = None) -> list[int]:
    return [g.arrival_number for g in FairTurns().admission_order(waiting, running or [])]


requests = st.builds(
    group,
    st.integers(1, 2000),
    st.sampled_from(["a", "b", "c"]),
    st.integers(-8, 8),
    st.integers(1, 4),
)
many = st.lists(requests, max_size=30, unique_by=lambda g: g.arrival_number)


@given(many, many)
def test_everybody_has_one_turn(waiting: list[SequenceGroup], running: list[SequenceGroup]) -> None:
    assert sorted(order(waiting, running)) == sorted(g.arrival_number for g in waiting)


@given(many, many)
def test_nobody_is_overtaken_by_more_than_priority_allows(
    waiting: list[SequenceGroup], running: list[SequenceGroup]
) -> None:
    """Within a tenant: whoever goes before an earlier arrival came at most so much later."""
    for tenant in ("a", "b", "c"):
        of_tenant = [
            g for g in FairTurns().admission_order(waiting, running) if g.request.tenant == tenant
        ]
        for i, first in enumerate(of_tenant):
            for later in of_tenant[i + 1 :]:
                steps = first.request.priority - later.request.priority
                ahead = first.arrival_number - later.arrival_number
                assert ahead <= max(0, steps * ARRIVALS_PER_PRIORITY)


@given(many)
def test_the_victim_is_the_last_in_turn(running: list[SequenceGroup]) -> None:
    if running:
        policy = FairTurns()
        assert policy.victim(running) is policy.running_order(running)[-1]


def test_the_tenant_that_runs_least_is_next() -> None:
    waiting = [group(number) for number in (1, 2, 3, 4)]
    waiting += [group(number, "b") for number in (5, 6)]
    assert order(waiting) == [1, 5, 2, 6, 3, 4]
    running = [group(9, "a", n=2), group(10, "a")]
    assert order(waiting, running) == [5, 6, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("priority", "expected"), [(0, [1, 40]), (1, [1, 40]), (2, [40, 1]), (-1, [1, 40])]
)
def test_priority_is_worth_so_many_arrivals(priority: int, expected: list[int]) -> None:
    assert ARRIVALS_PER_PRIORITY < 39 < 2 * ARRIVALS_PER_PRIORITY
    assert order([group(1), group(40, priority=priority)]) == expected


def test_one_tenants_flood_does_not_keep_another_waiting() -> None:
    """Two sequences run at a time; twenty requests of one tenant came first."""
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=2, max_waiting=50)
    world = World(num_blocks=200, config=config)
    for i in range(20):
        world.arrive(f"a{i}", prompt(6, i), tenant="a", max_tokens=5, ignore_eos=True)
    world.arrive("b", prompt(6, 30), tenant="b", max_tokens=5, ignore_eos=True)
    while not world.callers["b"].done:
        world.finish_batch() if world.batch else world.finish_step()
    assert sum(caller.done for caller in world.callers.values()) <= 5
    world.run()
    world.assert_all_right()


def test_an_urgent_request_goes_first_and_keeps_its_place_over_a_death() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, max_waiting=50)
    world = World(num_blocks=200, config=config)
    for i in range(6):
        world.arrive(f"r{i}", prompt(6, i), max_tokens=5, ignore_eos=True)
    world.arrive("urgent", prompt(6, 30), priority=1, max_tokens=5, ignore_eos=True)
    for _ in range(3):
        world.finish_batch() if world.batch else world.finish_step()
    world.kill_scheduler()
    world.all_come_back()
    while not world.callers["urgent"].done:
        world.finish_batch() if world.batch else world.finish_step()
    assert sum(caller.done for caller in world.callers.values()) <= 2
    world.run()
    world.assert_all_right()
