"""Runs a set of services: starts them, restarts what dies, drains them in order.

Every service has a process group of its own, so that Ctrl-C in the terminal reaches the
supervisor alone, and dies with the supervisor, however that dies (see `child.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

CHILD_SCRIPT = Path(__file__).with_name("child.py")
MAX_LINE_BYTES = 64 * 1024
PROBE_TIMEOUT_S = 2.0
# A process that left the group may hold the pipe of a dead service open for ever.
OUTPUT_GRACE_S = 1.0


class ServiceFailedError(Exception):
    """A service cannot be brought up; the message is one sentence for a person."""


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting to restart"
    STOPPED = "stopped"
    FAILED = "failed"


class LogSink(Protocol):
    def write(self, service: str, line: str) -> None: ...


Probe = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True)
class ServiceSpec:
    """One service to run. address: where its health is asked for; None: running is serving."""

    name: str
    command: tuple[str, ...]
    address: str | None = None


@dataclass(frozen=True)
class SupervisorConfig:
    """How patient the supervisor is.

    backoff_*: pause before a restart, doubling.
    healthy_reset_s: time in service after which that starts over.
    max_start_deaths: deaths by a signal, before the first time in service, that make the
        supervisor give up.
    drain_timeout_s: for each service; then it is killed.
    """

    backoff_min_s: float = 0.05
    backoff_max_s: float = 5.0
    healthy_reset_s: float = 30.0
    max_start_deaths: int = 3
    drain_timeout_s: float = 40.0
    probe_interval_s: float = 0.1


@dataclass
class Backoff:
    """The pause before the next restart."""

    min_s: float
    max_s: float
    reset_after_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.min_s

    def pause_s(self, served_s: float) -> float:
        """How long to wait now, after a run that was in service for `served_s` seconds."""
        if served_s >= self.reset_after_s:
            self._next_s = self.min_s
        pause_s = self._next_s
        self._next_s = min(self._next_s * 2, self.max_s)
        return pause_s


async def grpc_health(address: str) -> bool:
    """Whether the server at `address` says SERVING of itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


