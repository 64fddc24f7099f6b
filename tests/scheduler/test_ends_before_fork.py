"""A request of several candidates that ends before it has forked."""

from __future__ import annotations

from scheduler_svc.core.stopping import FinishReason
from tests.scheduler.world import World


def test_every_candidate_is_told_the_end_that_came_before_the_first_token() -> None:
    """The prompt does not fit the pool: at the door that was another, larger one."""
    world = World(num_blocks=4, block_size=2)
    caller = world.arrive("a", list(range(1, 20)), n=3, max_tokens=4)
    world.run()
    assert caller.done
    assert caller.finish == dict.fromkeys(range(3), FinishReason.KV_CAPACITY)
    assert caller.tokens == {0: [], 1: [], 2: []}
    world.assert_empty()
