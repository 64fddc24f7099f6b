"""One simulated world: built from a seed, run to its end, judged."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from scheduler_svc.core.params import SamplingParams
from simulator.callers import Caller, Callers
from simulator.checkers import Checks, check_empty
from simulator.clock import MS, SECOND, Clock
from simulator.faults import FaultInjector, FaultPlan
from simulator.history import History
from simulator.knobs import Knobs
from simulator.kvmem_shell import KvmemShell
from simulator.marks import Marks
from simulator.messages import Generate
from simulator.network import Network
from simulator.operator import Operator, draw_errands
from simulator.process import Process, Surroundings
from simulator.promises import Promise
from simulator.scheduler_shell import SchedulerShell
from simulator.worker import Violation, expect
from simulator.worker_shell import WorkerShell
from simulator.workload import Script, Workload

# After the last fault everything must come to its end within this time. A bug that stops
# progress shows as this limit.
SETTLE_US = 300 * SECOND
MAX_EVENTS = 400_000


@dataclass(frozen=True)
class Outcome:
    """What became of one seed. `violation`: "" or the check and what it saw."""

    seed: int
    digest: str
    num_requests: int
    marks: dict[str, int]
    check: str = ""
    violation: str = ""
    lines: list[str] = field(default_factory=list, repr=False)


class World:
    """All processes of one seed and what they share."""

    def __init__(self, seed: int, promise: Promise | None = None, *, keep_history: bool) -> None:
        draw = Random(seed)
        knobs = Knobs.draw(draw)
        workload = Workload.draw(draw, knobs)
        if promise is None:
            plan = FaultPlan.draw(draw, knobs, workload.busy_us, workload.horizon_us)
        else:
            knobs, workload = promise.knobs(knobs), promise.workload(workload)
            plan = promise.plan(draw, workload)
        self.seed = seed
        self.promise = promise
        self.clock = Clock()
        self.history = History(self.clock, keep=keep_history)
        self.marks = Marks()
        network = Network(self.clock, draw, knobs.keepalive_us, self.history, self.marks)
        self.surroundings = world = Surroundings(
            knobs, draw, network, self.history, self.marks, Checks(self.marks)
        )
        self.kvmem = KvmemShell(world)
        self.worker = WorkerShell(world, self.kvmem)
        self.schedulers = [
            SchedulerShell(f"scheduler-{i}", world, self.kvmem, self.worker)
            for i in range(knobs.num_schedulers)
        ]
        self.callers = Callers(world, self.schedulers, calm=plan.calm)
        self.operator = Operator(world, self.kvmem, draw_errands(draw, knobs, workload))
        self._plan = plan
        self._workload = workload
        self.history.note("world", f"seed {seed}, theme {knobs.theme.name}: {knobs}")
        self.history.note("world", f"{plan}")

    # ---- running ----

    def run(self) -> Outcome:
        """Play everything; a violation ends the world where it happens."""
        check = violation = ""
        try:
            self._play()
        except Violation as found:
            check, violation = found.check, found.message
        except Exception as error:
            check, violation = _in_core(error)
        if violation:
            self.history.note("VIOLATION", f"{check}: {violation}")
        return Outcome(
            self.seed,
            self.history.digest,
            self.callers.num_requests,
            self.marks.counts,
            check,
            violation,
            self.history.lines,
        )

    def _play(self) -> None:
        draw = self.surroundings.draw
        self.callers.start()
        self.operator.start()
        for scheduler in self.schedulers:
            scheduler.start()
        for peer in (self.kvmem, self.worker):
            self.clock.at(draw.randint(0, 20 * MS), partial(self._start, peer))
        injector = FaultInjector(
            self.surroundings,
            self._plan,
            self.kvmem,
            {
                "scheduler": list(self.schedulers),
                "kvmem": [self.kvmem],
                "worker": [self.worker],
                "callers": [self.callers],
            },
        )
        injector.schedule()
        for script in self._workload.scripts:
            self.callers.add(script)
        self._run_until(self._all_quiet, "everything comes to an end")
        if self.promise is not None:
            self.promise.check(self.callers.callers)
        self._probe()

    @staticmethod
    def _start(process: Process) -> None:
        if not process.alive:
            process.start()

    def _all_quiet(self) -> bool:
        return (
            self.clock.now_us > self._plan.stop_us and self.callers.all_done and self._one_at_rest()
        )

    def _one_at_rest(self) -> bool:
        """The one that has the session has nothing to do. Another may not know yet that it has
        not: with nothing to do it does not ask."""
        session = self.kvmem.memory.ledger.session
        holders = [s for s in self.schedulers if session and s.holds(session.session_id)]
        return len(holders) == 1 and holders[0].at_rest

    def _run_until(self, reached: object, promise: str) -> None:
        assert callable(reached)
        deadline_us = max(self.clock.now_us, self._plan.stop_us) + SETTLE_US
        while not reached():
            more = self.clock.run_next()
            in_time = self.clock.now_us < deadline_us and self.clock.num_events < MAX_EVENTS
            if not (more and in_time):
                raise Violation(promise, self._what_is_left())

    def _what_is_left(self) -> str:
        waiting = [caller.name for caller in self.callers.callers if not caller.done]
        busy = [scheduler.name for scheduler in self.schedulers if not scheduler.at_rest]
        return (
            f"{self.clock.now_us / SECOND:.1f} s, {self.clock.num_events} events: callers"
            f" {waiting} have no end, {busy} are not at rest; {self.kvmem.memory.stats()}"
        )

    # ---- afterwards ----

    def _probe(self) -> None:
        """The system serves again, and keeps nothing of what was but what is cached."""
        self.operator.let_go_of_all()
        self._run_until(lambda: self.operator.is_done, "pins end")
        params = SamplingParams(max_tokens=4, n=min(2, self.surroundings.knobs.max_num_seqs))
        for name, probe_params in (("probe", params), ("last", replace(params, n=1))):
            message = Generate(name, (1, 2, 3), probe_params)
            caller = self.callers.probe(name, Script(message, 0))
            self._run_until(lambda: self.callers.all_done, "serves again")
            self._expect_served(caller)
            self._run_until(self._one_at_rest, "comes to rest")
        check_empty(self.kvmem.memory, self.worker.geometry.num_blocks)
        # With its last step the worker has heard whom it may forget; "last" itself is left.
        known = list(self.worker.model.known)
        expect(len(known) <= 1, "worker forgets", f"the worker still knows {known}")

    @staticmethod
    def _expect_served(caller: Caller) -> None:
        ends = [asking.end for asking in caller.askings]
        expect(ends[-1] == "complete", "serves again", f"{caller.name} ended with {ends}")


def _in_core(error: Exception) -> tuple[str, str]:
    """An exception out of a core: where, and what."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if "/simulator/" not in f.filename), frames[-1])
    place = f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.name}"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"assertion in {place}", f"{said} (line {frame.lineno}: {frame.line})"


def simulate(seed: int, promise: Promise | None = None, *, keep_history: bool = False) -> Outcome:
    """Run the world of one seed."""
    return World(seed, promise, keep_history=keep_history).run()
