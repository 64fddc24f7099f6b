"""A stack to be broken: supervised services, a standby scheduler, and a proxy on every link."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from benchmarks.proxy import Proxy
from model_worker.threads import WAITING
from octavo.cli.supervisor import ServiceSpec, Supervisor, SupervisorConfig
from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2, inference_pb2_grpc, kvmem_pb2, kvmem_pb2_grpc

SCHEDULERS: Final = ("scheduler-a", "scheduler-b")
READY_TIMEOUT_S: Final = 180.0
LOOK_TIMEOUT_S: Final = 1.0
# For results whose callers have them, and died or were cut off before they could say so.
RESULT_TTL_S: Final = 5
# Each service is restarted as soon as it is gone.
RESTART = SupervisorConfig(backoff_min_s=0.01, backoff_max_s=0.01, drain_timeout_s=5.0)
# A step that repeats what the worker had executed for the same session's predecessor.
EXECUTED_AGAIN = "step executed again"


@dataclass
class Log:
    """The services' lines in a file, and how often each event was said."""

    path: Path
    events: Counter[str] = field(default_factory=Counter)

    def write(self, service: str, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{service}: {line}\n")
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                self.events[str(said.get("event"))] += 1


class ChaosStack:
    """kvmem with a journal, a worker, and two schedulers of which one stands by.

    Each scheduler has links of its own: `links[scheduler, peer]`, and `links[scheduler,
    "client"]` for the callers' way to it.
    """

    def __init__(self, folder: Path, worker_options: tuple[str, ...]) -> None:
        self.journal = folder / "journal"
        self.log = Log(folder / "services.log")
        self._folder = folder
        self.links: dict[tuple[str, str], Proxy] = {}
        for scheduler in SCHEDULERS:
            targets = {"client": scheduler, "kvmem": "kvmem", "worker": "worker"}
            for link, target in targets.items():
                address = f"unix:{folder}/{scheduler[-1]}-{link}.sock"
                self.links[scheduler, link] = Proxy(address, self.address_of(target))
        self.supervisor = Supervisor(
            self._specs(worker_options), self.log, env={**os.environ, **WAITING}, config=RESTART
        )
        self._channels: dict[str, grpc.aio.Channel] = {}

    def address_of(self, service: str) -> str:
        return f"unix:{self._folder}/{service}.sock"

    @property
    def client_addresses(self) -> list[str]:
        return [self.links[scheduler, "client"].address for scheduler in SCHEDULERS]

    def _specs(self, worker_options: tuple[str, ...]) -> list[ServiceSpec]:
        options: dict[str, tuple[str, ...]] = {
            "kvmem": ("kvmem_svc", f"--journal={self.journal}"),
            "worker": ("model_worker", *worker_options),
        }
        for scheduler in SCHEDULERS:
            options[scheduler] = (
                "scheduler_svc",
                f"--kvmem={self.links[scheduler, 'kvmem'].address}",
                f"--worker={self.links[scheduler, 'worker'].address}",
                f"--advertise-address={self.links[scheduler, 'client'].address}",
                f"--result-ttl-s={RESULT_TTL_S}",
            )
        return [
            ServiceSpec(
                name,
                (sys.executable, "-m", module, f"--address={self.address_of(name)}", *arguments),
                # A standby does not serve, and is to run all the same.
                None if name in SCHEDULERS else self.address_of(name),
            )
            for name, (module, *arguments) in options.items()
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything up, until the block ends."""
        for proxy in self.links.values():
            await proxy.start()
        self.supervisor.start()
        try:
            await self.supervisor.wait_serving(READY_TIMEOUT_S)
            async with asyncio.timeout(READY_TIMEOUT_S):
                while await self.owner() is None:
                    await asyncio.sleep(0.1)
            yield
        finally:
            self.supervisor.kill()
            await self.supervisor.drain()
            for channel in self._channels.values():
                await channel.close(None)
            for proxy in self.links.values():
                await proxy.close()

    # ---- faults ----

    def signal(self, service: str, number: signal.Signals) -> None:
        """To the service's process, if it runs at this moment."""
        pid = self.supervisor.services[service].pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, *services: str) -> None:
        for service in services:
            self.signal(service, signal.SIGKILL)

    def lose_journal(self) -> None:
        """Kill kvmem, and have it find nothing when it starts again."""
        # In this order, since it is started again at once. What it writes meanwhile is lost too.
        shutil.rmtree(self.journal, ignore_errors=True)
        self.kill("kvmem")

    def heal(self) -> None:
        """End every pause and every broken link; what is dead is being restarted anyway."""
        for proxy in self.links.values():
            proxy.heal()
        for service in self.supervisor.services:
            self.signal(service, signal.SIGCONT)

    # ---- looking in ----

    def _channel_to(self, service: str) -> grpc.aio.Channel:
        if service not in self._channels:
            self._channels[service] = grpc.aio.insecure_channel(
                self.address_of(service), options=CHANNEL_OPTIONS
            )
        return self._channels[service]

    async def wait_for_standby(self, owner: str) -> None:
        """Until the other scheduler says that it is not the one who has the requests."""
        stub = inference_pb2_grpc.InferenceStub(self._channel_to(self.standby_of(owner)))
        while True:
            try:
                await stub.GetModel(inference_pb2.GetModelRequest(), timeout=LOOK_TIMEOUT_S)
            except grpc.RpcError as refused:
                error = ServiceError.from_rpc_error(refused)
                if error is not None and error.reason == "NOT_LEADER":
                    return
            await asyncio.sleep(0.05)

    async def stats(self) -> kvmem_pb2.PoolStats | None:
        """What the memory service says; None while it says nothing."""
        stub = kvmem_pb2_grpc.KvMemoryStub(self._channel_to("kvmem"))
        try:
            return await stub.GetPoolStats(kvmem_pb2.GetPoolStatsRequest(), timeout=LOOK_TIMEOUT_S)
        except grpc.RpcError:
            return None

    async def owner(self) -> str | None:
        """The scheduler that has the session and may write; None: none at the moment."""
        stats = await self.stats()
        if stats is None or not stats.mutations_open or stats.orphaned_ms:
            return None
        return self._by_client_address().get(stats.holder_address)

    def _by_client_address(self) -> Mapping[str, str]:
        return {self.links[name, "client"].address: name for name in SCHEDULERS}

    def standby_of(self, owner: str) -> str:
        return SCHEDULERS[1 - SCHEDULERS.index(owner)]
