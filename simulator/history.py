"""What happened, line by line: what a person reads, and what a replay is compared by."""

from __future__ import annotations

import hashlib

from simulator.clock import Clock


class History:
    """Every line goes into the digest; the lines themselves are kept when asked for."""

    def __init__(self, clock: Clock, *, keep: bool) -> None:
        self.lines: list[str] = []
        self._clock = clock
        self._keep = keep
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: str) -> None:
        line = f"{self._clock.now_us / 1000:12.3f} ms  {who:<12} {what}"
        self._digest.update(line.encode() + b"\n")
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """Two runs with the same digest did the same things at the same times."""
        return self._digest.hexdigest()
