"""Preemption by swapping: what was computed comes back from the host tier, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler_svc.core import ops
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.preemption import Preemption, PreemptionMode, TierRates
from scheduler_svc.core.sequence import GroupStatus, Request, Sequence, SequenceGroup
from scheduler_svc.core.stopping import FinishReason, StopChecker
from simulator.worker import Letters
from tests.scheduler.test_machine import prompt
from tests.scheduler.world import World


def config() -> SchedulerConfig:
    return SchedulerConfig(64, 16, 50, preemption=PreemptionMode.SWAP)


@pytest.mark.parametrize("n", [1, 3])
def test_b11_nothing_is_computed_again(n: int) -> None:
    world = World(num_blocks=26, num_host_blocks=100, config=config())
    for i in range(4):
        world.arrive(f"r{i}", prompt(8, i), max_tokens=24, n=n, seed=i, ignore_eos=True)
    num_computed_tokens = world.run_and_count()
    assert world.swap_outs > 0
    assert world.preemptions == 0
    assert world.worker.num_swapped_in == world.worker.num_swapped_out > 0
    # Each prompt once, and every output token but the last; the tokens drawn one step ahead of
    # an end that nobody knew of there are none.
    assert num_computed_tokens == 4 * (8 + n * 23)
    world.assert_all_right()
    world.assert_empty()


def test_a_full_host_tier_leaves_recomputation() -> None:
    world = World(num_blocks=14, num_host_blocks=6, config=config())
    for i in range(6):
        world.arrive(f"r{i}", prompt(8, i), max_tokens=30, seed=i, ignore_eos=True)
    world.run()
    assert world.swap_outs > 0
    assert world.preemptions > 0
    world.assert_all_right()
    world.assert_empty()


def test_a_swapped_group_is_aborted() -> None:
    world = World(num_blocks=14, num_host_blocks=60, config=config())
    for i in range(4):
        world.arrive(f"r{i}", prompt(8, i), max_tokens=30, seed=i, ignore_eos=True)
    while not (swapped := in_status(world, GroupStatus.SWAPPED)):
        world.finish_batch() if world.batch else world.finish_step()
    for group in swapped:
        world.abort(group.request.request_id)
    world.run()
    for caller in world.callers.values():
        if not caller.aborted:
            world.assert_right(caller)
    world.assert_empty()


def test_nobody_who_came_later_overtakes_a_swapped_group() -> None:
    world = World(num_blocks=14, num_host_blocks=60, config=config())
    for i in range(3):
        world.arrive(f"r{i}", prompt(8, i), max_tokens=30, seed=i, ignore_eos=True)
    while not (swapped := in_status(world, GroupStatus.SWAPPED)):
        world.finish_batch() if world.batch else world.finish_step()
    late = world.arrive("late", prompt(2, 9), max_tokens=30, ignore_eos=True)
    while in_status(world, GroupStatus.SWAPPED):
        assert not late.tokens
        world.finish_batch() if world.batch else world.finish_step()
    assert swapped
    world.run()
    world.assert_all_right()


def in_status(world: World, status: GroupStatus) -> list[SequenceGroup]:
    return [group for group in world.machine.groups.values() if group.status is status]


def kill_scheduler(world: World) -> None:
    world.kill_scheduler()
    world.all_come_back()
    world.give_up_on_callers()


def lose_worker(world: World) -> None:
    world.disconnect()
    world.new_worker()
    world.connect()


def lose_kvmem(world: World) -> None:
    world.disconnect()
    world.new_kvmem()
    world.connect()


@pytest.mark.parametrize("death", [kill_scheduler, lose_worker, lose_kvmem])
@pytest.mark.parametrize("executed", [False, True])
def test_a_death_in_the_middle_of_a_swap(death: Callable[[World], None], *, executed: bool) -> None:
    """At every step that swaps, before and after it is executed."""
    for nth in range(8):
        world = World(num_blocks=20, num_host_blocks=60, config=config())
        for i in range(4):
            world.arrive(f"r{i}", prompt(9, i), max_tokens=20, n=2, seed=i, ignore_eos=True)
        if not run_to_swap(world, nth):
            assert nth > 3
            return
        if executed:
            world.execute_step()
        death(world)
        world.run()
        world.assert_all_right()
        world.assert_empty()


def run_to_swap(world: World, nth: int) -> bool:
    """Until the nth step that swaps is the next to be executed; False: there is none."""
    while world.batch is not None or world.step is not None:
        if world.step is not None and (world.step.swap_ins or world.step.swap_outs):
            if not nth:
                return True
            nth -= 1
        world.finish_batch() if world.batch and not world.step else world.finish_step()
    return False


@pytest.mark.parametrize("seed", range(150))
def test_any_schedule_with_a_host_tier(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        num_blocks=draw.randint(8, 30),
        block_size=draw.choice([1, 2, 4, 7]),
        num_host_blocks=draw.choice([0, 3, 10, 60]),
        config=SchedulerConfig(
            max_num_batched_tokens=draw.randint(8, 40),
            max_num_seqs=draw.randint(4, 8),
            max_waiting=50,
            watermark=draw.choice([0.0, 0.01, 0.2]),
            use_prefix_cache=draw.random() < 0.5,
            preemption=draw.choice([*PreemptionMode]),
        ),
        rates=TierRates(draw.choice([0.0, 100.0]), draw.choice([0.0, 1000.0, 1e6]), 100),
    )
    capacity = world.num_blocks * world.block_size
    for i in range(60):
        action = draw.choice(["arrive", "go on", "go on", "go on", "go on", "abort", "die"])
        live = [r for r, c in world.callers.items() if not (c.done or c.aborted or c.rejected)]
        if action == "arrive":
            world.arrive(
                f"r{i}",
                prompt(draw.randint(1, min(24, capacity)), draw.randint(0, 3)),
                max_tokens=draw.randint(1, 24),
                n=draw.randint(1, 4),
                seed=draw.randint(0, 3),
            )
        elif action == "abort" and live and draw.random() < 0.5:
            world.abort(draw.choice(live))
        elif action == "die" and draw.random() < 0.3:
            draw.choice([kill_scheduler, lose_worker, lose_kvmem])(world)
        else:
            ready = [
                f
                for f, x in ((world.finish_batch, world.batch), (world.finish_step, world.step))
                if x
            ]
            if ready:
                draw.choice(ready)()
    world.run()
    world.give_up_on_callers()
    world.run()
    world.assert_empty()
    for caller in world.callers.values():
        if not (caller.aborted or caller.rejected):
            assert caller.done, caller
            if FinishReason.KV_CAPACITY not in caller.finish.values():
                world.assert_right(caller)


# ---- the choice ----


def group_of(num_prompt_tokens: int, num_output_tokens: int) -> SequenceGroup:
    params = SamplingParams(max_tokens=100)
    group = SequenceGroup(Request("r", tuple(range(1, num_prompt_tokens + 1)), params), 0.0)
    sequence = Sequence(1, 0, group, StopChecker(params, (), Letters()))
    sequence.output_token_ids = [1] * num_output_tokens
    sequence.num_computed_tokens = sequence.num_tokens - 1
    sequence.block_table = list(range(-(-sequence.num_tokens // 16)))
    group.sequences.append(sequence)
    return group


@pytest.mark.parametrize(
    ("rates", "swaps"),
    [
        # 100 tokens in 7 blocks: 1 s of prefill against 2 * 7 * 1000 bytes.
        (TierRates(100.0, 15_000.0, 1000), True),
        (TierRates(100.0, 13_000.0, 1000), False),
        (TierRates(110.0, 15_000.0, 1000), False),
        (TierRates(0.0, 15_000.0, 1000), False),
        (TierRates(100.0, 0.0, 1000), False),
    ],
)
def test_the_cheaper_way_is_chosen(rates: TierRates, *, swaps: bool) -> None:
    preemption = Preemption(PreemptionMode.AUTO, rates, 16)
    group = group_of(90, 11)
    assert preemption.swaps(group, num_free_host_blocks=7) is swaps
    assert not preemption.swaps(group, num_free_host_blocks=6)
    assert Preemption(PreemptionMode.SWAP, TierRates(), 16).swaps(group, 7)
    assert not Preemption(PreemptionMode.RECOMPUTE, rates, 16).swaps(group, 7)


def test_swap_ops_of_a_group_are_one_op() -> None:
    """All its candidates go in one op, and come back in one."""
    world = World(num_blocks=26, num_host_blocks=100, config=config())
    for i in range(4):
        world.arrive(f"r{i}", prompt(8, i), max_tokens=24, n=3, seed=i, ignore_eos=True)
    sizes = []
    while world.batch is not None or world.step is not None:
        if world.batch is not None:
            for op in world.batch.ops:
                if isinstance(op, ops.SwapOut):
                    sizes.append(len(op.sequence_ids))
                elif isinstance(op, ops.SwapIn):
                    sizes.append(len(op.members))
            world.finish_batch()
        else:
            world.finish_step()
    assert sizes
    assert set(sizes) == {3}
