"""Who ends, or gives way, for want of blocks: nobody whom an abort has just made room for."""

from __future__ import annotations

from scheduler_svc.core import ops
from tests.scheduler.world import World


def starve(world: World) -> None:
    """Until a batch asks for blocks, with none free, and its answer is awaited."""
    for _ in range(200):
        asks = world.batch is not None and any(
            isinstance(op, ops.Reserve) for op in world.batch.ops
        )
        if asks and world.num_unused_blocks == 0:
            return
        if world.batch is not None:
            world.finish_batch()
        else:
            world.finish_step()
    raise AssertionError("blocks never ran out")


def test_an_abort_makes_room_before_the_last_one_left_is_ended() -> None:
    """The elder needs a third block and none is free. Alone it never needs more than three."""
    world = World(num_blocks=4)
    for name, seed in (("stays", 1), ("goes", 2)):
        world.arrive(name, [seed, 11, 12, 13], max_tokens=9, ignore_eos=True, seed=seed)
    starve(world)
    world.abort("goes")
    world.run()
    world.assert_right(world.callers["stays"])
    world.assert_empty()


def test_an_abort_makes_room_before_anybody_is_preempted() -> None:
    world = World(num_blocks=6)
    for name, seed in (("stays", 1), ("goes", 2), ("too", 3)):
        world.arrive(name, [seed, 11, 12, 13], max_tokens=8, ignore_eos=True, seed=seed)
    starve(world)
    world.abort("goes")
    world.run()
    assert world.preemptions == 0
    world.assert_right(world.callers["stays"])
    world.assert_right(world.callers["too"])
