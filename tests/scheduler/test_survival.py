"""The machine when somebody dies, at every moment of its work: every stream goes on, with the
tokens it would have had alone, each delivered once; and nothing stays behind.

The worker checks every slot it reads, so a wrong table, a copy that was never made or KV that is
taken for computed is an error at the step where it happens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem_svc.core.mutations import CloseSession, Expire
from scheduler_svc.core.machine import SchedulerConfig
from tests.scheduler.world import World


def another_scheduler(world: World) -> None:
    world.kill_scheduler()
    world.all_come_back()


def another_worker(world: World) -> None:
    world.disconnect()
    world.new_worker()
    world.connect()


def kvmem_without_its_journal(world: World) -> None:
    world.disconnect()
    world.new_kvmem()
    world.connect()


def broken_connections(world: World) -> None:
    """The scheduler lives, and so do the others: it starts over from the records."""
    world.disconnect()
    world.connect()


def all_but_the_worker(world: World) -> None:
    """Nobody has the requests any more but those who made them."""
    world.new_kvmem()
    world.kill_scheduler()
    world.all_come_back()


def all_of_them(world: World) -> None:
    world.new_worker()
    world.new_kvmem()
    world.kill_scheduler()
    world.all_come_back()


DEATHS = [
    another_scheduler,
    another_worker,
    kvmem_without_its_journal,
    broken_connections,
    all_but_the_worker,
    all_of_them,
]


def advance(world: World, num_events: int) -> None:
    for _ in range(num_events):
        if world.batch is not None:
            world.finish_batch()
        elif world.steps or world.results:
            world.finish_step()


def some_requests(world: World) -> None:
    world.arrive("greedy", list(range(1, 10)), max_tokens=14, seed=1, ignore_eos=True)
    world.arrive("three", [5, 6, 7, 8, 9, 10], max_tokens=12, seed=2, n=3, ignore_eos=True)
    world.arrive("stops", [11, 12, 13], max_tokens=30, seed=3, stop=("A", "BC"))


def check(world: World) -> None:
    world.run()
    world.assert_all_right()
    world.give_up_on_callers()
    world.run()
    world.assert_empty()


# A roomy pool and one where groups are preempted and resume on shared blocks.
POOLS = {"roomy": 60, "tight": 14}
# Moments that are looked at: in the roomy pool, where most steps are alike, every third.
STRIDES = {"roomy": 3, "tight": 1}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("pool", POOLS)
def test_at_every_moment(pool: str, death: Callable[[World], None]) -> None:
    """What was sent is lost, carried out but not answered, or was answered."""
    for num_events in range(0, 90, STRIDES[pool]):
        for what_was_sent in ("is lost", "is carried out"):
            world = World(num_blocks=POOLS[pool])
            some_requests(world)
            advance(world, num_events)
            if what_was_sent == "is carried out":
                if world.batch is not None:
                    world.apply_batch()
                if world.step is not None:
                    world.execute_step()
            death(world)
            check(world)


def test_a_scheduler_s_death_costs_no_step_that_was_executed() -> None:
    undisturbed = World(num_blocks=60)
    some_requests(undisturbed)
    undisturbed.run()
    world = World(num_blocks=60)
    some_requests(world)
    for _ in range(10):
        advance(world, 7)
        if world.step is not None:
            world.execute_step()
        another_scheduler(world)
    check(world)
    assert world.num_steps <= undisturbed.num_steps + 2


def test_an_adopted_request_is_announced_until_its_caller_comes() -> None:
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, 12)
    world.kill_scheduler()
    assert sorted(world.adopted) == ["greedy", "stops", "three"]
    for name in world.callers:
        world.detached.add(name)
    world.run()  # They go on meanwhile, and nobody hears of it.
    world.all_come_back()
    check(world)


def test_a_result_waits_for_its_caller() -> None:
    """Also over another scheduler's death."""
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, 12)
    for name in world.callers:
        world.detach(name)
    world.run()
    world.kill_scheduler()
    world.run()
    assert world.num_unused_blocks == 60
    world.all_come_back()
    check(world)


def test_a_caller_comes_back_while_its_request_is_entered_again() -> None:
    """The memory service has lost everything, and has yet to say that it has the request."""
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, 12)
    for name in world.callers:
        world.detach(name)
    kvmem_without_its_journal(world)
    assert world.batch is not None
    for name in world.callers:
        world.come_back(name)
    check(world)


