"""One call: a request for as long as its caller is there, and its part of the trace."""

from __future__ import annotations

import time

from opentelemetry.trace import Span

from octavo.service.telemetry import Telemetry
from octavo.v1 import inference_pb2
from scheduler_svc.core.events import Emit, RequestTimes
from scheduler_svc.loop import Engine
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.tenants import outer_id


class Call:
    """A caller's way to its request, from its submission until it has everything, or leaves."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        mailbox: Mailbox,
        span: Span | None,
        started_ns: int,
    ) -> None:
        self.mailbox = mailbox
        self._engine = engine
        self._telemetry = telemetry
        self._span = span
        self._started_ns = started_ns

    def header(self) -> inference_pb2.GenerateReply:
        """The first reply, once the request is accepted."""
        request = self.mailbox.request
        return inference_pb2.GenerateReply(
            request_id=outer_id(request),
            seed=request.params.seed,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def sent(self, emit: Emit) -> bool:
        """`emit` is on its way to the caller; whether it was the last."""
        if emit.times is None:
            return False
        self._record_phases(emit.times)
        return True

    def leave(self, *, complete: bool) -> None:
        """The caller has everything, or is gone: then its request is aborted, or waits for it to
        come back for as long as it said."""
        request = self.mailbox.request
        self._engine.leave(request.request_id, self.mailbox, complete=complete)
        span = self._span
        if span is not None:
            span.set_attribute("octavo.request_id", request.request_id)
            span.set_attribute("octavo.tenant", request.tenant)
            span.set_attribute("octavo.num_prompt_tokens", len(request.prompt_token_ids))
            span.set_attribute("octavo.aborted", not complete)
            span.end()

    def _record_phases(self, times: RequestTimes) -> None:
        """Queue, prefill and decode as spans of the request's own trace."""
        parent = self.mailbox.request.traceparent
        if not (self._telemetry.enabled and parent):
            return

        def at_ns(moment_s: float) -> int:
            return self._started_ns + int((moment_s - times.arrived_at_s) * 1e9)

        marks = [
            self._started_ns,
            at_ns(times.first_scheduled_at_s or times.arrived_at_s),
            at_ns(times.first_token_at_s or times.arrived_at_s),
            time.time_ns(),
        ]
        names = ("scheduler.queue", "scheduler.prefill", "scheduler.decode")
        for name, start_ns, end_ns in zip(names, marks, marks[1:], strict=False):
            self._telemetry.record(name, (start_ns, max(start_ns, end_ns)), parent=parent)
