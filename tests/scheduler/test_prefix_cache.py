"""What the scheduler makes of the prefix cache: hits shorten prefills, and nobody computes what
somebody else is computing."""

from __future__ import annotations

from typing import Any

import pytest

from kvmem_svc.core.tenants import Quota
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.stopping import FinishReason
from tests.scheduler.test_machine import prompt
from tests.scheduler.world import World

SMALL_STEPS = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8, max_waiting=50)


def test_b17_a_second_turn_computes_its_own_tokens_only() -> None:
    world = World(num_blocks=60)
    first = world.arrive("first", prompt(18), max_tokens=9, seed=1, ignore_eos=True)
    world.run_and_count()
    history = [*prompt(18), *first.tokens[0]]
    second = world.arrive("second", [*history, 3, 4, 5], max_tokens=4, seed=2, ignore_eos=True)
    # 26 of the 27 tokens had KV, in six full blocks; the 27th was never computed.
    assert world.run_and_count() == 30 - 24 + 3
    world.assert_right(second)
    stats = world.memory.stats()
    assert (stats.num_prefix_hits, stats.num_prefix_hit_tokens) == (1, 24)


def test_a_full_hit_computes_one_token_in_a_copy() -> None:
    world = World(num_blocks=60)
    for name in ("first", "second"):
        world.arrive(name, prompt(16), max_tokens=3, seed=1, ignore_eos=True)
        num_computed_tokens = world.run_and_count()
        world.assert_right(world.callers[name])
    assert num_computed_tokens == 1 + 2
    assert world.worker.num_copies == 1


@pytest.mark.parametrize("num_followers", [1, 5])
def test_b18_one_prompt_is_computed_once(num_followers: int) -> None:
    """They arrive together, with a prompt of several steps, and the others come after it."""
    world = World(num_blocks=100, config=SMALL_STEPS)
    for i in range(1 + num_followers):
        world.arrive(f"r{i}", [*prompt(40), 45 + i], max_tokens=2, seed=i, ignore_eos=True)
    num_computed_tokens = world.run_and_count()
    # The common 40 once, then each its own token and the one it drew first.
    assert num_computed_tokens == 40 + 2 * (1 + num_followers)
    world.assert_all_right()
    world.assert_empty()


def test_those_with_another_prompt_do_not_wait_for_it() -> None:
    world = World(num_blocks=100, config=SMALL_STEPS)
    world.arrive("leader", prompt(60), max_tokens=2, ignore_eos=True)
    world.arrive("follower", prompt(60), max_tokens=2, ignore_eos=True)
    other = world.arrive("other", prompt(4, 30), max_tokens=2, ignore_eos=True)
    while not other.done:
        world.finish_batch() if world.batch else world.finish_step()
    assert not world.callers["leader"].tokens
    world.run()
    world.assert_all_right()


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"cache_salt": "s"}])
def test_b22_strangers_neither_wait_for_each_other_nor_share(other: dict[str, Any]) -> None:
    world = World(num_blocks=100, config=SMALL_STEPS)
    for name, domain in (("one", {}), ("two", other)):
        world.arrive(name, prompt(24), max_tokens=2, ignore_eos=True, **domain)
    assert world.run_and_count() == 2 * (24 + 1)
    assert world.memory.stats().num_prefix_hit_tokens == 0


def test_the_leader_is_aborted() -> None:
    """Whoever waited for it computes the prompt itself."""
    world = World(num_blocks=100, config=SMALL_STEPS)
    world.arrive("leader", prompt(60), max_tokens=2, ignore_eos=True)
    follower = world.arrive("follower", prompt(60), max_tokens=2, ignore_eos=True)
    while world.step is None:
        world.finish_batch()
    world.abort("leader")
    world.run()
    world.assert_right(follower)
    world.assert_empty()


def test_a_quota_holds_back_its_tenant_alone() -> None:
    """Two requests of a tenant do not fit its quota together; one of another tenant, that came
    last, does not wait for that."""
    world = World(num_blocks=100, quota=Quota(max_blocks=6))
    for i in (1, 2):
        world.arrive(f"a{i}", prompt(12, i), tenant="a", max_tokens=8, ignore_eos=True)
    other = world.arrive("b", prompt(12, 9), tenant="b", max_tokens=8, ignore_eos=True)
    while not (world.callers["a1"].done and other.done):
        assert not world.callers["a2"].tokens
        world.finish_batch() if world.batch else world.finish_step()
    world.run()
    world.assert_all_right()
    assert world.preemptions == 0
    world.assert_empty()


def test_a_tenant_that_outgrows_its_quota_preempts_its_own() -> None:
    """The latest arrival is another tenant's, and stays."""
    world = World(num_blocks=100, quota=Quota(max_blocks=7))
    for i in range(2):
        world.arrive(f"a{i}", prompt(10, i), tenant="a", max_tokens=14, seed=i, ignore_eos=True)
    other = world.arrive("b", prompt(10, 9), tenant="b", max_tokens=14, ignore_eos=True)
    while world.batch is not None or world.step is not None:
        if (group := world.machine.groups.get("b")) is not None:
            assert group.num_preemptions == 0
        world.finish_batch() if world.batch else world.finish_step()
    assert world.preemptions > 0
    assert other.done
    world.assert_all_right()
    world.assert_empty()


def test_what_never_fits_a_quota_ends_and_says_so() -> None:
    world = World(num_blocks=100, quota=Quota(max_blocks=3))
    grows = world.arrive("grows", prompt(8), tenant="a", max_tokens=30, ignore_eos=True)
    whole = world.arrive("whole", prompt(20), tenant="a", max_tokens=2, ignore_eos=True)
    fits = world.arrive("fits", prompt(8, 5), tenant="a", max_tokens=2, ignore_eos=True)
    world.run()
    assert whole.rejected == "TENANT_QUOTA"
    assert grows.finish == {0: FinishReason.KV_CAPACITY}
    assert len(grows.tokens[0]) == 12 - 8 + 1
    world.assert_right(fits)
    world.assert_empty()
