"""One id, several requests after one another: what is said to one must not reach the next."""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as kv
from scheduler_svc.core.machine import SchedulerConfig
from tests.scheduler.world import World


def test_an_abort_takes_back_the_arrival_that_still_waits_for_its_predecessor() -> None:
    """Twice aborted and asked again while one batch is in flight. The request between the two
    aborts never enters: refused for a full queue, its refusal would end the third one's
    caller, and the third one would run for nobody and never be forgotten."""
    world = World(num_blocks=20, config=SchedulerConfig(max_num_seqs=1, max_waiting=2))
    world.arrive("a", [1, 2, 3], max_tokens=8, ignore_eos=True)
    while world.step is None:
        world.finish_batch()
    # The queue is full, and a batch is in flight: all aborts wait for its result.
    world.arrive("first", [1, 2], max_tokens=2)
    second = world.arrive("second", [1, 2], max_tokens=2)
    assert world.batch is not None
    world.abort("a")
    world.arrive("a", [4, 5], max_tokens=2, seed=1)
    world.abort("a")
    world.abort("first")
    third = world.arrive("a", [6, 7], max_tokens=2, seed=2)
    world.run()
    for caller in (second, third):
        assert not caller.rejected, caller
        world.assert_right(caller)
    world.assert_empty()


def test_a_refusal_of_an_aborted_request_is_not_told_to_the_next_of_its_name() -> None:
    world = World(num_blocks=20)
    assert world.memory.manager is not None
    (arrived,), _ = world.memory.manager.apply([kv.Arrive("a", np.array([1], np.int32))])
    assert isinstance(arrived.value, kv.Arrived)
    world.arrive("a", [1, 2, 3], max_tokens=2)
    world.abort("a")
    again = world.arrive("a", [4, 5], max_tokens=2, seed=1)
    assert world.batch is not None
    world.finish_batch()  # refused: there is a record of this name
    world.memory.manager.apply([kv.Free([arrived.value.sequence_id]), kv.Confirm("a")])
    world.run()
    assert not again.rejected


def test_a_caller_comes_back_to_a_request_that_waits_for_its_predecessor_to_go() -> None:
    """It is the one that is attached to, whatever its predecessor of the same name is: it must not
    be taken for nobody's, nor for the predecessor, and it enters once."""
    world = World(num_blocks=20)
    world.arrive("a", [1, 2, 3], max_tokens=8, ignore_eos=True)
    while world.step is None:
        world.finish_batch()
    world.arrive("other", [1, 2], max_tokens=2)  # A batch is in flight: aborts wait for it.
    assert world.batch is not None
    world.abort("a")
    assert not world.machine.is_live("a")
    again = world.arrive("a", [4, 5], max_tokens=2, seed=1)
    assert world.machine.request_of("a") is again.request
    world.detach("a")
    assert world.machine.is_live("a")
    assert not world.machine.has_ended("a")
    world.come_back("a")
    assert world.machine.request_of("a") is again.request
    world.run()
    assert not again.rejected
    world.assert_right(again)
    assert world.machine.request_of("a") is None
    world.assert_empty()