class Service:
    """One supervised service: its process, one after another, and what is known of it."""

    def __init__(self, spec: ServiceSpec, supervisor: Supervisor) -> None:
        config = supervisor.config
        self.spec = spec
        self.state = ServiceState.STARTING
        self.pid: int | None = None
        self.num_restarts = 0
        self._supervisor = supervisor
        self._backoff = Backoff(config.backoff_min_s, config.backoff_max_s, config.healthy_reset_s)
        self._stopping = asyncio.Event()
        self._served_since: float | None = None
        self._ever_served = False
        self._last_line = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"supervise {self.spec.name}")

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL when it takes longer than timeout_s. Returns when it is gone."""
        self._stopping.set()
        if self._task is None:
            return
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done:
            self._note(f"did not stop within {timeout_s:g} s: killing it")
            self.kill()
        await self._task

    def kill(self) -> None:
        """SIGKILL to its whole process group, and no restart."""
        self._stopping.set()
        if self.pid is not None:
            _kill_group(self.pid)

    async def _run(self) -> None:
        num_deaths = 0
        while not self._stopping.is_set():
            code = await self._run_once()
            if self._stopping.is_set():
                break
            num_deaths += 1
            if not self._ever_served and self._is_hopeless(code, num_deaths):
                self._set_state(ServiceState.FAILED)
                why = self._last_line or how_it_ended(code)
                self._supervisor.give_up(f"{self.spec.name} could not start: {why}")
                return
            served_s = 0.0 if self._served_since is None else _now_s() - self._served_since
            pause_s = self._backoff.pause_s(served_s)
            self._set_state(ServiceState.WAITING)
            self._note(f"{how_it_ended(code)}; starting it again in {pause_s * 1000:.0f} ms")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            self.num_restarts += 1
        self._set_state(ServiceState.STOPPED)

    def _is_hopeless(self, code: int, num_deaths: int) -> bool:
        """Whether to give up a service that has never been in service. One that exits by itself
        has said why, and would say it again; one that is killed may have better luck."""
        return code >= 0 or num_deaths >= self._supervisor.config.max_start_deaths

    async def _run_once(self) -> int:
        """One process from start to end; its exit status, or less its signal's number."""
        self._served_since = None
        self._last_line = ""
        self._set_state(ServiceState.STARTING)
        process = self._spawn()
        self.pid = process.pid
        reading = asyncio.create_task(self._read(await _reader_of(process)))
        watching = asyncio.create_task(self._watch_health())
        try:
            # Not asyncio's own subprocess: its wait() lasts until the pipe is closed as well,
            # and a grandchild may hold that open for ever.
            code = await asyncio.to_thread(process.wait)
        finally:
            watching.cancel()
            _kill_group(process.pid)
            self.pid = None
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await _finish(reading, OUTPUT_GRACE_S)
        return code

    def _spawn(self) -> subprocess.Popen[bytes]:
        shim = (sys.executable, "-I", "-S", str(CHILD_SCRIPT), str(os.getpid()))
        return subprocess.Popen(
            (*shim, *self.spec.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self._supervisor.env),
            process_group=0,
        )

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Hand its output to the log line by line; overlong lines are cut into pieces."""
        pending = b""
        while piece := await stream.read(MAX_LINE_BYTES):
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                self._log(line)
            if len(pending) >= MAX_LINE_BYTES:
                self._log(pending)
                pending = b""
        if pending:
            self._log(pending)

    async def _watch_health(self) -> None:
        while True:
            address = self.spec.address
            serving = address is None or await self._supervisor.probe(address)
            if serving and self._served_since is None:
                self._served_since = _now_s()
                self._ever_served = True
            self._set_state(ServiceState.SERVING if serving else ServiceState.STARTING)
            interval_s = self._supervisor.config.probe_interval_s
            await asyncio.sleep(interval_s * 20 if serving else interval_s)

    def _set_state(self, state: ServiceState) -> None:
        if state is not self.state:
            self.state = state
            self._supervisor.changed()

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self._last_line = text or self._last_line
        self._supervisor.log.write(self.spec.name, text)

    def _note(self, message: str) -> None:
        self._supervisor.log.write("octavo", f"{self.spec.name}: {message}")


class Supervisor:
    """Runs services side by side. The order of `specs` is the order in which they drain."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        log: LogSink,
        *,
        env: Mapping[str, str],
        config: SupervisorConfig | None = None,
        probe: Probe = grpc_health,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config or SupervisorConfig()
        self.log = log
        self.env = env
        self.probe = probe
        self.services = {spec.name: Service(spec, self) for spec in specs}
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._failure: str | None = None

    def start(self) -> None:
        """Start all of them. Call it from the main thread: they die with the calling thread."""
        for service in self.services.values():
            service.start()

    @property
    def all_serving(self) -> bool:
        return all(s.state is ServiceState.SERVING for s in self.services.values())

    async def wait_serving(
        self, timeout_s: float, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Return when every service serves; `on_change` is called at every change until then.

        Raises ServiceFailedError when that cannot be.
        """

        def all_serving() -> bool:
            on_change()
            return self.all_serving

        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for(all_serving)
        except TimeoutError:
            late = [n for n, s in self.services.items() if s.state is not ServiceState.SERVING]
            raise ServiceFailedError(
                f"{' and '.join(late)} did not get ready within {timeout_s:g} s"
            ) from None

    async def wait_failed(self) -> None:
        """Return never; raises ServiceFailedError when a service cannot be brought up."""
        await self._wait_for(lambda: False)

    async def drain(self, on_stopped: Callable[[str], None] = lambda _: None) -> None:
        """Stop the services one after the other, each when the one before it is gone."""
        for name, service in self.services.items():
            await service.stop(self.config.drain_timeout_s)
            on_stopped(name)

    def kill(self) -> None:
        """Kill all of them at once; `drain` then returns at once."""
        for service in self.services.values():
            service.kill()

    def give_up(self, why: str) -> None:
        """What a service calls when it cannot be brought up."""
        self._failure = self._failure or why
        self.changed()

    def changed(self) -> None:
        """What a service calls when its state has changed."""
        self._changed.set()
        self._on_change()

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure is not None:
                raise ServiceFailedError(self._failure)
            self._changed.clear()
            await self._changed.wait()


async def _reader_of(process: subprocess.Popen[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    return reader


async def _finish(task: asyncio.Task[None], timeout_s: float) -> None:
    """Wait for `task`, but not for longer than timeout_s."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(task, timeout_s)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _now_s() -> float:
    return time.monotonic()
