"""`octavo up` and `octavo demo` with the real services, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from octavo import Client, SamplingParams
from octavo.cli.state import RunningStack, StateDir, StateError
from octavo.errors import OctavoError
from tests.system.models import TINY_MAX_MODEL_LEN, save_tiny_llama

SOON_S = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("models") / "tiny", max_positions=TINY_MAX_MODEL_LEN
    )


def environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_STATE", "OTEL_"))}
    return {**plain, "COLUMNS": "100"}


def octavo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo", *arguments]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Up:
    """A running `octavo up`."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        self.state = StateDir(state_dir)
        self.process = subprocess.Popen(
            octavo("up", "--state-dir", str(state_dir), "--kv-memory", "1MiB", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )

    def running(self) -> RunningStack | None:
        with contextlib.suppress(StateError):
            return self.state.running()
        return None

    def pids(self) -> dict[str, int]:
        stack = self.running()
        return {} if stack is None else dict(stack.service_pids)

    def wait_serving(self) -> RunningStack:
        until(self.serves)
        stack = self.running()
        assert stack is not None
        return stack

    def serves(self) -> bool:
        assert self.process.poll() is None, self.output()
        stack = self.running()
        if stack is None or len(stack.service_pids) < 3:
            return False
        with contextlib.suppress(OctavoError), Client(stack.scheduler) as client:
            return client.health().serving
        return False

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SOON_S)


@pytest.fixture
def start(tiny_model: Path, socket_dir: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*options: str) -> Up:
        up = Up(socket_dir, "--model", str(tiny_model), *options)
        started.append(up)
        return up

    yield start
    for up in started:
        up.process.kill()
        up.process.wait(SOON_S)
        assert up.process.stdout is not None
        up.process.stdout.close()


def generate(stack: RunningStack) -> str:
    with Client(stack.scheduler) as client:
        return client.generate("abc", GREEDY).text


def test_up_serves_restarts_what_dies_and_drains_in_order(
    start: Callable[..., Up], socket_dir: Path
) -> None:
    up = start()
    stack = up.wait_serving()
    text = generate(stack)

    second = subprocess.run(
        octavo("up", "--state-dir", str(socket_dir)),
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
        env=environment(),
    )
    assert second.returncode == 1
    assert f"already running on {socket_dir} (pid {up.process.pid})" in second.stderr

    old_pids = up.pids()
    os.kill(old_pids["worker"], signal.SIGKILL)
    until(lambda: up.pids().get("worker") not in (None, old_pids["worker"]))
    assert up.pids()["kvmem"] == old_pids["kvmem"]

    def answers_again() -> bool:
        with contextlib.suppress(OctavoError):
            return generate(stack) == text
        return False

    until(answers_again)

    pids = up.pids()
    assert up.stop() == 0
    assert all(map(gone, pids.values()))
    assert sorted(path.name for path in socket_dir.iterdir()) == ["journal", "lock", "octavo.log"]
    assert (socket_dir / "journal" / "000001.log").stat().st_size > 0
    output = up.output()
    assert "worker: was killed by SIGKILL; starting it again in 50 ms" in output
    ended = re.findall(r"^(\w+) has ended\.$", output, re.MULTILINE)
    assert ended == ["scheduler", "worker", "kvmem"]
    assert "Traceback" not in output


def test_kill_9_of_up_leaves_nothing_and_the_folder_can_be_used_again(
    start: Callable[..., Up],
) -> None:
    first = start()
    first.wait_serving()
    pids = first.pids()
    first.process.kill()
    first.process.wait(SOON_S)
    until(lambda: all(map(gone, pids.values())))
    assert first.running() is None

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    again = start("--listen", f"127.0.0.1:{port}")
    stack = again.wait_serving()
    with Client(f"127.0.0.1:{port}") as over_tcp:
        assert over_tcp.generate("abc", GREEDY).text == generate(stack)
    again.process.terminate()
    assert again.process.wait(SOON_S) == 0


