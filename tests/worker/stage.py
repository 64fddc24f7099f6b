"""A real gRPC server in this process and a real runner, whose `execute` can be held up or made
to fail from the test."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from model_worker.serve import SERVICE_NAME
from model_worker.servicer import WorkerServicer
from octavo.service import telemetry
from octavo.service.server import ServiceHost
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.process import reason_of, request, start
from tests.worker.tiny import load_tiny, make_runner

DEADLINE_S = 20


class ModelThread(ThreadPoolExecutor):
    """One thread, and how often it was given something to do."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.num_submitted = 0

    def submit(self, *args: Any, **keywords: Any) -> Future[Any]:
        self.num_submitted += 1
        return super().submit(*args, **keywords)


class Stage:
    """A servicer on a socket, and a gate in front of its runner."""

    def __init__(
        self, servicer: WorkerServicer, host: ServiceHost, channel: Any, thread: ModelThread
    ) -> None:
        self.servicer, self.host, self.thread = servicer, host, thread
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

    def fence(self, epoch: int, kvmem: str = "k", session: str = "s") -> types_pb2.Fence:
        return types_pb2.Fence(
            session_id=session,
            epoch=epoch,
            kvmem_boot_id=kvmem,
            worker_boot_id=self.servicer.boot_id,
        )

    def one_token(self, epoch: int, step_id: int) -> worker_pb2.ExecuteRequest:
        return request(self.fence(epoch), step_id, [(1, 1, 0, [5], 1)], starts=[start(1, [0])])

    async def hold(self) -> None:
        """From now on steps wait inside the model, until `gate` is set."""
        self.gate.clear()
        self.began.clear()

    async def until_submitted(self, count: int) -> None:
        """Wait until the model thread has been given `count` steps, carried out or not."""
        while self.thread.num_submitted < count:
            await asyncio.sleep(0.01)

    async def until_epoch(self, epoch: int) -> None:
        """Wait until the servicer has installed `epoch`."""
        while (newest := self.servicer.fencing.newest) is None or newest.epoch != epoch:
            await asyncio.sleep(0.01)

    async def until_began(self) -> None:
        await asyncio.to_thread(self.began.wait, DEADLINE_S)
        assert self.began.is_set()


def run_on_stage(model_folder: Path, act: Callable[[Stage], Awaitable[None]]) -> None:
    """Run `act` with a Stage that serves the model in `model_folder`."""
    asyncio.run(_main(model_folder, act))


async def _main(model_folder: Path, act: Callable[[Stage], Awaitable[None]]) -> None:
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        address = f"unix:{folder}/w.sock"
        thread = ModelThread()
        servicer = WorkerServicer("boot", thread, telemetry.disabled())
        host = ServiceHost("worker", address, [SERVICE_NAME])
        worker_pb2_grpc.add_ModelWorkerServicer_to_server(servicer, host.server)
        await host.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stage = Stage(servicer, host, channel, thread)
                runner = make_runner(load_tiny(model_folder))
                runner.execute = stage.gated(runner.execute)
                servicer.set_runner(runner)
                try:
                    await asyncio.wait_for(act(stage), DEADLINE_S)
                finally:
                    stage.gate.set()
        finally:
            await host.server.stop(0)
            thread.shutdown()


async def failure_of(call) -> str:
    """The reason the stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return reason_of(caught.value)
