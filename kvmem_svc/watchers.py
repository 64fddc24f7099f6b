"""Watchers: each has a bounded queue, and one that does not keep up is dropped."""

from __future__ import annotations

import asyncio

from octavo.service.errors import ServiceError
from octavo.v1 import kvmem_pb2 as pb

MAX_WATCHERS = 64
MAX_QUEUED_EVENTS = 256


class Watcher:
    """A queue of events. `next` raises the ServiceError it was ended with."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[pb.WatchEvent | ServiceError] = asyncio.Queue(MAX_QUEUED_EVENTS)

    def offer(self, event: pb.WatchEvent) -> bool:
        """Queue an event without waiting; False when the queue is full."""
        if self._events.full():
            return False
        self._events.put_nowait(event)
        return True

    def end(self, error: ServiceError) -> None:
        """Drop what is queued: the next thing the watcher hears is `error`."""
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(error)

    async def next(self) -> pb.WatchEvent:
        """The next event. Raises ServiceError."""
        event = await self._events.get()
        if isinstance(event, ServiceError):
            raise event
        return event


class Watchers:
    """All watchers; publishing to them never waits."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, snapshot: pb.WatchEvent) -> Watcher:
        """A new watcher whose first event is `snapshot`. Raises ServiceError QUEUE_FULL."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ServiceError(
                "QUEUE_FULL", f"there are {MAX_WATCHERS} watchers already", retry_after_ms=1_000
            )
        watcher = Watcher()
        watcher.offer(snapshot)
        self._watchers.add(watcher)
        return watcher

    def remove(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def publish(self, event: pb.WatchEvent) -> None:
        """Hand `event` to everyone; who has no room for it is dropped."""
        for watcher in [watcher for watcher in self._watchers if not watcher.offer(event)]:
            self._watchers.discard(watcher)
            watcher.end(
                ServiceError(
                    "QUEUE_FULL",
                    f"the watcher is more than {MAX_QUEUED_EVENTS} events behind: watch again",
                    retry_after_ms=100,
                )
            )

    def end_all(self, error: ServiceError) -> None:
        for watcher in self._watchers:
            watcher.end(error)
        self._watchers.clear()