def test_the_last_attacher_wins() -> None:
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, 10)
    for name in world.callers:
        world.come_back(name)
    check(world)


@pytest.mark.parametrize("num_events", range(0, 40))
def test_an_abort_that_could_not_be_carried_out_is(num_events: int) -> None:
    for death in (another_worker, broken_connections, kvmem_without_its_journal):
        world = World(num_blocks=60)
        some_requests(world)
        advance(world, num_events)
        if not world.callers["three"].done:
            world.disconnect()
            world.abort("three")
            death_without_disconnect(world, death)
            world.run()
            assert not world.callers["three"].done
            del world.callers["three"]
        check(world)


def death_without_disconnect(world: World, death: Callable[[World], None]) -> None:
    if death is another_worker:
        world.new_worker()
    elif death is kvmem_without_its_journal:
        world.new_kvmem()
    world.connect()


@pytest.mark.parametrize("num_events", range(0, 60, 2))
def test_a_confirmation_that_was_lost_is_sent_again(num_events: int) -> None:
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, num_events)
    while not any(caller.done for caller in world.callers.values()):
        advance(world, 1)
    broken_connections(world)
    check(world)


def test_blocks_held_for_a_step_that_nobody_will_run_come_back() -> None:
    """The memory service expires what nobody came for, and holds the blocks for the step that the
    last holder was preparing. They are most of the pool: without them nothing runs, and no step
    is ever acknowledged."""
    world = World(num_blocks=6)
    world.arrive("a", list(range(1, 16)), max_tokens=8, ignore_eos=True)
    while world.step is None:
        advance(world, 1)
    world.disconnect()
    world.memory.commit(CloseSession())
    world.memory.commit(Expire(("a",)))
    world.connect()
    assert world.memory.levels().num_quarantined_blocks
    check(world)


def test_a_request_aborted_while_nobody_was_connected_is_not_announced() -> None:
    world = World(num_blocks=60)
    some_requests(world)
    advance(world, 12)
    world.disconnect()
    world.abort("three")
    world.connect()
    assert "three" not in world.adopted
    world.run()
    del world.callers["three"]
    check(world)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_deaths_at_any_moments(data: st.DataObject) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=data.draw(st.integers(4, 24), label="budget"),
        max_num_seqs=4,
        watermark=data.draw(st.sampled_from([0.0, 0.1]), label="watermark"),
        max_waiting=100,
    )
    # Any one of the requests fits it alone.
    num_blocks = data.draw(st.integers(20, 40), label="num_blocks")
    world = World(num_blocks=num_blocks, block_size=data.draw(st.integers(1, 4)), config=config)
    for i in range(data.draw(st.integers(1, 5), label="requests")):
        world.arrive(
            f"r{i}",
            data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)),
            max_tokens=data.draw(st.integers(1, 4)),
            n=data.draw(st.integers(1, 3)),
            seed=i,
        )
    for _ in range(data.draw(st.integers(1, 6), label="deaths")):
        advance(world, data.draw(st.integers(0, 12), label="events"))
        if world.batch is not None and data.draw(st.booleans()):
            world.apply_batch()
        if world.step is not None and data.draw(st.booleans()):
            world.execute_step()
        data.draw(st.sampled_from(DEATHS), label="death")(world)
    check(world)


def test_in_steady_decode_nothing_waits_for_the_memory_service() -> None:
    """Every step is issued while another is at the worker, whatever batch is under way."""
    world = World(num_blocks=200)
    for i in range(4):
        world.arrive(f"r{i}", list(range(1, 8)), max_tokens=60, seed=i, ignore_eos=True)
    while any(not caller.tokens for caller in world.callers.values()):
        advance(world, 1)
    num_idle = num_steps = 0
    while not any(caller.done for caller in world.callers.values()):
        # A batch that is sent when a step has ended is answered when the next one has.
        was_sent = world.batch is not None
        world.finish_step()
        num_steps += 1
        num_idle += not world.steps
        if was_sent or not world.steps:
            world.finish_batch()
    assert num_steps > 40
    assert num_idle <= 2  # where all of them end
    check(world)
