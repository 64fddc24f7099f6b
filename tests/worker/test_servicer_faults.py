"""The servicer when the model hangs, fails, or is slower than the sessions that use it."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from model_worker.serve import report_health
from octavo.v1 import worker_pb2
from tests.worker.process import reason_of, request, sampled
from tests.worker.stage import DEADLINE_S, Stage, failure_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_bug_in_the_forward_ends_the_stream_and_not_the_process(on_stage):
    async def act(stage: Stage) -> None:
        stage.failure = RuntimeError("shapes cannot be multiplied")
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 1))
        assert await failure_of(call) == "INTERNAL"
        stage.failure = None
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 1))
        assert len(sampled(await call.read())) == 1

    on_stage(act)


def test_info_and_health_answer_while_a_step_runs(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 1))
        await stage.until_began()
        info = await stage.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S)
        assert info.boot_id == "boot"
        await stage.health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        stage.gate.set()
        assert (await call.read()).step_id == 1

    on_stage(act)


def test_b44_health_says_not_serving_while_a_step_hangs(on_stage):
    async def act(stage: Stage) -> None:
        reporting = asyncio.create_task(report_health(stage.host, stage.servicer, 0.05))
        watch = stage.health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        while (await watch.read()).status != SERVING:
            pass
        await stage.hold()
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 1))
        assert (await watch.read()).status == NOT_SERVING
        stage.gate.set()
        assert (await watch.read()).status == SERVING
        reporting.cancel()

    on_stage(act)


def test_an_adopter_waits_for_the_step_in_flight_and_its_holder_is_told(on_stage):
    """The adopter's step runs after the one in flight, whose result is kept and not sent."""

    async def act(stage: Stage) -> None:
        await stage.hold()
        old = stage.stub.Execute(timeout=DEADLINE_S)
        await old.write(stage.one_token(1, 1))
        await stage.until_began()
        new = stage.stub.Execute(timeout=DEADLINE_S)
        await new.write(request(stage.fence(2), 2, []))
        await stage.until_epoch(2)
        late = stage.stub.Execute(timeout=DEADLINE_S)
        await late.write(stage.one_token(1, 3))
        assert await failure_of(late) == "STALE_EPOCH"
        assert stage.executed == []
        stage.gate.set()
        assert (await new.read()).step_id == 2
        assert stage.executed == [1, 2]
        assert await failure_of(old) == "STALE_EPOCH"
        assert [kept.output.step_id for kept in stage.servicer.retained] == [1]

    on_stage(act)


def test_the_result_of_a_step_whose_client_vanished_is_kept(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 7))
        await stage.until_began()
        call.cancel()
        stage.gate.set()
        while not stage.servicer.retained:
            await asyncio.sleep(0.01)
        (kept,) = stage.servicer.retained
        assert kept.output.step_id == 7
        assert kept.output.sampled_token_ids.size == 1

    on_stage(act)


def test_a_queued_step_of_a_session_that_ended_meanwhile_is_not_run(on_stage):
    """Two sessions change hands while the model is busy: the one in between never runs."""

    async def act(stage: Stage) -> None:
        await stage.hold()
        calls = [stage.stub.Execute(timeout=DEADLINE_S) for _ in range(3)]
        for epoch, call in enumerate(calls, start=1):
            await call.write(stage.one_token(epoch, epoch))
            await stage.until_began()
            await stage.until_epoch(epoch)
        stage.gate.set()
        assert (await calls[2].read()).step_id == 3
        assert stage.executed == [1, 3]
        assert await failure_of(calls[1]) == "STALE_EPOCH"

    on_stage(act)


def test_before_the_model_is_loaded_every_call_says_so(on_stage):
    async def act(stage: Stage) -> None:
        stage.servicer._runner = None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(caught.value) == "NOT_READY"
        call = stage.stub.Execute(timeout=DEADLINE_S)
        assert await failure_of(call) == "NOT_READY"

    on_stage(act)
