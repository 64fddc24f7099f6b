"""When a sequence ends, and which text may be shown before it is known not to be a stop string."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from scheduler_svc.core.params import SamplingParams


class FinishReason(IntEnum):
    """Why a sequence ended. The numbers are those of the wire enum."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    KV_CAPACITY = 4


class TextStream(Protocol):
    """Incremental detokenization of one sequence. The chunks joined are the full decode."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """The tail still held, once no token follows."""
        ...


class StopStrings:
    """Finds stop strings in a text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until that is decided, so no
    part of one is ever shown and nothing before one is lost.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended it or None)."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if found:
            # The one complete first wins, so that the pieces' borders do not matter.
            _, at, stop = min(found)
            self._held = ""
            return buffer[:at], stop
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _undecided(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that begins a stop string."""
        longest = min(len(buffer), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            suffix = buffer[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


class Judgement(NamedTuple):
    """What one token did: the text it releases, and whether it was the last."""

    text: str
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


class StopChecker:
    """Judges the tokens of one sequence in order."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: tuple[int, ...], text: TextStream
    ) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._text = text
        self._strings = StopStrings(params.stop)
        self._num_output_tokens = 0

    def judge(self, token_id: int) -> Judgement:
        """Take the next output token. Must not be called after a finish reason was given."""
        self._num_output_tokens += 1
        counts = self._num_output_tokens >= self._params.min_tokens
        if counts and token_id in self._eos:
            return self._last("", FinishReason.STOP)
        if counts and token_id in self._stop_ids:
            return self._last("", FinishReason.STOP, token_id)
        piece = self._text.push(token_id)
        if counts:
            shown, stop = self._strings.push(piece)
        else:
            shown, stop = piece, None
        if stop is not None:
            return Judgement(shown, FinishReason.STOP, stop)
        if self._num_output_tokens >= self._params.max_tokens:
            return self._last(shown, FinishReason.LENGTH)
        return Judgement(shown)

    def end(self) -> str:
        """The text still held when the sequence ends for another reason."""
        return self._last("", FinishReason.ABORT).text

    def _last(self, shown: str, reason: FinishReason, matched_stop: int | None = None) -> Judgement:
        """`shown` and the text still held, whose last bytes may yet complete a stop string."""
        more, stop = self._strings.push(self._text.flush())
        if stop is not None:
            return Judgement(shown + more, FinishReason.STOP, stop)
        return Judgement(shown + more + self._strings.flush(), reason, matched_stop)
