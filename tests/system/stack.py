"""The three services as real processes on unix sockets, and their ends guaranteed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.proxy import OnRequest, Proxy
from octavo import Client
from octavo.admin import KvMemoryInspector
from octavo.admin_types import PoolStats
from octavo.cli import child
from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2, inference_pb2_grpc, kvmem_pb2, kvmem_pb2_grpc

REPOSITORY = Path(__file__).parents[2]
# What a hung service costs a test; nothing that works comes near it.
PATIENCE_S = 60.0
RESULT_TTL_S = 20
NAMES = ("kvmem", "worker", "scheduler")
# One more scheduler, when it is started.
STANDBY = "standby"
# What a proxy can stand before: the callers' way to the scheduler, and its own to its peers.
LINKS = {"client": "scheduler", "kvmem": "kvmem", "worker": "worker"}
LOG_TAIL_BYTES = 3000

# Every stack that has processes; the report of a failed test shows their logs.
RUNNING: list[Stack] = []


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until `condition()`; AssertionError naming `what` when it never comes true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.02)


class Stack:
    """kvmem, worker and scheduler with sockets and logs in a short folder of their own."""

    def __init__(
        self,
        *,
        model: Path | None = None,
        num_blocks: int = 256,
        worker: tuple[str, ...] = (),
        kvmem: tuple[str, ...] = (),
        scheduler: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        journal: bool = False,
        proxies: bool = False,
    ) -> None:
        """`model` None: the demo model. The three tuples are further command line options.

        journal: kvmem keeps one, in `journal_folder`. proxies: a `Link` stands before every
        connection of the scheduler, in `links`.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="oct-")
        self.folder = Path(self._folder.name)
        self.journal_folder = self.folder / "journal"
        self.addresses = {name: f"unix:{self.folder}/{name}.sock" for name in (*NAMES, STANDBY)}
        self.links: dict[str, Link] = {}
        if proxies:
            self.links = {
                name: Link(f"unix:{self.folder}/{name}-link.sock", self.addresses[target])
                for name, target in LINKS.items()
            }
        self._arguments = {
            "kvmem": (
                "kvmem_svc",
                *((f"--journal={self.journal_folder}",) if journal else ()),
                *kvmem,
            ),
            "worker": (
                "model_worker",
                f"--num-blocks={num_blocks}",
                *((f"--model={model}",) if model else ()),
                *worker,
            ),
            "scheduler": (
                "scheduler_svc",
                f"--kvmem={self._reached_at('kvmem')}",
                f"--worker={self._reached_at('worker')}",
                # A caller that has everything may be the last to know of a scheduler's death: the
                # result waits for it, and less long than a test does for an empty pool.
                f"--result-ttl-s={RESULT_TTL_S}",
                *scheduler,
            ),
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "OCTAVO_"))}
        if cache := os.environ.get("OCTAVO_CACHE"):
            inherited["OCTAVO_CACHE"] = cache
        self._environment = {**inherited, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._channels: list[grpc.Channel] = []

    def _reached_at(self, link: str) -> str:
        """Where the caller of a link connects to."""
        return self.links[link].address if self.links else self.addresses[LINKS[link]]

    # ---- processes ----

    def start(self, *names: str) -> None:
        """Start these processes, by default all; does not wait for them."""
        for name in names or NAMES:
            self.start_as(name, name, self.addresses[name])

    def start_as(self, name: str, kind: str, address: str) -> None:
        """Start one more process of a kind, under a name and at an address of its own."""
        self._start(name, kind, address)

    def _start(self, name: str, kind: str, address: str, *, direct: bool = False) -> None:
        assert name not in self.processes, f"{name} runs already"
        module, *options = self._arguments[kind]
        if direct:
            options += [
                f"--kvmem={self.addresses['kvmem']}",
                f"--worker={self.addresses['worker']}",
            ]
        command = [
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *(sys.executable, "-m", module, f"--address={address}", *options),
        ]
        with self.log_path(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=REPOSITORY, env=self._environment
            )
        if not any(stack is self for stack in RUNNING):
            RUNNING.append(self)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one process, wait for its end, and return its exit status."""
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            return process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def start_standby(self, *, direct: bool = False) -> None:
        """Start a second scheduler, and wait until it stands by. `direct`: the faults of the
        first one's links are not its own."""
        self._start(STANDBY, "scheduler", self.addresses[STANDBY], direct=direct)
        wait_until(lambda: self.stands_by(STANDBY), "the second scheduler stands by")

    def stands_by(self, name: str) -> bool:
        """Whether this scheduler says that another one has the requests."""
        # The SDK would go where it says.
        with grpc.insecure_channel(self.addresses[name], CHANNEL_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                stub.GetModel(inference_pb2.GetModelRequest(), timeout=5)
            except grpc.RpcError as refused:
                error = ServiceError.from_rpc_error(refused)
                return error is not None and error.reason == "NOT_LEADER"
        return False

    def pause(self, name: str) -> None:
        """Stop a process where it is: it says and closes nothing."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def delete_journal(self) -> None:
        """What kvmem had journalled is lost; it must not run."""
        assert "kvmem" not in self.processes
        shutil.rmtree(self.journal_folder)

    def stop(self) -> None:
        """End what runs, by pid, and remove the folder."""
        for channel in self._channels:
            channel.close()
        for process in self.processes.values():
            # SIGKILL ends a stopped process too.
            process.kill()
        for process in self.processes.values():
            process.wait(PATIENCE_S)
        self.processes.clear()
        for link in self.links.values():
            link.close()
        RUNNING[:] = [stack for stack in RUNNING if stack is not self]
        self._folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_serving()
        except BaseException:
            logs = self.logs()
            self.stop()
            print(logs, file=sys.stderr)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- health ----

    def is_serving(self, name: str = "scheduler") -> bool:
        """What the process says of itself; False when nobody answers."""
        with grpc.insecure_channel(self.addresses[name], CHANNEL_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            except grpc.RpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_serving(self) -> None:
        """Until the scheduler serves; AssertionError as soon as a process has died."""

        def is_serving_or_dead() -> bool:
            for name, process in self.processes.items():
                status = process.poll()
                assert status is None, f"{name} ended with {status}:\n{self.logs()}"
            return self.is_serving()

        wait_until(is_serving_or_dead, "the scheduler serves", 2 * PATIENCE_S)

    # ---- looking in ----

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        """The end of every process's log."""
        parts = []
        for name in (*NAMES, STANDBY):
            if self.log_path(name).is_file():
                tail = self.log_path(name).read_bytes()[-LOG_TAIL_BYTES:]
                status = "gone" if name not in self.processes else self.processes[name].poll()
                parts.append(
                    f"--- {name} (exit status {status}) ---\n{tail.decode(errors='replace')}"
                )
        return "\n".join(parts)

    @property
    def address(self) -> str:
        """Of the public service."""
        return self._reached_at("client")

    def channel(self) -> grpc.Channel:
        """A raw channel to the scheduler, closed with the stack."""
        channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
        self._channels.append(channel)
        return channel

    def client(self) -> Client:
        return Client(self.address)

    def inspector(self) -> KvMemoryInspector:
        return KvMemoryInspector(self.addresses["kvmem"])

    def pool_stats(self) -> PoolStats:
        with self.inspector() as inspector:
            return inspector.pool_stats()

    def session_stats(self) -> kvmem_pb2.PoolStats:
        """What the memory service says of its session and life, beside the pool."""
        with grpc.insecure_channel(self.addresses["kvmem"], CHANNEL_OPTIONS) as channel:
            stub = kvmem_pb2_grpc.KvMemoryStub(channel)
            return stub.GetPoolStats(kvmem_pb2.GetPoolStatsRequest(), timeout=5)

    def wait_until_empty(self) -> PoolStats:
        """Until nothing of any request is left in the memory service, and the books balance."""
        wait_until(lambda: is_empty(self.pool_stats()), "the pool is empty")
        stats = self.pool_stats()
        assert is_empty(stats), stats
        return stats


class Link:
    """A `Proxy` on an event loop of its own, so that a test on any thread can break it."""

    def __init__(self, address: str, target: str) -> None:
        self.address = address
        self._proxy = Proxy(address, target)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._proxy.start())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def _call(self, call: Callable[[], None]) -> None:
        async def calling() -> None:
            call()

        self._run(calling())

    def cut(self) -> None:
        self._call(self._proxy.cut)

    def refuse(self) -> None:
        self._call(self._proxy.refuse)

    def silence(self) -> None:
        self._call(self._proxy.silence)

    def heal(self) -> None:
        self._proxy.on_request = None
        self._call(self._proxy.heal)

    def keep_replies_once(self, is_that: Callable[[bytes], bool]) -> threading.Event:
        """From the request on of which this is true its replies stay in the proxy, as do all
        that come after. The event is set once that request has come by."""
        seen = threading.Event()

        def look(data: bytes) -> None:
            if is_that(data):
                self._proxy.silence(requests=False)
                seen.set()

        on_request: OnRequest = look
        self._proxy.on_request = on_request
        return seen

    def close(self) -> None:
        self._run(self._proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


def is_empty(stats: PoolStats) -> bool:
    """No request, no sequence, and no block that anybody holds."""
    levels = stats.levels
    assert stats.geometry is not None
    accounted = (
        levels.num_free_blocks
        + levels.num_cached_blocks
        + levels.num_in_use_blocks
        + levels.num_quarantined_blocks
        + levels.num_reserved_blocks
    )
    assert accounted == stats.geometry.num_blocks, stats
    return (
        stats.num_requests == stats.num_sequences == 0
        and levels.num_in_use_blocks == levels.num_quarantined_blocks == 0
        and levels.num_unused_blocks == stats.geometry.num_blocks
    )
