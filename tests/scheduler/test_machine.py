"""The scheduler's machine: whatever the pool and the company, every stream is its solo run."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_svc.core import ops
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.stopping import FinishReason
from tests.scheduler.world import EOS, World, solo_run


def prompt(length: int, start: int = 1) -> list[int]:
    return [1 + (start + i) % 40 for i in range(length)]


def test_one_request_alone() -> None:
    world = World(num_blocks=20)
    caller = world.arrive("a", prompt(6), max_tokens=20, seed=3)
    world.run()
    world.assert_right(caller)
    world.assert_empty()


def test_candidates_share_the_prompt_and_copy_on_write() -> None:
    world = World(num_blocks=40)
    caller = world.arrive("a", prompt(10), max_tokens=6, n=4, seed=1)
    world.run()
    world.assert_right(caller)
    # The half-filled third block is copied for three of the four.
    assert world.worker.num_copies == 3
    stats = world.memory.stats()
    assert stats.num_copies_on_write == 3
    # Two full prompt blocks once, and four ends of at most two blocks.
    assert stats.peak_in_use_blocks <= 2 + 4 * 2
    world.assert_empty()


def test_no_copy_when_the_prompt_fills_its_blocks() -> None:
    world = World(num_blocks=40)
    caller = world.arrive("a", prompt(8), max_tokens=6, n=4, seed=1)
    world.run()
    world.assert_right(caller)
    assert world.worker.num_copies == 0


def test_b27_candidates_of_one_seed_equal_single_runs_with_their_sample_index() -> None:
    world = World(num_blocks=60)
    together = world.arrive("all", prompt(7), max_tokens=8, n=4, seed=11)
    singles = [
        world.arrive(f"one-{i}", prompt(7), max_tokens=8, seed=11, first_sample_index=i)
        for i in range(4)
    ]
    world.run()
    outputs = [tuple(together.tokens[i]) for i in range(4)]
    assert outputs == [tuple(single.tokens[0]) for single in singles]
    assert len(set(outputs)) == 4


def test_b11_preemption_changes_no_token() -> None:
    world = World(num_blocks=14)
    callers = [world.arrive(f"r{i}", prompt(8, i), max_tokens=30, seed=i) for i in range(6)]
    world.run()
    assert world.preemptions > 0
    for caller in callers:
        world.assert_right(caller)
    world.assert_empty()


def test_b13_a_group_leaves_and_returns_as_one() -> None:
    world = World(num_blocks=22)
    callers = [world.arrive(f"r{i}", prompt(9, i), max_tokens=24, n=3, seed=i) for i in range(4)]
    world.run()
    assert world.preemptions > 0
    for caller in callers:
        world.assert_right(caller)
    world.assert_empty()


def test_b16_the_only_request_outgrows_the_pool() -> None:
    world = World(num_blocks=4)
    caller = world.arrive("a", prompt(6), max_tokens=1000, ignore_eos=True, seed=1)
    world.run()
    assert caller.finish == {0: FinishReason.KV_CAPACITY}
    tokens = caller.tokens[0]
    # All slots were used: 16 computed tokens, and the one drawn from the last of them.
    assert len(tokens) == 4 * 4 - 6 + 1
    world.assert_empty()
    again = world.arrive("b", prompt(6), max_tokens=3, seed=1)
    world.run()
    world.assert_right(again)


def test_b42_a_long_prompt_is_computed_in_chunks_beside_short_ones() -> None:
    world = World(num_blocks=100, config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8))
    long = world.arrive("long", prompt(200), max_tokens=4, seed=1)
    short = world.arrive("short", prompt(3), max_tokens=4, seed=2)
    world.run()
    assert world.worker.max_tokens_in_step <= 16
    world.assert_right(long)
    world.assert_right(short)


def test_b01_abort_before_the_record_is_sent_leaves_nothing() -> None:
    world = World(num_blocks=20)
    world.arrive("a", prompt(4), max_tokens=5)
    world.arrive("b", prompt(4), max_tokens=5)  # waits behind the batch with "a"
    world.abort("b")
    assert world.batch is not None
    assert len(world.batch.ops) == 1
    world.run()
    world.assert_right(world.callers["a"])
    assert not world.callers["b"].accepted
    world.assert_empty()


@pytest.mark.parametrize("n", [1, 2, 8])
def test_b03_b07_abort_while_running_stops_within_a_step(n: int) -> None:
    world = World(num_blocks=60)
    world.arrive("a", prompt(6), max_tokens=1000, ignore_eos=True, n=n, seed=1)
    while not world.callers["a"].tokens:
        world.finish_batch() if world.batch else world.finish_step()
    while world.step is None:
        world.finish_batch()
    newest_issued = world.steps[-1].step_id
    world.abort("a")
    world.run()
    # Those at the worker run on, and nothing follows them.
    assert world.worker.last_step_id == newest_issued
    world.assert_empty()


def test_b04_blocks_of_an_aborted_sequence_wait_for_the_step_in_flight() -> None:
    world = World(num_blocks=20)
    world.arrive("a", prompt(6), max_tokens=50, ignore_eos=True, seed=1)
    while world.step is None:
        world.finish_batch()
    world.abort("a")
    world.finish_batch()
    num_quarantined_blocks = world.memory.levels().num_quarantined_blocks
    assert num_quarantined_blocks > 0
    assert world.num_unused_blocks + num_quarantined_blocks == 20
    world.finish_step()
    world.run()
    world.assert_empty()


def test_the_same_id_again_after_an_abort() -> None:
    world = World(num_blocks=20)
    world.arrive("a", prompt(6), max_tokens=50, ignore_eos=True, seed=1)
    while world.step is None:
        world.finish_batch()
    world.abort("a")
    again = world.arrive("a", prompt(5), max_tokens=5, seed=2)
    world.run()
    world.assert_right(again)
    world.assert_empty()


def test_a_full_waiting_queue_is_refused() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_waiting=2)
    world = World(num_blocks=20, config=config)
    callers = [world.arrive(f"r{i}", prompt(4), max_tokens=3, seed=i) for i in range(4)]
    assert [caller.rejected for caller in callers] == ["", "", "QUEUE_FULL", "QUEUE_FULL"]
    world.run()
    for caller in callers[:2]:
        world.assert_right(caller)


def test_b18_a_resumed_sibling_waits_for_the_prefix_it_shares() -> None:
    """Preempted right after the fork, on a block border: the sibling has one token to compute,
    and the prefix it shares takes the first candidate three steps."""
    world = World(num_blocks=7, config=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8))
    first = world.arrive("first", prompt(4), max_tokens=11, seed=5)
    group = world.arrive("group", prompt(16, 9), max_tokens=4, n=2, seed=1)
    world.run()
    assert world.preemptions == 1
    world.assert_right(first)
    world.assert_right(group)
    world.assert_empty()


def test_a_prefix_that_is_being_computed_is_not_copied() -> None:
    """One step ahead, a resumed group asks for slots before the memory service has heard that the
    prompt's shared blocks are computed."""
    config = SchedulerConfig(
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_waiting=10,
        watermark=0.0,
        use_prefix_cache=False,  # or the two of them share, and do copy
    )
    preemptions = 0
    for num_blocks in range(16, 30):
        world = World(num_blocks=num_blocks, block_size=1, config=config)
        for name in ("a", "b"):
            world.arrive(name, prompt(6), max_tokens=6, n=2, seed=1, ignore_eos=True)
        world.run()
        for name in ("a", "b"):
            world.assert_right(world.callers[name])
        assert world.worker.num_copies == 0
        preemptions += world.preemptions
        world.assert_empty()
    assert preemptions


