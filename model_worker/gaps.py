"""The time between steps, and how much of it the model had nothing to do.

A worker hears of work in steps alone, so whether there was any between two steps is known once the
second has come: when one of its rows goes on with a sequence that was here before, that sequence
waited all the while. A step of newcomers alone ends a time without work, which is nobody's loss
that can be seen from here. (Requests that the scheduler has heard of, and not sent, are not
counted.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Nanoseconds between two steps, and those of them before the second one stood ready."""

    gap_ns: int = 0
    idle_ns: int = 0


class Gaps:
    """Measures the gaps between the steps of one model. Times are of one monotonic clock, in ns."""

    def __init__(self) -> None:
        self._ended_ns: int | None = None

    def begin(self, ready_ns: int, began_ns: int, *, goes_on: bool) -> Gap:
        """The gap before a step that stood ready at `ready_ns` and began at `began_ns`.

        goes_on: it has a row of a sequence that the worker knew before. Nothing was idle when the
        step was ready before the previous one had ended, as it is with two steps in flight; what
        the gap has beyond that is the worker's own way from one step to the next.
        """
        if self._ended_ns is None or not goes_on:
            return Gap()
        return Gap(began_ns - self._ended_ns, max(0, min(ready_ns, began_ns) - self._ended_ns))

    def end(self, ended_ns: int) -> None:
        """The step that had begun last ended at `ended_ns`."""
        self._ended_ns = ended_ns