def test_a_second_ctrl_c_kills_what_will_not_drain(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_serving()
    pids = up.pids()
    os.kill(pids["scheduler"], signal.SIGSTOP)  # so it cannot act on being told to stop
    up.process.send_signal(signal.SIGINT)
    assert up.process.stdout is not None
    while "Stopping." not in up.process.stdout.readline():
        pass
    assert not gone(pids["worker"])
    assert up.stop() == 130
    assert all(map(gone, pids.values()))


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_model_that_is_not_there_is_one_sentence(
    command: str, tmp_path: Path, socket_dir: Path
) -> None:
    done = subprocess.run(
        octavo(command, "--model", str(tmp_path / "nowhere")),
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
        env={**environment(), "OCTAVO_STATE_DIR": str(socket_dir)},
    )
    assert done.returncode == 1
    assert "error: the model cannot be prepared: " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_pool_that_is_too_small_is_told_in_the_workers_words(start: Callable[..., Up]) -> None:
    up = start("--kv-memory", "1KiB")
    assert up.process.wait(SOON_S) == 1
    output = up.output()
    assert "error: worker could not start: " in output
    assert "1.0 KiB" in output or "--kv-memory" in output
    assert "Traceback" not in output


def run_demo(folder: Path, *options: str) -> str:
    """The demo's output, on one line."""
    done = subprocess.run(
        octavo("demo", *options),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**environment(), "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("octavo-demo-*")) == []
    return " ".join(done.stdout.split())


def check_the_demo(out: str) -> None:
    """What it says of blocks and spans is complete, and its numbers agree with one another."""
    (src, dst) = re.findall(r"copied on write: block (\d+) → block (\d+)", out)[0]
    assert f"block {dst} copied from block {src}" in out
    assert f"block {src} the original" in out
    shared = re.findall(r"block (\d+) shared, ref_count 2", out)
    assert shared
    assert shared[0::2] == shared[1::2]
    physical, logical = re.findall(r"(\d+) physical blocks instead of (\d+)", out)[0]
    assert int(logical) - int(physical) == len(shared) / 2
    after = re.findall(r"after │ (\d+) │ (\d+) │ (\d+) │ (\d+) │ (\d+)", out)[0]
    free, cached, in_use, _, total = map(int, after)
    assert (free + cached, in_use) == (total, 0)
    assert cached > 0
    assert "No span of" not in out
    assert all(name in out for name in ("scheduler.generate", "kvmem.arrive", "worker.prefill"))
    assert all(name in out for name in ("scheduler.step", "kvmem.apply", "worker.execute"))
    assert "none of the 3 processes and none of their 3 sockets is left" in out


def test_the_demo_with_a_model_that_has_no_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    out = run_demo(tmp_path, "--model", str(tiny_model), "--kv-memory", "1MiB")
    check_the_demo(out)


@pytest.mark.model
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    out = run_demo(tmp_path)
    assert "The capital of France is Paris" in out
    assert out.count("shared, ref_count 2") == 4
    check_the_demo(out)


@pytest.mark.model
def test_the_demo_interrupted_stops_everything(tmp_path: Path) -> None:
    with subprocess.Popen(
        octavo("demo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    ) as demo:
        assert demo.stdout is not None
        while "Starting the services" not in demo.stdout.readline():
            pass
        (state_dir,) = tmp_path.glob("octavo-demo-*")
        until(lambda: len(_service_pids(state_dir)) == 3)
        pids = _service_pids(state_dir)
        demo.send_signal(signal.SIGINT)
        output = demo.stdout.read()
        assert demo.wait(SOON_S) == 130
    assert all(map(gone, pids.values()))
    assert "Stopping everything." in output
    assert "Traceback" not in output
    assert list(tmp_path.glob("octavo-demo-*")) == []


def _service_pids(state_dir: Path) -> dict[str, int]:
    try:
        return json.loads((state_dir / "state.json").read_text())["service_pids"]
    except (OSError, ValueError):
        return {}
