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
