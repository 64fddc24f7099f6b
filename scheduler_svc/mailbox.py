"""What waits for one caller: deltas merged per candidate, so that a slow reader costs one
merged message and never holds up anybody else. Bounded by the request's own max_tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from octavo.service.errors import ServiceError
from scheduler_svc.core.events import CandidateDelta, Emit, RequestTimes
from scheduler_svc.core.sequence import Request


@dataclass(frozen=True)
class Delivery:
    """Everything new since the last one. `times` comes with the last, `num_cached_tokens` with
    the first, where it is known."""

    deltas: tuple[CandidateDelta, ...]
    times: RequestTimes | None
    num_cached_tokens: int | None = None

    @property
    def last(self) -> bool:
        return self.times is not None


class Mailbox:
    """One request's way from the engine to its caller."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._news = asyncio.Event()
        self._accepted = False
        self._error: ServiceError | None = None
        self._deltas: dict[int, CandidateDelta] = {}
        self._times: RequestTimes | None = None
        self._num_cached_tokens: int | None = None

    def accept(self) -> None:
        self._accepted = True
        self._news.set()

    def fail(self, error: ServiceError) -> None:
        self._error = error
        self._news.set()

    def put(self, emit: Emit) -> None:
        for delta in emit.deltas:
            held = self._deltas.get(delta.index)
            self._deltas[delta.index] = delta if held is None else _merged(held, delta)
        self._times = emit.times or self._times
        if emit.num_cached_tokens is not None:
            self._num_cached_tokens = emit.num_cached_tokens
        self._news.set()

    async def accepted(self) -> None:
        """Wait until the request's record is safe. Raises ServiceError when it is refused."""
        while not self._accepted:
            await self._wait()

    async def next(self) -> Delivery:
        """Wait for output. Raises ServiceError when the request failed."""
        while not (self._deltas or self._times):
            await self._wait()
        delivery = Delivery(tuple(self._deltas.values()), self._times, self._num_cached_tokens)
        self._deltas, self._num_cached_tokens = {}, None
        return delivery

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()
        if self._error is not None:
            raise self._error


def _merged(first: CandidateDelta, second: CandidateDelta) -> CandidateDelta:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        token_offset=first.token_offset,
    )
