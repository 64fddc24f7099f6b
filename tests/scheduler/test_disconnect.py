"""The machine when a peer goes away: every caller gets an answer, and nothing stays behind."""

from __future__ import annotations

import pytest

from scheduler_svc.core import events
from tests.scheduler.world import World, solo_run


def disconnect(world: World) -> set[str]:
    """Lose the worker; ids of the requests whose callers are told so."""
    world.batch = world.step = None
    commands = world.machine.handle(events.Disconnected("WORKER_LOST", "it went away"), 0.0)
    assert all(isinstance(command, events.Reject) for command in commands), commands
    assert not world.machine.groups
    return {command.request_id for command in commands if isinstance(command, events.Reject)}


@pytest.mark.parametrize("num_events", range(16))
def test_every_caller_is_told_at_whatever_moment(num_events: int) -> None:
    """Also one whose last token was drawn but not committed, so that nobody has shown it."""
    world = World(num_blocks=20)
    for i in range(3):
        world.arrive(f"r{i}", [1, 2, 3], max_tokens=1 + i, n=1 + i, seed=i)
    for _ in range(num_events):
        if world.batch is not None:
            world.finish_batch()
        elif world.step is not None:
            world.finish_step()
    unanswered = {name for name, caller in world.callers.items() if not caller.done}
    assert unanswered <= disconnect(world)


def test_a_caller_who_waits_for_its_predecessor_to_go_is_told() -> None:
    world = World(num_blocks=20)
    world.arrive("a", [1, 2, 3], max_tokens=50, ignore_eos=True)
    while not world.callers["a"].accepted:
        world.finish_batch()
    assert world.batch is not None  # the abort waits for its result
    world.abort("a")
    again = world.arrive("a", [1, 2], max_tokens=5, seed=3)
    assert not again.accepted
    assert "a" in disconnect(world)


def test_it_serves_again_after_the_next_connection() -> None:
    world = World(num_blocks=20)
    world.arrive("a", [1, 2, 3], max_tokens=5)
    world.finish_batch()
    disconnect(world)
    fresh = World(num_blocks=20)
    fresh.machine, world.machine = world.machine, fresh.machine
    levels = events.PoolLevels(20, 0, 512)
    assert fresh.machine.handle(events.Connected(1, 0, 20, 4, levels), 0.0) == []
    caller = fresh.arrive("a", [1, 2, 3], max_tokens=5, seed=9)
    fresh.run()
    assert tuple(caller.tokens[0]) == solo_run(caller.request, 0)
