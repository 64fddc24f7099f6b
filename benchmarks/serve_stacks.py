"""The sides of the serving benchmark: the three processes, the same cores in one, the bare runner.

All are up at the same time, and only the one that is measured has work. Each side has a pool of as
many blocks, no host tier, and the prefix cache on. The three processes keep a journal, as those of
`octavo up` do; in one process there is none, since nothing of it survives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from model_worker.threads import WAITING
from octavo import Client, OctavoError
from octavo.cli import child

READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
# No phase takes longer on a machine that the benchmark says anything about.
PHASE_TIMEOUT_S = 300.0
WRITE_TIMEOUT_S = 30.0


class Failed(Exception):
    """A process did not do its part; with the end of what it said."""


class Process:
    """`python -m module args`, which dies with this process; its log in a file."""

    def __init__(self, folder: Path, name: str, module: str, *args: str) -> None:
        self.name = name
        self._log_path = folder / f"{name}.log"
        with self._log_path.open("wb") as log:
            self._child = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
                    *(sys.executable, "-m", module, *args),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **WAITING},
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def check(self) -> None:
        """Raises Failed when it has ended."""
        if self._child.poll() is not None:
            raise self.failed(f"ended with status {self._child.returncode}")

    def failed(self, what: str) -> Failed:
        return Failed(f"{self.name} {what}:\n{self._log_path.read_text()[-2000:]}")

    def tell(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def read(self, timeout_s: float) -> dict[str, float]:
        """The next line of JSON on its stdout; afterwards it is killed, if there is none."""
        assert self._child.stdout is not None
        watchdog = threading.Timer(timeout_s, self._child.kill)
        watchdog.start()
        try:
            line = self._child.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise self.failed(f"said nothing within {timeout_s:.0f} s")
        return json.loads(line)

    def cpu_s(self) -> float:
        """CPU it has used, of all its threads."""
        times = psutil.Process(self._child.pid).cpu_times()
        return times.user + times.system


class Sides:
    """All processes, up and serving."""

    def __init__(self, folder: Path, processes: dict[str, Process]) -> None:
        self._folder = folder
        self._processes = processes
        self._num_recordings = 0

    def address(self, side: str) -> str:
        """Of the public service of `split` or `one`."""
        return f"unix:{self._folder}/{side}.sock"

    def control_cpu_s(self) -> float:
        """CPU that the scheduler and the memory service have used."""
        return self._processes["split"].cpu_s() + self._processes["kvmem"].cpu_s()

    def take_recording(self) -> Path:
        """The steps the worker has been given since the last time."""
        self._num_recordings += 1
        path = self._folder / f"steps-{self._num_recordings}.pickle"
        self._processes["worker"].tell(str(path))
        deadline_s = time.monotonic() + WRITE_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise self._processes["worker"].failed("wrote no recording")
            time.sleep(0.02)
        return path

    def replay(self, recording: Path) -> dict[str, float]:
        """What the bare runner says of executing a recording."""
        self._processes["bare"].tell(str(recording))
        return self._processes["bare"].read(PHASE_TIMEOUT_S)


@contextmanager
def sides(folder: Path, model: str, num_blocks: int) -> Iterator[Sides]:
    """All of them, until the block ends. Raises Failed."""
    address = {name: f"unix:{folder}/{name}.sock" for name in ("kvmem", "worker", "split", "one")}
    size = ("--model", model, "--num-blocks", str(num_blocks))
    peers = ("--kvmem", address["kvmem"], "--worker", address["worker"])
    journal = ("--journal", str(folder / "journal"))
    commands = {
        "kvmem": ("kvmem_svc", "--address", address["kvmem"], *journal),
        "worker": ("benchmarks.recording_worker", "--address", address["worker"], *size),
        "split": ("scheduler_svc", "--address", address["split"], *peers),
        "one": ("benchmarks.one_process", "--address", address["one"], *size),
        "bare": ("benchmarks.bare", *size),
    }
    with ExitStack() as running:
        processes = {
            name: running.enter_context(Process(folder, name, *command))
            for name, command in commands.items()
        }
        for name in ("split", "one"):
            wait_until_serving(address[name], list(processes.values()))
        processes["bare"].read(READY_TIMEOUT_S)
        yield Sides(folder, processes)


def wait_until_serving(address: str, processes: list[Process]) -> None:
    """Poll health. Raises Failed as soon as one of the processes has ended."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(address) as client:
        while time.monotonic() < deadline:
            for process in processes:
                process.check()
            try:
                if client.health().serving:
                    return
            except OctavoError:
                pass
            time.sleep(0.2)
    raise Failed(f"{address} did not come up within {READY_TIMEOUT_S:.0f} s")


def run_module(module: str, *args: str) -> dict[str, float]:
    """The last line of `python -m module args`, which is JSON. Raises Failed."""
    command = [sys.executable, "-m", module, *args]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=PHASE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{module}: not within {PHASE_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise Failed(f"{module}: {error.stderr[-2000:]}") from error
    return json.loads(done.stdout.splitlines()[-1])
