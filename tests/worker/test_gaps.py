"""Time between steps: whose it is, and whether there was work meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from model_worker.gaps import Gap, Gaps
from octavo.v1 import worker_pb2
from tests.worker.process import request, start
from tests.worker.stage import DEADLINE_S, Stage

PAUSE_S = 0.05


def after_a_step(ended_ns: int) -> Gaps:
    gaps = Gaps()
    gaps.begin(0, 0, goes_on=True)
    gaps.end(ended_ns)
    return gaps


@pytest.mark.parametrize(
    ("ready_ns", "gap"),
    [
        (900, Gap(gap_ns=50, idle_ns=0)),  # before the step before it had ended
        (1000, Gap(gap_ns=50, idle_ns=0)),
        (1030, Gap(gap_ns=50, idle_ns=30)),
        (1050, Gap(gap_ns=50, idle_ns=50)),
    ],
)
def test_idle_is_what_comes_before_a_step_is_there(ready_ns: int, gap: Gap):
    assert after_a_step(1000).begin(ready_ns, 1050, goes_on=True) == gap


def test_nobody_waited_before_the_first_step_and_before_newcomers():
    assert Gaps().begin(500, 600, goes_on=True) == Gap()
    assert after_a_step(1000).begin(5000, 6000, goes_on=False) == Gap()


def goes_on(stage: Stage, step_id: int, position: int) -> worker_pb2.ExecuteRequest:
    return request(stage.fence(1), step_id, [(1, 1, position, [-1], 1)])


def test_over_the_wire(on_stage):
    """Two in flight leave no idle time; one that comes late does, and one of newcomers not."""

    async def act(stage: Stage) -> None:
        stream = stage.stub.Execute(timeout=DEADLINE_S)
        await stage.hold()
        await stream.write(stage.one_token(1, 1))
        await stage.until_began()
        await stream.write(goes_on(stage, 2, 1))
        await stage.until_submitted(2)
        stage.gate.set()
        first, second = (await stream.read()).timings, (await stream.read()).timings
        assert first.idle_us == second.idle_us == 0

        await asyncio.sleep(PAUSE_S)
        await stream.write(goes_on(stage, 3, 2))
        # At least the pause: the step before had ended by then.
        assert (await stream.read()).timings.idle_us >= PAUSE_S * 1e6

        await asyncio.sleep(PAUSE_S)
        newcomer = request(
            stage.fence(1), 4, [(2, 1, 0, [5], 1)], starts=[start(2, [1])], dropped=[1]
        )
        await stream.write(newcomer)
        assert (await stream.read()).timings.idle_us == 0

    on_stage(act)
