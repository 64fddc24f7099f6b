"""Who is attached to which request, and how long is waited for those who are not:
`scheduler_svc.callers` and `scheduler_svc.mailbox` in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from scheduler_svc.core import events
from scheduler_svc.core.sequence import Request
from simulator.messages import Accepted, Output
from simulator.network import End
from simulator.process import Process


@dataclass(eq=False)
class Mailbox:
    """One request's way to its caller. emitted: what the caller has, by candidate, once it has
    read everything."""

    end: End
    request: Request
    emitted: dict[int, list[int]] = field(default_factory=dict)
    # Whether it was attached to a request that had ended already.
    came_late: bool = False
    _accepted: bool = False
    _waiting: list[Output] = field(default_factory=list)

    def accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            self.end.send(Accepted())
            for output in self._waiting:
                self.end.send(output)

    def put(self, output: Output) -> None:
        if self._accepted:
            self.end.send(output)
        else:
            self._waiting.append(output)

    def received(self, received: dict[int, events.Received]) -> None:
        """What the caller says it has already."""
        self.emitted = {index: list(had.token_ids) for index, had in received.items()}


class Mailboxes:
    """Mailboxes by request id, and timers of requests whose caller is gone."""

    def __init__(self, process: Process, on_gone: Callable[[str, bool], None]) -> None:
        self._process = process
        self._on_gone = on_gone
        self._mailboxes: dict[str, Mailbox] = {}
        # By request id; another object, another timer.
        self._timers: dict[str, object] = {}

    def __bool__(self) -> bool:
        return bool(self._mailboxes or self._timers)

    def get(self, request_id: str) -> Mailbox | None:
        return self._mailboxes.get(request_id)

    def attach(self, request: Request, end: End) -> Mailbox:
        """A new mailbox; whoever had the request before is told that it has been replaced."""
        request_id = request.request_id
        marks = self._process.world.marks
        marks.hit("detached request resumed", request_id in self._timers)
        marks.hit("attached twice, the last one wins", request_id in self._mailboxes)
        self.stop_waiting(request_id)
        self.fail(request_id, "ATTACH_REPLACED")
        mailbox = self._mailboxes[request_id] = Mailbox(end, request)
        return mailbox

    def remove(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)

    def fail(self, request_id: str, reason: str) -> bool:
        """End the stream of a request's caller; whether there was one."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.end.close(reason)
        return mailbox is not None

    def fail_all(self, reason: str) -> list[str]:
        """End all streams; the ids of their requests."""
        request_ids = list(self._mailboxes)
        for request_id in request_ids:
            self.fail(request_id, reason)
        return request_ids

    def wait_for(self, request_id: str, ttl_us: int, *, last: bool = False) -> None:
        """The request has no caller: it is kept for so long."""
        timer = self._timers[request_id] = object()
        self._process.after(ttl_us, partial(self._give_up, request_id, timer, last))

    def stop_waiting(self, request_id: str) -> None:
        self._timers.pop(request_id, None)

    def stop_waiting_for_all(self) -> None:
        self._timers.clear()

    def _give_up(self, request_id: str, timer: object, last: bool) -> None:
        if self._timers.get(request_id) is timer:
            del self._timers[request_id]
            self._on_gone(request_id, last)
