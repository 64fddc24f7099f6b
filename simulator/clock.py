"""Virtual time: a queue of things to come. Nothing here reads a real clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]

MS = 1_000
SECOND = 1_000_000


class Clock:
    """`now_us` moves from one event to the next; events of one moment keep their order."""

    def __init__(self) -> None:
        self.now_us = 0
        self.num_events = 0
        self._queue: list[tuple[int, int, Action]] = []

    def at(self, time_us: int, action: Action) -> None:
        self.num_events += 1
        heapq.heappush(self._queue, (max(time_us, self.now_us), self.num_events, action))

    def after(self, delay_us: int, action: Action) -> None:
        self.at(self.now_us + delay_us, action)

    def run_next(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._queue:
            return False
        self.now_us, _, action = heapq.heappop(self._queue)
        action()
        return True
