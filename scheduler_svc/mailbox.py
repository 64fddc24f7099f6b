"""What waits for one caller: news merged per candidate, so that a slow reader costs one merged
message and never holds up anybody else. Bounded by the request's own max_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from octavo.service.errors import ServiceError
from scheduler_svc.core.events import CandidateDelta, Emit
from scheduler_svc.core.sequence import Request


def _nobody() -> None:
    """Whoever takes has not come yet."""


class Mailbox:
    """One request's way from the engine to its caller.

    on_news: called when it is accepted, when it has failed, and when there is something to take.
    accepted: the request's record is safe. error: what the request has failed with.
    """

    __slots__ = ("_held", "accepted", "error", "on_news", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.on_news: Callable[[], None] = _nobody
        self.accepted = False
        self.error: ServiceError | None = None
        self._held: Emit | None = None

    def accept(self) -> None:
        self.accepted = True
        self.on_news()

    def fail(self, error: ServiceError) -> None:
        self.error = error
        self.on_news()

    def put(self, emit: Emit) -> None:
        held = self._held
        self._held = emit if held is None else merged(held, emit)
        self.on_news()

    @property
    def has_news(self) -> bool:
        """Whether `take` has an answer."""
        return self._held is not None or self.error is not None

    def take(self) -> Emit | None:
        """Everything new since the last time; None: nothing is.

        Raises ServiceError when the request has failed and all from before was taken.
        """
        held = self._held
        if held is None and self.error is not None:
            raise self.error
        self._held = None
        return held


class Waiter:
    """Somebody who waits at one mailbox alone."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._news = asyncio.Event()
        mailbox.on_news = self._news.set

    async def accepted(self) -> None:
        """Wait until the request's record is safe. Raises ServiceError when it is refused."""
        while not self._mailbox.accepted:
            if self._mailbox.error is not None:
                raise self._mailbox.error
            await self._wait()

    async def next(self) -> Emit:
        """Wait for output. Raises ServiceError when the request failed."""
        while (emit := self._mailbox.take()) is None:
            await self._wait()
        return emit

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


def merged(first: Emit, second: Emit) -> Emit:
    """Both as one, as if there had been one step instead of two."""
    deltas = {delta.candidate: delta for delta in first.deltas}
    for delta in second.deltas:
        held = deltas.get(delta.candidate)
        deltas[delta.candidate] = delta if held is None else _one_after_the_other(held, delta)
    num_cached_tokens = second.num_cached_tokens
    return Emit(
        request_id=first.request_id,
        deltas=tuple(deltas.values()),
        times=second.times or first.times,
        num_cached_tokens=first.num_cached_tokens
        if num_cached_tokens is None
        else num_cached_tokens,
    )


def _one_after_the_other(first: CandidateDelta, second: CandidateDelta) -> CandidateDelta:
    return second._replace(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        token_offset=first.token_offset,
    )
