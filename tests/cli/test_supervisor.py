"""The supervisor with small real processes: restart, backoff, drain, kill, and kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from octavo.cli.supervisor import (
    Backoff,
    Service,
    ServiceFailedError,
    ServiceSpec,
    ServiceState,
    Supervisor,
    SupervisorConfig,
)

SOON_S = 30.0
QUICK = SupervisorConfig(
    backoff_min_s=0.01, backoff_max_s=0.04, probe_interval_s=0.01, drain_timeout_s=SOON_S
)
SLEEP = "import time; time.sleep(600)"


class ListLog:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def write(self, service: str, line: str) -> None:
        self.lines.append((service, line))

    def of(self, service: str) -> list[str]:
        return [line for name, line in self.lines if name == service]


def python(name: str, code: str, *arguments: str, address: str | None = None) -> ServiceSpec:
    return ServiceSpec(name, (sys.executable, "-c", textwrap.dedent(code), *arguments), address)


@contextlib.asynccontextmanager
async def supervised(
    *specs: ServiceSpec, log: ListLog, config: SupervisorConfig = QUICK, **options: object
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(specs, log, env=os.environ, config=config, **options)  # type: ignore[arg-type]
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.kill()
        await supervisor.drain()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SOON_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if alive(p)]}"
        time.sleep(0.01)


def pid_of(service: Service) -> int:
    assert service.pid is not None
    return service.pid


def test_backoff_doubles_to_its_limit_and_starts_over_after_a_healthy_run() -> None:
    backoff = Backoff(min_s=0.05, max_s=5.0, reset_after_s=30.0)
    pauses = [backoff.pause_s(served_s=1.0) for _ in range(9)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert backoff.pause_s(served_s=29.9) == 5.0
    assert backoff.pause_s(served_s=30.0) == 0.05
    assert backoff.pause_s(served_s=0.0) == 0.1


def test_a_killed_service_is_started_again_and_the_others_are_left_alone() -> None:
    async def main() -> None:
        log = ListLog()
        async with supervised(python("a", SLEEP), python("b", SLEEP), log=log) as supervisor:
            await supervisor.wait_serving(SOON_S)
            a, b = supervisor.services["a"], supervisor.services["b"]
            old_a, old_b = pid_of(a), pid_of(b)
            os.kill(old_a, signal.SIGKILL)
            await until(lambda: a.num_restarts == 1 and a.state is ServiceState.SERVING)
            assert pid_of(a) != old_a
            assert (pid_of(b), b.num_restarts) == (old_b, 0)
            assert log.of("octavo") == ["a: was killed by SIGKILL; starting it again in 10 ms"]

    asyncio.run(main())


def test_a_service_that_keeps_dying_after_it_has_served_is_restarted_with_growing_pauses() -> None:
    async def main() -> None:
        log = ListLog()
        dying = python("a", "import sys, time; time.sleep(0.2); sys.exit(7)")
        async with supervised(dying, log=log) as supervisor:
            service = supervisor.services["a"]
            await until(lambda: service.num_restarts >= 4)
            assert service.state is not ServiceState.FAILED
        pauses = [line.rsplit(" in ")[-1] for line in log.of("octavo")]
        assert pauses[:4] == ["10 ms", "20 ms", "40 ms", "40 ms"]
        assert "exited with status 7" in log.of("octavo")[0]

    asyncio.run(main())


async def never(address: str) -> bool:
    return False


def test_a_service_that_exits_before_it_ever_served_is_given_up_with_its_last_words() -> None:
    async def main() -> None:
        log = ListLog()
        failing = python("a", "raise SystemExit('no such model')", address="unix:/nowhere")
        async with supervised(failing, python("b", SLEEP), log=log, probe=never) as supervisor:
            with pytest.raises(ServiceFailedError, match="a could not start: no such model"):
                await supervisor.wait_serving(SOON_S)
            assert supervisor.services["a"].state is ServiceState.FAILED
        assert log.of("a") == ["no such model"]

    asyncio.run(main())


def test_a_service_that_is_killed_before_it_ever_served_gets_a_few_tries() -> None:
    async def main() -> None:
        log = ListLog()
        killed = python("a", "import os; os.kill(os.getpid(), 9)", address="unix:/nowhere")
        async with supervised(killed, log=log, probe=never) as supervisor:
            with pytest.raises(
                ServiceFailedError, match="a could not start: was killed by SIGKILL"
            ):
                await supervisor.wait_serving(SOON_S)
            assert supervisor.services["a"].num_restarts == QUICK.max_start_deaths - 1

    asyncio.run(main())


def test_a_service_that_is_late_is_named() -> None:
    async def only_a(address: str) -> bool:
        return address == "a"

    async def main() -> None:
        specs = [python(name, SLEEP, address=name) for name in "abc"]
        async with supervised(*specs, log=ListLog(), probe=only_a) as supervisor:
            with pytest.raises(ServiceFailedError, match="b and c did not get ready"):
                await supervisor.wait_serving(0.3)

    asyncio.run(main())


def test_drain_goes_in_order_and_waits_for_each() -> None:
    code = """
        import signal, sys, time
        def stop(*_):
            print("draining", flush=True)
            time.sleep(0.2)
            print("drained", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up", flush=True)
        time.sleep(600)
    """

    async def main() -> None:
        log = ListLog()
        specs = [python(name, code) for name in ("scheduler", "worker", "kvmem")]
        async with supervised(*specs, log=log) as supervisor:
            await until(lambda: sum(line == "up" for _, line in log.lines) == 3)
            await supervisor.drain()
            assert [entry for entry in log.lines if entry[1] != "up"] == [
                (name, line)
                for name in ("scheduler", "worker", "kvmem")
                for line in ("draining", "drained")
            ]
            states = {service.state for service in supervisor.services.values()}
            assert states == {ServiceState.STOPPED}

    asyncio.run(main())


STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True);" + (
    "\ntime.sleep(600)"
)


def test_a_service_that_will_not_stop_is_killed_after_its_time() -> None:
    async def main() -> None:
        log = ListLog()
        config = SupervisorConfig(drain_timeout_s=0.2)
        async with supervised(python("a", STUBBORN), log=log, config=config) as supervisor:
            await until(lambda: log.of("a") == ["up"])
            pid = pid_of(supervisor.services["a"])
            await supervisor.drain()
            assert not alive(pid)
            assert log.of("octavo") == ["a: did not stop within 0.2 s: killing it"]

    asyncio.run(main())


def test_kill_cuts_a_drain_short() -> None:
    async def main() -> None:
        log = ListLog()
        async with supervised(python("a", STUBBORN), python("b", STUBBORN), log=log) as supervisor:
            await until(lambda: log.of("a") == log.of("b") == ["up"])
            pids = [pid_of(service) for service in supervisor.services.values()]
            draining = asyncio.create_task(supervisor.drain())
            await asyncio.sleep(0.05)
            assert all(map(alive, pids))
            supervisor.kill()
            await asyncio.wait_for(draining, SOON_S)
            assert not any(map(alive, pids))

    asyncio.run(main())


def test_what_a_service_leaves_behind_is_swept_with_it() -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        child.wait()
    """

    async def main() -> None:
        log = ListLog()
        async with supervised(python("a", code), log=log) as supervisor:
            await until(lambda: bool(log.of("a")))
            grandchild = int(log.of("a")[0])
            os.kill(pid_of(supervisor.services["a"]), signal.SIGKILL)
            await until(lambda: not alive(grandchild))

    asyncio.run(main())


def test_output_of_both_streams_is_logged_and_an_endless_line_is_cut() -> None:
    code = """
        import sys, time
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        sys.stdout.buffer.write(b"\\xff" + b"x" * 200_000 + b"\\nlast without newline")
        sys.stdout.flush()
        time.sleep(600)
    """

    async def main() -> None:
        log = ListLog()
        async with supervised(python("a", code), log=log) as supervisor:
            await until(lambda: sum(map(len, log.of("a"))) >= 200_000)
            await supervisor.drain()
        lines = log.of("a")
        assert lines[:2] == ["to stdout", "to stderr"]
        assert lines[-1] == "last without newline"
        assert len(lines) > 4
        assert "".join(lines[2:-1]) == "\N{REPLACEMENT CHARACTER}" + "x" * 200_000

    asyncio.run(main())


SUPERVISOR_SCRIPT = """
    import asyncio, os, sys
    from octavo.cli.supervisor import ServiceSpec, Supervisor

    async def main():
        up = asyncio.Semaphore(0)

        class Log:
            def write(self, service, line):
                assert line == "up", line
                up.release()

        code = (
            "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True);"
            "time.sleep(600)"
        )
        specs = [ServiceSpec(name, (sys.executable, "-c", code)) for name in "abc"]
        supervisor = Supervisor(specs, Log(), env=os.environ)
        supervisor.start()
        for _ in specs:  # all are past the shim that starts them
            await up.acquire()
        print(*(service.pid for service in supervisor.services.values()), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_kill_9_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(textwrap.dedent(SUPERVISOR_SCRIPT))
    supervisor = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pids = [int(pid) for pid in supervisor.stdout.readline().split()]
    assert len(pids) == 3
    try:
        assert all(map(alive, pids))
        supervisor.kill()
        supervisor.wait(SOON_S)
        supervisor.stdout.close()
        until_gone(pids)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
