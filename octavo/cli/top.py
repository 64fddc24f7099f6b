"""`octavo top`: looks at a memory service again and again. What it draws is `top_view`'s."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from octavo.admin import KvMemoryInspector
from octavo.admin_types import SequenceSummary
from octavo.cli.inspecting import inspecting
from octavo.cli.top_view import Sample, frame
from octavo.errors import OctavoError

TIMEOUT_S = 2.0
# Of one look; a service may have many more. It answers a page at a time, since every sequence
# costs it some 10 microseconds in which no step goes on.
MAX_SEQUENCES = 4096
PAGE_SIZE = 256
# Lines that are not rows of the table of sequences, about.
OTHER_LINES = 14


def look(inspector: KvMemoryInspector) -> Sample:
    """The service as it is now. Raises OctavoError."""
    stats, at_s = inspector.pool_stats(timeout_s=TIMEOUT_S), time.monotonic()
    sequences: list[SequenceSummary] = []
    is_more = True
    while is_more and len(sequences) < MAX_SEQUENCES:
        after = sequences[-1].sequence_id if sequences else 0
        page = inspector.list_sequences(after, PAGE_SIZE, timeout_s=TIMEOUT_S)
        sequences += page.sequences
        is_more = page.truncated
    return Sample(at_s, stats, tuple(sequences), truncated=is_more)


def show_once(address: str, console: Console, interval_s: float) -> None:
    """One frame, of two looks: rates need a time. Raises OctavoError."""
    with inspecting(address) as inspector:
        former = look(inspector)
        time.sleep(interval_s)
        sample = look(inspector)
    console.print(frame(address, sample, former, width=console.width))


@dataclass
class _Watch:
    """The two newest looks, and since when there has been no newer one."""

    address: str
    sample: Sample | None = None
    former: Sample | None = None
    failing_since_s: float | None = None
    problem: str = ""

    def look(self, inspector: KvMemoryInspector) -> None:
        now_s = time.monotonic()
        try:
            sample = look(inspector)
        except OctavoError as error:
            if self.failing_since_s is None:
                self.failing_since_s = now_s
            self.problem = (
                f"the memory service cannot be reached at {self.address}, for"
                f" {now_s - self.failing_since_s:.0f} s now; trying again"
                f" ({error.message.split(';')[0]})"
            )
            return
        self.former, self.sample = self.sample, sample
        self.failing_since_s, self.problem = None, ""


def watch(address: str, console: Console, interval_s: float) -> None:
    """Frames until Ctrl-C; a service that is not there is waited for."""
    seen = _Watch(address)
    with (
        KvMemoryInspector(address) as inspector,
        Live(console=console, auto_refresh=False, screen=console.is_terminal) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while True:
            seen.look(inspector)
            num_rows = max(1, console.height - OTHER_LINES)
            drawn = frame(
                address,
                seen.sample,
                seen.former,
                width=console.width,
                num_rows=num_rows,
                problem=seen.problem,
            )
            if console.is_terminal:
                live.update(drawn, refresh=True)
            else:
                console.print(drawn)
            time.sleep(interval_s)
