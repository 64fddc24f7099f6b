"""A batch stays below the wire's limits, however much has come while its predecessor was away."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core import ops, outbox
from scheduler_svc.core.outbox import Outbox
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request
from tests.scheduler.world import World


def arrive(name: str, num_tokens: int) -> ops.Arrive:
    return ops.Arrive(Request(name, (1,) * num_tokens, SamplingParams()))


def batches(box: Outbox) -> list[list[ops.Op]]:
    """Everything queued, batch by batch, each answered before the next."""
    sent = []
    while box:
        batch = box.send(1, 0, prepares_step=False)
        sent.append(list(batch.ops))
        ok = tuple(ops.OpResult(ops.OpStatus.OK) for _ in batch.ops)
        nothing = ops.NO_INT32
        box.settle(
            ops.BatchResult(
                batch.batch_seq, ok, ops.TableDeltas(), nothing, nothing, ops.PoolLevels()
            )
        )
    return sent


def test_long_prompts_are_spread_over_batches_in_their_order() -> None:
    box = Outbox()
    third = outbox.MAX_ARRIVING_TOKENS // 3
    queued = [arrive("a", third), arrive("b", third), ops.Confirm("x"), arrive("c", third + 9)]
    queued += [arrive("d", 1), arrive("e", third), ops.Confirm("y")]
    for op in queued:
        box.add(op)
    first, second = batches(box)
    assert first == [*queued[:3], queued[-1]]
    # "d" would have fitted, but came later than "c".
    assert second == queued[3:6]


def test_a_prompt_longer_than_that_goes_alone() -> None:
    box = Outbox()
    long, short = arrive("long", outbox.MAX_ARRIVING_TOKENS + 1), arrive("short", 1)
    box.add(long)
    box.add(short)
    assert batches(box) == [[long], [short]]


def test_many_short_prompts_are_spread_too() -> None:
    box = Outbox()
    for i in range(2 * outbox.MAX_ARRIVALS + 1):
        box.add(arrive(str(i), 1))
    assert [len(batch) for batch in batches(box)] == [outbox.MAX_ARRIVALS] * 2 + [1]


@pytest.mark.parametrize("seed", range(20))
def test_the_machine_goes_on_whatever_is_left_for_later(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_ARRIVALS", 2)
    draw = random.Random(seed)
    world = World(num_blocks=20)
    for i in range(25):
        world.arrive(f"r{i}", [1 + i, 2, 3], max_tokens=draw.randint(1, 6), seed=i)
        if draw.random() < 0.3:
            live = [name for name, c in world.callers.items() if not (c.done or c.aborted)]
            world.abort(draw.choice(live))
        if draw.random() < 0.3 and world.batch is not None:
            world.finish_batch()
    world.run()
    world.assert_empty()
    for caller in world.callers.values():
        if not caller.aborted:
            world.assert_right(caller)
