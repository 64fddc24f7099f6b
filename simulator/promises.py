"""Promises that are not kept yet, each with the faults it is about and the check it has to pass.

A promise is tested in a world of its own: only its fault happens, while requests are under way,
and no caller gives up or asks anew. Today's answer to a death is an error to every caller it
concerns, so today each of these checks fails, and says which requests were lost.
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


@dataclass(frozen=True)
class Promise:
    """`kind` and `targets` of the fault; `duration_us` until the process is back.

    A caller that must come back to keep its request alive does so in `callers.Caller`.
    """

    name: str
    meaning: str
    kind: str
    targets: tuple[str, ...]
    duration_us: int
    num_schedulers: int = 1

    def knobs(self, knobs: Knobs) -> Knobs:
        return replace(knobs, num_schedulers=self.num_schedulers, num_blocks_jitter=0)

    def workload(self, workload: Workload) -> Workload:
        """Every caller stays, and none asks a second time: what is lost, is lost."""
        scripts = tuple(replace(script, leaves="", comes_back=False) for script in workload.scripts)
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
        """Every request that was accepted and not given up has its whole right stream."""
        lost = []
        for caller in callers:
            for attempt in caller.attempts:
                check = attempt.check
                if check.accepted and attempt.end not in ("complete", "left", "UNKNOWN_REQUEST"):
                    tokens = f"{check.num_tokens} of {check.num_expected_tokens} tokens"
                    lost.append(f"{caller.name} ended with {attempt.end} after {tokens}")
        if lost:
            raise Violation(f"promise {self.name}", f"{len(lost)} requests were lost: {lost[0]}")


PROMISES = {
    promise.name: promise
    for promise in (
        Promise(
            "scheduler-death-loses-nothing",
            "kill the scheduler: another one adopts, and every stream goes on",
            "kill",
            ("scheduler",),
            50 * MS,
            num_schedulers=2,
        ),
        Promise(
            "kvmem-restart-loses-nothing",
            "kill the memory service: it restarts from its journal, and every stream goes on",
            "kill",
            ("kvmem",),
            50 * MS,
        ),
        Promise(
            "worker-death-loses-nothing",
            "kill the worker: its sequences are computed again from kvmem's tokens",
            "kill",
            ("worker",),
            50 * MS,
        ),
        Promise(
            "broken-caller-connection-loses-nothing",
            "cut callers off for longer than the keepalive: they re-attach and go on",
            "cut",
            ("callers", "scheduler"),
            40 * SECOND,
        ),
    )
}