def test_no_slots_are_asked_for_beyond_the_end() -> None:
    """The model's length may leave no room for them."""
    world = World(num_blocks=30, block_size=3)
    caller = world.arrive("a", prompt(4), max_tokens=7, seed=1, ignore_eos=True)
    asked = []
    while world.batch is not None or world.step is not None:
        if world.batch is not None:
            for op in world.batch.ops:
                if isinstance(op, ops.Reserve):
                    asked.extend(op.num_slots.tolist())
            world.finish_batch()
        else:
            world.finish_step()
    world.assert_right(caller)
    assert max(asked) == 4 + 7 - 1


def test_a_copy_of_a_preempted_sequence_is_not_made() -> None:
    """Two groups fork in one step; the elder cannot have its two copies while the younger has
    got its one. The younger gives way, and its copy's destination goes to the elder."""
    world = World(num_blocks=8, config=SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8))
    elder = world.arrive("elder", prompt(22), max_tokens=3, n=3, seed=1)
    world.finish_batch()
    younger = world.arrive("younger", prompt(2, 5), max_tokens=3, n=2, seed=2)
    world.run()
    assert world.preemptions == 1
    # Quarantined blocks were waited for: the elder, alone then, was not ended for want of them.
    world.assert_right(elder)
    world.assert_right(younger)
    # Three were planned; the younger's was dropped with its blocks.
    assert world.memory.stats().num_copies_on_write == 3
    assert world.worker.num_copies == 2
    world.assert_empty()


