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

    def plan(self, draw: Random, workload: Workload) -> FaultPlan:
        """The fault, twice, soon after requests came."""
        faults = tuple(
            Fault(
                self.kind,
                self.targets,
                draw.choice(workload.busy_us) + draw.randint(20 * MS, 400 * MS),
                self.duration_us,
            )
            for _ in range(2)
        )
        last_us = max(fault.at_us for fault in faults) + self.duration_us + SECOND
        return FaultPlan(faults=faults, stop_us=max(last_us, workload.horizon_us))

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
