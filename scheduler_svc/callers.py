"""The callers of one scheduler: who is attached to which request, and how long is waited for
those who are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from octavo.service.errors import ServiceError
from scheduler_svc.core.sequence import Request
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.tenants import outer_id


class Callers:
    """Mailboxes by request id, and timers of requests whose caller is gone."""

    def __init__(self, on_gone: Callable[[str, bool], None]) -> None:
        """on_gone: called with the id of a request whose caller did not come back in time, and
        `last` of the `wait_for` that is over."""
        self._on_gone = on_gone
        self._mailboxes: dict[str, Mailbox] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def get(self, request_id: str) -> Mailbox | None:
        return self._mailboxes.get(request_id)

    def attach(self, request: Request) -> Mailbox:
        """A new mailbox; whoever had the request before is told that it has been replaced."""
        request_id = request.request_id
        self.stop_waiting(request_id)
        self.fail(
            request_id,
            ServiceError(
                "ATTACH_REPLACED", f"another stream has attached to {outer_id(request)!r}"
            ),
        )
        mailbox = self._mailboxes[request_id] = Mailbox(request)
        return mailbox

    def remove(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)

    def fail(self, request_id: str, error: ServiceError) -> None:
        """End the stream of a request's caller, if there is one."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.fail(error)

    def fail_all(self, error: ServiceError) -> list[str]:
        """End all streams; the ids of their requests."""
        request_ids = list(self._mailboxes)
        for request_id in request_ids:
            self.fail(request_id, error)
        return request_ids

    def wait_for(self, request_id: str, ttl_ms: int, *, last: bool = False) -> None:
        """The request has no caller: it is kept for so long."""
        self.stop_waiting(request_id)
        self._timers[request_id] = asyncio.get_running_loop().call_later(
            ttl_ms / 1000, self._give_up, request_id, last
        )

    def stop_waiting(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def stop_waiting_for_all(self) -> None:
        for request_id in list(self._timers):
            self.stop_waiting(request_id)

    def _give_up(self, request_id: str, last: bool) -> None:
        del self._timers[request_id]
        self._on_gone(request_id, last)
