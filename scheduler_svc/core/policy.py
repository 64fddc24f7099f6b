"""Who goes first and who gives way: first come, first served (paper §4.5)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler_svc.core.sequence import SequenceGroup


class Policy(Protocol):
    """The order of admission, and the victim when blocks run out."""

    def admission_order(self, waiting: SequenceOf[SequenceGroup]) -> list[SequenceGroup]: ...

    def running_order(self, running: SequenceOf[SequenceGroup]) -> list[SequenceGroup]: ...

    def victim(self, running: SequenceOf[SequenceGroup]) -> SequenceGroup: ...


class FirstComeFirstServed:
    """Earliest arrival first; the latest arrival is preempted first.

    A preempted group keeps its arrival number, so nobody who came later is admitted before it
    and the oldest always runs: progress is guaranteed.
    """

    def admission_order(self, waiting: SequenceOf[SequenceGroup]) -> list[SequenceGroup]:
        return sorted(waiting, key=_arrival)

    def running_order(self, running: SequenceOf[SequenceGroup]) -> list[SequenceGroup]:
        return sorted(running, key=_arrival)

    def victim(self, running: SequenceOf[SequenceGroup]) -> SequenceGroup:
        return max(running, key=_arrival)


def _arrival(group: SequenceGroup) -> int:
    return group.arrival_number
