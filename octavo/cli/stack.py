"""The three services as one stack: made ready, started, supervised, drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.cli.merged_log import MergedLog
from octavo.cli.state import SERVICES, RunningStack, StateDir
from octavo.cli.supervisor import CHILD_SCRIPT, ServiceSpec, Supervisor, SupervisorConfig

READY_TIMEOUT_S = 600.0
KILLED_EXIT_CODE = 130

# Called with what is being done and the fraction of it that is done, 0 to 1.
Progress = Callable[[str, float], None]


class StackError(Exception):
    """The stack cannot be brought up; one sentence for a person."""


@dataclass(frozen=True)
class StackOptions:
    """What `octavo up` can be told. Empty and None: the service's own default."""

    model: str = ""
    kv_memory: str | None = None
    swap_space: str | None = None
    listen: str | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    log_level: str | None = None
    api_keys: Path | None = None


def service_specs(
    options: StackOptions, model_path: str, addresses: Mapping[str, str], journal: Path
) -> list[ServiceSpec]:
    """The commands of the three services, in the order in which they are to drain."""
    limits = [
        *_given("--max-num-batched-tokens", options.max_num_batched_tokens),
        *_given("--max-num-seqs", options.max_num_seqs),
    ]
    scheduler = [
        *("--address", addresses["scheduler"]),
        *(("--address", options.listen) if options.listen else ()),
        *("--kvmem", addresses["kvmem"], "--worker", addresses["worker"]),
        *limits,
        *_given("--api-keys", options.api_keys and options.api_keys.absolute()),
    ]
    worker = [
        *("--address", addresses["worker"], "--model", model_path),
        *_given("--kv-memory", options.kv_memory),
        *_given("--swap-space", options.swap_space),
        *limits,
    ]
    kvmem = ["--address", addresses["kvmem"], "--journal", str(journal)]
    common = _given("--log-level", options.log_level)
    modules = {"scheduler": "scheduler_svc", "worker": "model_worker", "kvmem": "kvmem_svc"}
    arguments = {"scheduler": scheduler, "worker": worker, "kvmem": kvmem}
    return [
        ServiceSpec(
            name,
            (sys.executable, "-m", modules[name], *arguments[name], *common),
            addresses[name],
        )
        for name in SERVICES
    ]


def _given(option: str, value: object) -> tuple[str, ...]:
    return () if value is None else (option, str(value))


async def prepare_model(
    model: str, progress: Progress, log: MergedLog, env: Mapping[str, str]
) -> str:
    """Fetch or convert the model; the folder it is in. Raises StackError."""
    arguments = ("-m", "model_worker.prepare", *(("--model", model) if model else ()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(CHILD_SCRIPT), str(os.getpid())),
        *(sys.executable, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(env),
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    logging = asyncio.create_task(_log_lines(process.stderr, log))
    said: dict[str, object] = {}
    try:
        async for line in process.stdout:
            said = _json_object(line)
            if "stage" in said:
                progress(str(said["stage"]), float(str(said.get("fraction", 0))))
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await logging
    if status == 0 and "path" in said:
        return str(said["path"])
    why = said.get("error") or f"the preparation exited with status {status}"
    raise StackError(f"the model cannot be prepared: {why}")


async def _log_lines(stream: asyncio.StreamReader, log: MergedLog) -> None:
    async for line in stream:
        log.write("prepare", line.decode("utf-8", "replace").rstrip())


def _json_object(line: bytes) -> dict[str, object]:
    try:
        read = json.loads(line)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


class Stack:
    """The services on one state folder, whose lock the caller holds."""

    def __init__(
        self,
        state: StateDir,
        options: StackOptions,
        log: MergedLog,
        *,
        env: Mapping[str, str],
        config: SupervisorConfig | None = None,
    ) -> None:
        """Raises StateError when the folder has no room for sockets."""
        self.addresses = state.addresses()
        self.options = options
        self.log = log
        self.env = {**env, "PYTHONUNBUFFERED": "1"}
        self.supervisor: Supervisor | None = None
        self._state = state
        self._config = config
        self._model_path = ""

    async def prepare(self, progress: Progress) -> str:
        """Make the model ready; its folder. Raises StackError."""
        return await prepare_model(self.options.model, progress, self.log, self.env)

    def launch(self, model_path: str) -> Supervisor:
        """Start the three services and keep `state.json` true of them."""
        self._model_path = model_path
        self.supervisor = Supervisor(
            service_specs(self.options, model_path, self.addresses, self._state.journal_path),
            self.log,
            env=self.env,
            config=self._config,
            on_change=self._write_state,
        )
        self.supervisor.start()
        return self.supervisor

    def pids(self) -> dict[str, int]:
        """The services' processes that run at this moment."""
        services = {} if self.supervisor is None else self.supervisor.services
        return {name: s.pid for name, s in services.items() if s.pid is not None}

    async def drain(self, on_stopped: Callable[[str], None]) -> None:
        """Stop everything in order; returns when no process and no socket is left."""
        if self.supervisor is not None:
            await self.supervisor.drain(on_stopped)
        for address in self.addresses.values():
            # A service that was killed leaves its socket behind.
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)
        self._state.discard_short_folder()

    def kill(self) -> None:
        """Kill everything at once; a drain under way then ends."""
        if self.supervisor is not None:
            self.supervisor.kill()

    def _write_state(self) -> None:
        self._state.write(
            RunningStack(
                pid=os.getpid(),
                created_at=psutil.Process().create_time(),
                model=self._model_path,
                addresses=self.addresses,
                listen=self.options.listen,
                service_pids=self.pids(),
            )
        )


async def run_stack(
    stack: Stack,
    body: Callable[[], Awaitable[None]],
    on_stopping: Callable[[], None],
    on_stopped: Callable[[str], None],
) -> int:
    """Run `body`, which brings the stack up and uses it, then drain; the exit status.

    SIGINT, SIGTERM and SIGHUP end the body and drain; the next one kills. Raises what the body
    raised, once everything is stopped. `on_stopped` is called with each service that has ended.
    """
    told = _Signals()
    running = asyncio.ensure_future(body())
    first = asyncio.create_task(told.first.wait())
    try:
        await asyncio.wait({running, first}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        first.cancel()
        running.cancel()
        on_stopping()
        killing = asyncio.create_task(_kill_on(told.second, stack))
        await asyncio.wait({running})
        await stack.drain(on_stopped)
        killing.cancel()
        told.close()
    if not running.cancelled() and (error := running.exception()) is not None:
        raise error
    return KILLED_EXIT_CODE if told.second.is_set() else 0


async def _kill_on(told: asyncio.Event, stack: Stack) -> None:
    await told.wait()
    stack.kill()


class _Signals:
    """The first and the second signal that ask for an end."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in self.NUMBERS:
            self._loop.add_signal_handler(number, self._note)

    def close(self) -> None:
        for number in self.NUMBERS:
            self._loop.remove_signal_handler(number)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
