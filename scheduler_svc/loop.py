"""The engine: carries the machine's commands out and brings it what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry.trace import Span

from octavo.service.errors import ServiceError
from octavo.service.telemetry import Telemetry, traceparent
from scheduler_svc.callers import Callers
from scheduler_svc.core import events
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import ModelLimits
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import TextStream
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.ports import (
    Holder,
    KvMemoryPort,
    PeerLostError,
    WorkerDescription,
    WorkerPort,
)
from scheduler_svc.takeover import machine_key, take_over, within_limits
from scheduler_svc.tenants import outer_id

log = structlog.get_logger()

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 0.2
# How often a standby asks whether the session has come free.
STANDBY_POLL_S = 0.1
DRAIN_POLL_S = 0.05


@dataclass(frozen=True)
class Patience:
    """How long is waited. recovery_s: for a lost peer, before callers are told. result_s: for
    the caller of a request that has ended, if it may come back."""

    recovery_s: float = 30.0
    result_s: float = 60.0


class Engine:
    """One scheduler: a machine, its two peers, and its callers."""

    def __init__(
        self,
        config: SchedulerConfig,
        kvmem: KvMemoryPort,
        worker: WorkerPort,
        telemetry: Telemetry,
        open_text: Callable[[WorkerDescription], Callable[[], TextStream]],
        patience: Patience | None = None,
    ) -> None:
        """`open_text` loads what is needed to detokenize for the worker's model."""
        self._config = config
        self._kvmem = kvmem
        self._worker = worker
        self._telemetry = telemetry
        self._open_text = open_text
        self._patience = patience or Patience()
        self._machine: Machine | None = None
        # What detokenizes for a model, by its path.
        self._text: tuple[str, Callable[[], TextStream]] | None = None
        self._callers = Callers(self._on_caller_gone)
        self._losing_patience: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Of the step under preparation, and the context of the one that came back last.
        self._step_span: Span | None = None
        self._executed_step = ""
        self._lost: asyncio.Future[PeerLostError] | None = None
        self._draining = False
        # Where callers of the scheduler that has the session reach it; None: nobody else has it.
        self._owner_address: str | None = None
        self.worker_description: WorkerDescription | None = None

    # ---- for the servicer ----

    @property
    def machine(self) -> Machine:
        """The core, once there is a worker. Raises ServiceError NOT_READY or NOT_LEADER."""
        if self._owner_address is not None:
            raise ServiceError(
                "NOT_LEADER",
                f"another scheduler owns the requests; it is at {self._owner_address!r}",
                retry_after_ms=100,
                metadata={"holder_address": self._owner_address},
            )
        if self._machine is None:
            raise ServiceError(
                "NOT_READY", "the scheduler has no worker yet; try again soon", retry_after_ms=500
            )
        return self._machine

    def limits(self) -> ModelLimits:
        """What requests are checked against. Raises ServiceError NOT_READY or NOT_LEADER."""
        machine, worker = self.machine, self.worker_description
        assert worker is not None
        return ModelLimits(
            worker.max_model_len,
            worker.vocab_size,
            worker.num_blocks,
            worker.block_size,
            machine.config.max_num_seqs,
        )

    def submit(self, request: Request, received: Mapping[int, events.Received]) -> Mailbox:
        """Enter a request, or attach to it when it is there already.

        Raises ServiceError REQUEST_EXISTS, DRAINING, NOT_READY or NOT_LEADER.
        """
        machine = self.machine
        if self._draining:
            raise ServiceError("DRAINING", "the scheduler is shutting down", retry_after_ms=1000)
        request_id = request.request_id
        existing = machine.request_of(request_id)
        if existing is None:
            mailbox = self._callers.attach(request)
            self._handle(machine, events.RequestArrived(request, received))
            return mailbox
        if not _is_same_caller(existing, request):
            raise ServiceError(
                "REQUEST_EXISTS", f"a live request has the id {outer_id(existing)!r}"
            )
        mailbox = self._callers.attach(existing)
        self._handle(machine, events.Attached(request_id, received))
        log.info("attached again", request_id=request_id)
        return mailbox

    def abort(self, request_id: str, secret_digest: bytes = b"") -> bool:
        """Stop a request within one step. False when no such request is live, or it is another
        caller's than the one with this secret."""
        machine = self.machine
        existing = machine.request_of(request_id)
        if existing is None:
            return False
        if secret_digest and existing.attach_secret_digest != secret_digest:
            return False
        self._callers.stop_waiting(request_id)
        self._callers.fail(
            request_id,
            ServiceError("UNKNOWN_REQUEST", f"request {outer_id(existing)!r} was aborted"),
        )
        self._handle(machine, events.AbortRequested(request_id))
        return True

    def leave(self, request_id: str, mailbox: Mailbox, *, complete: bool) -> None:
        """The caller of `mailbox` is done, or gone: then its request waits for it, or ends.

        Nothing happens when the mailbox is not the request's any more.
        """
        if self._callers.get(request_id) is not mailbox:
            return
        self._callers.remove(request_id)
        assert self._machine is not None
        if complete:
            self._handle(self._machine, events.Delivered(request_id))
        elif mailbox.request.detach_ttl_ms:
            self._handle(self._machine, events.Detached(request_id))
            self._callers.wait_for(request_id, mailbox.request.detach_ttl_ms)
        else:
            self._handle(self._machine, events.AbortRequested(request_id))

    def _on_caller_gone(self, request_id: str, last: bool) -> None:
        machine = self._machine
        request = machine.request_of(request_id) if machine is not None else None
        if machine is None or request is None:
            return
        if machine.has_ended(request_id) and request.detach_ttl_ms and not last:
            # It costs no blocks any more.
            self._callers.wait_for(request_id, int(self._patience.result_s * 1000), last=True)
            return
        log.info("nobody came back for it", request_id=request_id)
        self._handle(machine, events.AbortRequested(request_id))

    # ---- the life of the engine ----

    async def run(self, holder: Holder, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Connect, serve until a peer is lost, connect again; until cancelled."""
        try:
            while True:
                await self._become_owner(holder)
                await on_ready(True)
                assert self._lost is not None
                error = await self._lost
                log.error("peer lost", reason=error.reason, error=error.message)
                # First, so that whoever comes from here on is refused and starts nothing.
                self._disconnect()
                await on_ready(False)
                await self._cancel_tasks()
                if error.reason == "STALE_EPOCH":
                    # Whoever has the newer epoch has the requests, also if the memory service,
                    # which could say where, cannot be reached from here.
                    self._stand_by("")
                self._stop_losing_patience()
                self._losing_patience = asyncio.create_task(self._lose_patience(error))
        finally:
            self._stop_losing_patience()
            await self._cancel_tasks()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those under way, at most `timeout_s`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while len(self._callers) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self._callers.fail_all(
            ServiceError("DRAINING", "the scheduler has stopped", retry_after_ms=100)
        )

    async def _become_owner(self, holder: Holder) -> None:
        """Try to connect until that succeeds; stand by while another scheduler has the session."""
        pause_s, said = RECONNECT_FIRST_S, ""
        while True:
            try:
                await self._connect(holder)
            except PeerLostError as error:
                if error.message != said:
                    log.warning("not connected", reason=error.reason, error=error.message)
                    said = error.message
                await self._cancel_tasks()
                if error.reason == "SESSION_HELD" and error.metadata.get("holder") != holder.name:
                    self._stand_by(error.metadata.get("holder_address", ""))
                    await asyncio.sleep(STANDBY_POLL_S)
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, RECONNECT_MOST_S)
            else:
                return

    def _stand_by(self, owner_address: str) -> None:
        """Another scheduler has the session, and with it every request."""
        self._owner_address = owner_address
        if self._machine is not None:
            log.warning("another scheduler has taken over", address=owner_address)
            self._machine = None
            self.worker_description = None
        self._callers.stop_waiting_for_all()
        self._callers.fail_all(
            ServiceError(
                "NOT_LEADER",
                f"another scheduler has taken over; it is at {owner_address!r}",
                retry_after_ms=100,
                metadata={"holder_address": owner_address},
            )
        )

    async def _connect(self, holder: Holder) -> None:
        needed = self._config.max_waiting + 2 * self._config.max_num_seqs
        worker = await self._worker.describe()
        open_text = await self._text_of(worker)
        connected = await take_over(
            holder, self._kvmem, self._worker, worker, self._begin_connection, needed
        )
        machine = self._machine_for(worker, open_text)
        assert self._lost is not None
        if self._lost.done():
            raise self._lost.result()
        self._owner_address = None
        self._stop_losing_patience()
        self._handle(machine, connected)
        self._spawn(self._worker.watch())

    def _begin_connection(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        self._spawn(self._kvmem.watch())

    async def _text_of(self, worker: WorkerDescription) -> Callable[[], TextStream]:
        """Loaded before the session is asked for: that takes a while, and a scheduler that
        stands by is not to begin with it when others wait for it to take over."""
        if self._text is None or self._text[0] != worker.model_path:
            open_text = await asyncio.to_thread(self._open_text, worker)
            self._text = worker.model_path, open_text
        return self._text[1]

    def _machine_for(
        self, worker: WorkerDescription, open_text: Callable[[], TextStream]
    ) -> Machine:
        known = self.worker_description
        if self._machine is None or known is None or machine_key(known) != machine_key(worker):
            config = within_limits(self._config, worker)
            self._callers.fail_all(
                ServiceError("WORKER_LOST", "another model is served now", retry_after_ms=100)
            )
            self._machine = Machine(config, worker.eos_token_ids, open_text)
        self.worker_description = worker
        return self._machine

    def _disconnect(self) -> None:
        if self._step_span is not None:
            self._step_span.end()
            self._step_span = None
        assert self._machine is not None
        self._handle(self._machine, events.Disconnected())

    async def _lose_patience(self, error: PeerLostError) -> None:
        """Tell the callers once the peer has been gone for too long. Their requests stay, for as
        long as those of callers who are gone."""
        await asyncio.sleep(self._patience.recovery_s)
        reason = error.reason if error.reason in ("WORKER_LOST", "KVMEM_LOST") else "NOT_READY"
        told = ServiceError(reason, error.message, retry_after_ms=1000)
        machine = self._machine
        for request_id in self._callers.fail_all(told):
            request = machine.request_of(request_id) if machine is not None else None
            if machine is not None and request is not None:
                self._handle(machine, events.Detached(request_id))
                self._callers.wait_for(request_id, request.detach_ttl_ms)

    def _stop_losing_patience(self) -> None:
        if self._losing_patience is not None:
            self._losing_patience.cancel()
            self._losing_patience = None

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- commands ----

    def _handle(self, machine: Machine, event: events.Event) -> None:
        for command in machine.handle(event, time.monotonic()):
            self._carry_out(machine, command)

    def _carry_out(self, machine: Machine, command: events.Command) -> None:
        match command:
            # First what there is most of.
            case events.Emit():
                mailbox = self._callers.get(command.request_id)
                if mailbox is not None:
                    mailbox.put(command)
            case events.ApplyBatch(batch, links):
                parent = self._batch_parent(links, prepares_step=batch.prepares_step)
                self._spawn(self._apply(machine, command, parent))
            case events.ExecuteStep():
                self._spawn(self._execute(machine, command, self._step_span_of(command)))
            case events.Adopted(request_id):
                self._callers.wait_for(request_id, machine.groups[request_id].request.detach_ttl_ms)
            case events.Accepted(request_id):
                mailbox = self._callers.get(request_id)
                if mailbox is not None:
                    mailbox.accept()
            case events.Reject(request_id, reason, message, retry_after_ms):
                self._callers.fail(request_id, ServiceError(reason, message, retry_after_ms))

    async def _apply(self, machine: Machine, command: events.ApplyBatch, parent: str) -> None:
        result = await self._kvmem.apply(command.batch, parent)
        self._handle(machine, events.BatchApplied(result))

    async def _execute(
        self, machine: Machine, command: events.ExecuteStep, span: Span | None
    ) -> None:
        try:
            result = await self._worker.execute(command.step, traceparent(span) if span else "")
        finally:
            if span is not None:
                self._executed_step = traceparent(span)
                span.set_attribute("octavo.step_id", command.step.step_id)
                span.set_attribute("octavo.num_sequences", len(command.step.sequence_ids))
                span.end()
        self._handle(machine, events.StepExecuted(result))

    def _batch_parent(self, links: tuple[str, ...], *, prepares_step: bool) -> str:
        """The context of the step that a batch prepares, or of the one whose result it commits."""
        if not self._telemetry.enabled:
            return ""
        if not prepares_step:
            return self._executed_step
        if self._step_span is None:
            self._step_span = self._telemetry.start("scheduler.step", links=links)
        return traceparent(self._step_span)

    def _step_span_of(self, command: events.ExecuteStep) -> Span | None:
        """One span a step: from the batch that prepares it, if there is one, to its result."""
        span, self._step_span = self._step_span, None
        if span is None and self._telemetry.enabled:
            span = self._telemetry.start("scheduler.step", links=command.links)
        return span

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PeerLostError):
            if self._lost is not None and not self._lost.done():
                self._lost.set_result(error)
        elif error is not None:
            # A bug: going on would serve callers from a view that nobody can trust.
            log.critical("bug in the scheduler", exc_info=error)
            raise SystemExit(70) from error


def _is_same_caller(existing: Request, request: Request) -> bool:
    """Whether a request that is asked for again is the one that is there, asked by whoever did."""
    return (
        bool(request.attach_secret_digest)
        and request.attach_secret_digest == existing.attach_secret_digest
        and request.digest == existing.digest
    )