@pytest.mark.parametrize("seed", range(60))
def test_groups_under_pressure(seed: int) -> None:
    """Groups that fork at block borders, in pools and budgets that keep throwing them out."""
    draw = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=draw.randint(8, 12), max_num_seqs=8)
    world = World(num_blocks=draw.randint(8, 14), config=config)
    for i in range(12):
        world.arrive(
            f"r{i}",
            prompt(draw.choice([4, 6, 8, 11, 12, 16]), draw.randint(0, 3)),
            max_tokens=draw.randint(1, 16),
            n=draw.randint(1, 3),
            seed=i,
        )
    while world.batch or world.step:
        if draw.random() < 0.03:
            live = [r for r, c in world.callers.items() if not (c.done or c.aborted)]
            if live:
                world.abort(draw.choice(live))
        ready = [
            f for f, x in ((world.finish_batch, world.batch), (world.finish_step, world.step)) if x
        ]
        draw.choice(ready)()
    world.assert_empty()
    for caller in world.callers.values():
        if not caller.aborted and FinishReason.KV_CAPACITY not in caller.finish.values():
            world.assert_right(caller)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_schedule(data: st.DataObject) -> None:
    """Arrivals, aborts, batches and steps in any order; tiny pools; every limit drawn."""
    config = SchedulerConfig(
        max_num_batched_tokens=data.draw(st.integers(8, 40)),
        max_num_seqs=data.draw(st.integers(4, 8)),
        max_waiting=50,
        watermark=data.draw(st.sampled_from([0.0, 0.01, 0.2])),
    )
    world = World(
        num_blocks=data.draw(st.integers(8, 40)),
        block_size=data.draw(st.sampled_from([1, 2, 4, 7])),
        config=config,
    )
    capacity = world.num_blocks * world.worker.block_size
    for i in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["arrive", "step", "step", "step", "abort"]))
        if action == "arrive":
            world.arrive(
                f"r{i}",
                prompt(data.draw(st.integers(1, min(24, capacity)))),
                max_tokens=data.draw(st.integers(1, 16)),
                n=data.draw(st.integers(1, 4)),
                seed=data.draw(st.integers(0, 3)),
            )
        elif action == "step":
            ready = [f for f, x in (("b", world.batch), ("s", world.step)) if x is not None]
            if ready:
                which = data.draw(st.sampled_from(ready))
                world.finish_batch() if which == "b" else world.finish_step()
        else:
            live = [r for r, c in world.callers.items() if not (c.done or c.aborted or c.rejected)]
            if live:
                world.abort(data.draw(st.sampled_from(live)))
    world.run()
    world.assert_empty()
    for caller in world.callers.values():
        if caller.aborted:
            continue
        assert caller.done or caller.rejected
        for candidate, tokens in caller.tokens.items():
            expected = solo_run(caller.request, candidate)
            if caller.finish[candidate] is FinishReason.KV_CAPACITY:
                assert expected[: len(tokens)] == tuple(tokens)
            else:
                assert tuple(tokens) == expected
                reason = FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH
                assert caller.finish[candidate] is reason
