"""What Octavo promises, each with the fault it is about, in a world where nothing else happens.

Every caller keeps a secret and nobody gives up, so every request that can be served must end
complete, whatever the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from simulator.clock import MS, SECOND
from simulator.faults import Fault, FaultPlan
from simulator.knobs import Knobs
from simulator.worker import Violation
from simulator.workload import Workload

if TYPE_CHECKING:
    from simulator.callers import Caller

# Ends that are true whatever happens: the request cannot be served, or the door was closed when
# it came.
REFUSALS = frozenset(
    ("PROMPT_EXCEEDS_POOL", "PROMPT_TOO_LONG", "QUEUE_FULL", "REQUEST_EXISTS", "TENANT_QUOTA")
)


@dataclass(frozen=True)
class Promise:
    """`kind` and `targets` of the fault, as in `faults.Fault`; `duration_us` until it is over."""

    name: str
    meaning: str
    kind: str
    targets: tuple[str, ...]
    duration_us: int = 50 * MS
    num_schedulers: int = 1

    def knobs(self, knobs: Knobs) -> Knobs:
        return replace(knobs, num_schedulers=self.num_schedulers, num_blocks_jitter=0)

    def workload(self, workload: Workload) -> Workload:
        scripts = tuple(
            replace(script, leaves="", comes_back=False, attaches=True)
            for script in workload.scripts
        )
        return replace(workload, scripts=scripts)

    def plan(self, draw: Random, workload: Workload) -> FaultPlan:
        """The fault, twice, each right after a step was sent to the worker."""
        faults = tuple(
            Fault(
                self.kind,
                self.targets,
                at_us=0,
                duration_us=self.duration_us,
                after=("Execute", draw.randint(*steps)),
            )
            for steps in ((1, 20), (21, 60))
        )
        return FaultPlan(
            faults=faults, stop_us=workload.horizon_us + 2 * self.duration_us + 2 * SECOND
        )

    def check(self, callers: Sequence[Caller]) -> None:
        """Every request has its whole right stream."""
        for caller in callers:
            for asking in caller.askings:
                refused = asking.end in REFUSALS and not asking.check.ever_accepted
                if asking.end != "complete" and not refused:
                    raise Violation(
                        f"promise {self.name}",
                        f"{caller.name} ended with {asking.end} after"
                        f" {asking.check.num_tokens} tokens",
                    )


PROMISES = {
    promise.name: promise
    for promise in (
        Promise(
            "another-scheduler",
            "the scheduler dies; the standby adopts, and every stream goes on",
            "kill",
            ("scheduler",),
            num_schedulers=2,
        ),
        Promise(
            "the-scheduler-again",
            "the scheduler dies and is started again",
            "kill",
            ("scheduler",),
        ),
        Promise(
            "kvmem-from-its-journal",
            "the memory service dies, and restarts from its journal",
            "kill",
            ("kvmem",),
        ),
        Promise("torn-journal", "... in the middle of a record", "tear", ("kvmem",)),
        Promise("unanswered-record", "... between a record and its answer", "die", ("kvmem",)),
        Promise(
            "kvmem-without-its-journal",
            "the memory service loses everything; its scheduler enters every request again",
            "lose",
            ("kvmem",),
        ),
        Promise(
            "worker",
            "the worker dies: sequences are computed again from their tokens",
            "kill",
            ("worker",),
        ),
        Promise("kvmem-and-worker", "both die", "kill", ("kvmem", "worker")),
        Promise("scheduler-and-kvmem", "both die", "kill", ("scheduler", "kvmem")),
        Promise(
            "scheduler-and-journal",
            "nobody has the requests any more but those who made them",
            "lose",
            ("scheduler", "kvmem"),
        ),
        Promise("everybody", "all three die", "kill", ("scheduler", "kvmem", "worker")),
        Promise(
            "paused-scheduler",
            "the scheduler sleeps beyond its lease, and wakes up to find another one",
            "pause",
            ("scheduler",),
            5 * SECOND,
            num_schedulers=2,
        ),
        Promise("paused-kvmem", "the memory service sleeps", "pause", ("kvmem",), 5 * SECOND),
        Promise("paused-worker", "the worker sleeps", "pause", ("worker",), 20 * SECOND),
        Promise(
            "scheduler-cut-off-from-kvmem",
            "they do not reach each other for longer than the keepalive",
            "cut",
            ("scheduler", "kvmem"),
            40 * SECOND,
            num_schedulers=2,
        ),
        Promise(
            "scheduler-cut-off-from-worker", "...", "cut", ("scheduler", "worker"), 40 * SECOND
        ),
        Promise("callers-cut-off", "...", "cut", ("callers", "scheduler"), 40 * SECOND),
    )
}
