"""The servicer when the model hangs, fails, or is slower than the sessions that use it.

A real gRPC server in this process and a real runner, whose `execute` can be held up or made to
fail from the test.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from model_worker.serve import SERVICE_NAME, report_health
from model_worker.servicer import WorkerServicer
from octavo.service import telemetry
from octavo.service.server import ServiceHost
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.process import reason_of, request, sampled, start
from tests.worker.tiny import load_tiny, make_runner

DEADLINE_S = 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Stage:
    """A servicer on a socket, and a gate in front of its runner."""

    def __init__(self, servicer: WorkerServicer, host: ServiceHost, channel: Any) -> None:
        self.servicer, self.host = servicer, host
        self.stub: Any = worker_pb2_grpc.ModelWorkerStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.failure: Exception | None = None
        self.executed: list[int] = []

    def gated(self, execute: Callable) -> Callable:
        def run(step):
            self.began.set()
            assert self.gate.wait(DEADLINE_S)
            if self.failure is not None:
                raise self.failure
            output = execute(step)
            self.executed.append(step.step_id)
            return output

        return run

    def fence(self, epoch: int) -> types_pb2.Fence:
        return types_pb2.Fence(
            session_id="s", epoch=epoch, kvmem_boot_id="k", worker_boot_id=self.servicer.boot_id
        )

    def one_token(self, epoch: int, step_id: int) -> worker_pb2.ExecuteRequest:
        return request(self.fence(epoch), step_id, [(1, 1, 0, [5], 1)], starts=[start(1, [0])])

    async def hold(self) -> None:
        """From now on steps wait inside the model, until `gate` is set."""
        self.gate.clear()
        self.began.clear()

    async def until_epoch(self, epoch: int) -> None:
        """Wait until the servicer has installed `epoch`."""
        while (newest := self.servicer.fencing.newest) is None or newest.epoch != epoch:
            await asyncio.sleep(0.01)

    async def until_began(self) -> None:
        await asyncio.to_thread(self.began.wait, DEADLINE_S)
        assert self.began.is_set()


@pytest.fixture
def on_stage(model_folders):
    """Runs a coroutine function with a Stage."""

    def run(act: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
                address = f"unix:{folder}/w.sock"
                thread = ThreadPoolExecutor(max_workers=1)
                servicer = WorkerServicer("boot", thread, telemetry.disabled())
                host = ServiceHost("worker", address, [SERVICE_NAME])
                worker_pb2_grpc.add_ModelWorkerServicer_to_server(servicer, host.server)
                await host.start()
                try:
                    async with grpc.aio.insecure_channel(address) as channel:
                        stage = Stage(servicer, host, channel)
                        runner = make_runner(load_tiny(model_folders["llama-gqa"]))
                        runner.execute = stage.gated(runner.execute)
                        servicer.set_runner(runner)
                        try:
                            await asyncio.wait_for(act(stage), DEADLINE_S)
                        finally:
                            stage.gate.set()
                finally:
                    await host.server.stop(0)
                    thread.shutdown()

        asyncio.run(main())

    return run


async def failure_of(call) -> str:
    """The reason the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return reason_of(caught.value)


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
        assert [output.step_id for output in stage.servicer.retained_outputs] == [1]

    on_stage(act)


def test_the_result_of_a_step_whose_client_vanished_is_kept(on_stage):
    async def act(stage: Stage) -> None:
        await stage.hold()
        call = stage.stub.Execute(timeout=DEADLINE_S)
        await call.write(stage.one_token(1, 7))
        await stage.until_began()
        call.cancel()
        stage.gate.set()
        while not stage.servicer.retained_outputs:
            await asyncio.sleep(0.01)
        (kept,) = stage.servicer.retained_outputs
        assert kept.step_id == 7
        assert kept.sampled_token_ids.size == 1

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
