"""Install: a session takes the worker over, and is told what was executed before it."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from octavo.service.columns import I32, U64, unpack
from octavo.v1 import types_pb2, worker_pb2
from tests.worker.process import reason_of, request, sampled, start
from tests.worker.stage import DEADLINE_S, Stage, failure_of


async def install(stage: Stage, fence: types_pb2.Fence) -> worker_pb2.InstallReply:
    message = worker_pb2.InstallRequest(fence=fence)
    return await stage.stub.Install(message, timeout=DEADLINE_S)


async def refusal(stage: Stage, fence: types_pb2.Fence) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await install(stage, fence)
    return reason_of(caught.value)


async def open_stream(stage: Stage, *steps: worker_pb2.ExecuteRequest):
    """An Execute stream and its replies to `steps`."""
    call = stage.stub.Execute(timeout=DEADLINE_S)
    replies = []
    for step in steps:
        await call.write(step)
        replies.append(await call.read())
    return call, replies


def retained_ids(reply: worker_pb2.InstallReply) -> list[int]:
    return [step.reply.step_id for step in reply.retained]


def test_a_worker_that_has_executed_nothing(on_stage):
    async def act(stage: Stage) -> None:
        reply = await install(stage, stage.fence(1))
        assert reply == worker_pb2.InstallReply(worker_boot_id="boot")

    on_stage(act)


def test_the_newest_result_is_handed_over_with_its_rows(on_stage):
    async def act(stage: Stage) -> None:
        rows = [(1, 1, 0, [5, 6, 7], 2), (9, 1, 0, [8], 1)]
        starts = [start(1, [0]), start(9, [1])]
        message = request(stage.fence(1), 4, rows, starts=starts)
        _, (sent,) = await open_stream(stage, message)
        reply = await install(stage, stage.fence(2))
        assert reply.last_step_id == 4
        (kept,) = reply.retained
        assert kept.reply == sent
        assert len(sampled(kept.reply)) == 3
        assert unpack(kept.sequence_ids, U64).tolist() == [1, 9]
        assert unpack(kept.num_input_tokens, I32).tolist() == [3, 1]
        assert unpack(kept.num_computed_tokens, I32).tolist() == [0, 0]
        assert unpack(kept.num_samples, I32).tolist() == [2, 1]

    on_stage(act)


def test_an_empty_step_counts_and_pushes_no_result_out(on_stage):
    async def act(stage: Stage) -> None:
        await open_stream(
            stage,
            stage.one_token(1, 1),
            stage.one_token(1, 2),
            stage.one_token(1, 3),
            request(stage.fence(1), 4, []),
        )
        reply = await install(stage, stage.fence(2))
        # As many as may be in flight.
        assert (reply.last_step_id, retained_ids(reply)) == (4, [2, 3])

    on_stage(act)


def test_the_same_fence_gets_the_same_answer(on_stage):
    async def act(stage: Stage) -> None:
        await open_stream(stage, stage.one_token(1, 1))
        first = await install(stage, stage.fence(2))
        assert await install(stage, stage.fence(2)) == first
        assert await install(stage, stage.fence(2)) == first
        assert retained_ids(first) == [1]

    on_stage(act)


def test_older_fences_are_refused_and_their_stream_is_ended(on_stage):
    async def act(stage: Stage) -> None:
        old, _ = await open_stream(stage, stage.one_token(1, 1))
        await install(stage, stage.fence(2))
        assert await failure_of(old) == "STALE_EPOCH"
        late = stage.stub.Execute(timeout=DEADLINE_S)
        await late.write(stage.one_token(1, 2))
        assert await failure_of(late) == "STALE_EPOCH"
        assert await refusal(stage, stage.fence(1)) == "STALE_EPOCH"
        assert await refusal(stage, stage.fence(2, session="another")) == "STALE_EPOCH"
        assert stage.executed == [1]

    on_stage(act)


def test_fences_of_other_processes_are_refused(on_stage):
    async def act(stage: Stage) -> None:
        await install(stage, stage.fence(1))
        await install(stage, stage.fence(1, kvmem="k2"))
        assert await refusal(stage, stage.fence(9)) == "STALE_BOOT_ID"
        stranger = stage.fence(9, kvmem="k2")
        stranger.worker_boot_id = "another"
        assert await refusal(stage, stranger) == "STALE_BOOT_ID"

    on_stage(act)


def test_it_waits_for_the_step_that_runs_and_has_its_result(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        old = stage.stub.Execute(timeout=DEADLINE_S)
        await old.write(stage.one_token(1, 7))
        await stage.until_began()
        waiting = asyncio.ensure_future(install(stage, stage.fence(2)))
        await stage.until_epoch(2)
        # An answer to something asked later: the worker has had every chance to answer early.
        await stage.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S)
        assert not waiting.done()
        stage.gate.set()
        reply = await waiting
        assert (reply.last_step_id, retained_ids(reply)) == (7, [7])
        assert await failure_of(old) == "STALE_EPOCH"

    on_stage(act)


def test_steps_that_were_queued_for_older_sessions_never_run(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        calls = [stage.stub.Execute(timeout=DEADLINE_S) for _ in range(2)]
        for epoch, call in enumerate(calls, start=1):
            await call.write(stage.one_token(epoch, epoch))
            await stage.until_began()
            await stage.until_epoch(epoch)
        waiting = asyncio.ensure_future(install(stage, stage.fence(3)))
        await stage.until_epoch(3)
        stage.gate.set()
        reply = await waiting
        assert stage.executed == [1]
        assert (reply.last_step_id, retained_ids(reply)) == (1, [1])

    on_stage(act)


def test_giving_up_the_wait_leaves_the_session_installed(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        old = stage.stub.Execute(timeout=DEADLINE_S)
        await old.write(stage.one_token(1, 1))
        await stage.until_began()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.stub.Install(worker_pb2.InstallRequest(fence=stage.fence(2)), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await refusal(stage, stage.fence(1)) == "STALE_EPOCH"
        stage.gate.set()
        assert retained_ids(await install(stage, stage.fence(2))) == [1]

    on_stage(act)


def test_a_failed_step_is_not_handed_over(on_stage):
    async def act(stage: Stage) -> None:
        call, _ = await open_stream(stage, stage.one_token(1, 1))
        stage.failure = RuntimeError("shapes cannot be multiplied")
        await call.write(stage.one_token(1, 2))
        assert await failure_of(call) == "INTERNAL"
        reply = await install(stage, stage.fence(2))
        assert (reply.last_step_id, retained_ids(reply)) == (1, [1])

    on_stage(act)


def test_another_life_of_the_memory_service_is_told_nothing_of_the_one_before(on_stage):
    async def act(stage: Stage) -> None:
        await open_stream(stage, stage.one_token(1, 50))
        new = stage.fence(1, kvmem="k2")
        reply = await install(stage, new)
        assert (reply.last_step_id, retained_ids(reply)) == (0, [])
        # Nor once it has executed a step of its own, with ids from the start and no rows.
        await open_stream(stage, request(new, 1, []))
        reply = await install(stage, new)
        assert (reply.last_step_id, retained_ids(reply)) == (1, [])

    on_stage(act)


def test_the_session_executes_after_it_with_an_empty_mirror(on_stage):
    async def act(stage: Stage) -> None:
        await open_stream(stage, stage.one_token(1, 1))
        fence = stage.fence(2)
        await install(stage, fence)
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(request(fence, 2, [(1, 1, 1, [5], 1)]))
        assert await failure_of(call) == "UNKNOWN_SEQUENCE"
        _, (reply,) = await open_stream(stage, stage.one_token(2, 3))
        assert reply.step_id == 3

    on_stage(act)


def test_a_session_that_comes_back_gets_its_worker_results_and_mirror(on_stage):
    """The connection broke, and here it still looks open: its stream must not be in the way."""

    async def act(stage: Stage) -> None:
        half_dead, _ = await open_stream(stage, stage.one_token(1, 1))
        reply = await install(stage, stage.fence(1))
        assert (reply.last_step_id, retained_ids(reply)) == (1, [1])
        assert await failure_of(half_dead) == "SESSION_HELD"
        known = request(stage.fence(1), 2, [(1, 1, 1, [5], 1)])
        _, (answer,) = await open_stream(stage, known)
        assert answer.step_id == 2

    on_stage(act)


def test_a_session_that_comes_back_waits_for_its_own_step(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        half_dead = stage.stub.Execute(timeout=DEADLINE_S)
        await half_dead.write(stage.one_token(1, 1))
        await stage.until_began()
        waiting = asyncio.ensure_future(install(stage, stage.fence(1)))
        while stage.servicer._holder is not None:
            await asyncio.sleep(0.01)
        stage.gate.set()
        assert retained_ids(await waiting) == [1]
        # What the half-dead one still sends is not executed, though its fence is good.
        assert await failure_of(half_dead) == "SESSION_HELD"
        assert stage.executed == [1]

    on_stage(act)


def test_before_the_model_is_loaded_it_says_so(on_stage):
    async def act(stage: Stage) -> None:
        stage.servicer._runner = None
        assert await refusal(stage, stage.fence(1)) == "NOT_READY"

    on_stage(act)


def test_a_stream_may_go_on_under_a_newer_epoch(on_stage):
    async def act(stage: Stage) -> None:
        call, _ = await open_stream(stage, stage.one_token(1, 1))
        await call.write(stage.one_token(2, 2))
        assert (await call.read()).step_id == 2

    on_stage(act)


@pytest.mark.parametrize(("num_computed", "is_repeated"), [(0, True), (1, False)])
def test_a_step_that_a_takeover_has_executed_again_is_noted(on_stage, num_computed, is_repeated):
    async def act(stage: Stage) -> None:
        await open_stream(stage, stage.one_token(1, 1))
        await install(stage, stage.fence(2))
        rows = [(1, 1, num_computed, [5], 1)]
        message = request(stage.fence(2), 2, rows, starts=[start(1, [0])])
        with capture_logs() as said:
            await open_stream(stage, message)
        again = [line["step_id"] for line in said if line["event"] == "step executed again"]
        assert again == ([2] if is_repeated else [])

    on_stage(act)
