"""The engine: carries the machine's commands out and brings it what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog
from opentelemetry.trace import Span

from octavo.service.errors import ServiceError
from octavo.service.telemetry import Telemetry, traceparent
from scheduler_svc.core import events
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import ModelLimits
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import TextStream
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.ports import KvMemoryPort, PeerLostError, WorkerDescription, WorkerPort

log = structlog.get_logger()

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 1.0
DRAIN_POLL_S = 0.05


class Engine:
    """One scheduler: a machine, its two peers, and the callers' mailboxes."""

    def __init__(
        self,
        config: SchedulerConfig,
        kvmem: KvMemoryPort,
        worker: WorkerPort,
        telemetry: Telemetry,
        open_text: Callable[[WorkerDescription], Callable[[], TextStream]],
    ) -> None:
        """`open_text` loads what is needed to detokenize for the worker's model."""
        self._config = config
        self._kvmem = kvmem
        self._worker = worker
        self._telemetry = telemetry
        self._open_text = open_text
        self._machine: Machine | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_span: Span | None = None
        self._lost: asyncio.Future[PeerLostError] | None = None
        self._draining = False
        self.worker_description: WorkerDescription | None = None

    # ---- for the servicer ----

    @property
    def machine(self) -> Machine:
        """The core, once there is a worker. Raises ServiceError NOT_READY before."""
        if self._machine is None:
            raise ServiceError(
                "NOT_READY", "the scheduler has no worker yet; try again soon", retry_after_ms=500
            )
        return self._machine

    def limits(self) -> ModelLimits:
        """What requests are checked against. Raises ServiceError NOT_READY."""
        worker = self.worker_description
        if worker is None:
            raise ServiceError(
                "NOT_READY", "the scheduler has no worker yet; try again soon", retry_after_ms=500
            )
        return ModelLimits(
            worker.max_model_len,
            worker.vocab_size,
            worker.num_blocks,
            worker.block_size,
            self.machine.config.max_num_seqs,
        )

    def submit(self, request: Request) -> Mailbox:
        """Enter a request. Raises ServiceError REQUEST_EXISTS, DRAINING or NOT_READY."""
        machine = self.machine
        if self._draining:
            raise ServiceError("DRAINING", "the scheduler is shutting down", retry_after_ms=1000)
        if request.request_id in self._mailboxes:
            raise ServiceError(
                "REQUEST_EXISTS", f"a live request has the id {request.request_id!r}"
            )
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        self._handle(machine, events.RequestArrived(request))
        return mailbox

    def abort(self, request_id: str) -> bool:
        """Stop a request within one step. False when no such request is live."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is None:
            return False
        mailbox.fail(ServiceError("UNKNOWN_REQUEST", f"request {request_id!r} was aborted"))
        self._handle(self.machine, events.AbortRequested(request_id))
        return True

    def leave(self, request_id: str, mailbox: Mailbox, *, complete: bool) -> None:
        """The caller of `mailbox` is done: its record may go, with the request if it still runs.

        Nothing happens when the request ended before: its id may be another's by now.
        """
        if self._mailboxes.get(request_id) is not mailbox:
            return
        if not complete:
            self.abort(request_id)
            return
        del self._mailboxes[request_id]
        self._handle(self.machine, events.Delivered(request_id))

    # ---- the life of the engine ----

    async def run(self, holder: str, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Connect, serve until a peer is lost, connect again; until cancelled."""
        pause_s, said = RECONNECT_FIRST_S, ""
        try:
            while True:
                try:
                    await self._connect(holder)
                except PeerLostError as error:
                    if error.message != said:
                        log.warning("not connected", reason=error.reason, error=error.message)
                        said = error.message
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, RECONNECT_MOST_S)
                    continue
                pause_s, said = RECONNECT_FIRST_S, ""
                await on_ready(True)
                assert self._lost is not None
                error = await self._lost
                log.error("peer lost", reason=error.reason, error=error.message)
                # First, so that whoever comes from here on is refused and starts nothing.
                self._disconnect(error)
                await on_ready(False)
                await self._cancel_tasks()
        finally:
            await self._cancel_tasks()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those under way, at most `timeout_s`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._mailboxes and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _connect(self, holder: str) -> None:
        worker = await self._worker.describe()
        known = self.worker_description
        if known is None or _machine_key(known) != _machine_key(worker):
            open_text = await asyncio.to_thread(self._open_text, worker)
            config = _within_limits(self._config, worker)
            self._machine = Machine(config, worker.eos_token_ids, open_text)
        self.worker_description = worker
        connected = await self._kvmem.open(holder, worker)
        needed = self._config.max_waiting + 2 * self._config.max_num_seqs
        if connected.levels.num_free_sequences < needed:
            raise PeerLostError(
                "INTERNAL",
                f"the memory service holds {connected.levels.num_free_sequences} sequences;"
                f" max_waiting + 2 * max_num_seqs is {needed}",
            )
        self._lost = asyncio.get_running_loop().create_future()
        log.info(
            "connected",
            model=worker.model_name,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
        )
        self._handle(self.machine, connected)
        self._spawn(self._kvmem.watch())
        self._spawn(self._worker.watch())

    def _disconnect(self, error: PeerLostError) -> None:
        if self._step_span is not None:
            self._step_span.end()
            self._step_span = None
        reason = error.reason if error.reason in ("WORKER_LOST", "KVMEM_LOST") else "NOT_READY"
        self._handle(self.machine, events.Disconnected(reason, error.message))

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
            case events.ApplyBatch(batch, links):
                parent = self._step_traceparent(links, start=batch.prepares_step)
                self._spawn(self._apply(machine, command, parent))
            case events.ExecuteStep():
                self._spawn(self._execute(machine, command))
            case events.Accepted(request_id):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].accept()
            case events.Emit(request_id):
                if request_id in self._mailboxes:
                    self._mailboxes[request_id].put(command)
            case events.Reject(request_id, reason, message, retry_after_ms):
                mailbox = self._mailboxes.pop(request_id, None)
                if mailbox is not None:
                    mailbox.fail(ServiceError(reason, message, retry_after_ms))

    async def _apply(self, machine: Machine, command: events.ApplyBatch, parent: str) -> None:
        result = await self._kvmem.apply(command.batch, parent)
        self._handle(machine, events.BatchApplied(result))

    async def _execute(self, machine: Machine, command: events.ExecuteStep) -> None:
        span, self._step_span = self._step_span, None
        try:
            result = await self._worker.execute(command.step, traceparent(span) if span else "")
        finally:
            if span is not None:
                span.set_attribute("octavo.step_id", command.step.step_id)
                span.set_attribute("octavo.num_sequences", len(command.step.sequence_ids))
                span.end()
        self._handle(machine, events.StepExecuted(result))

    def _step_traceparent(self, links: tuple[str, ...], *, start: bool) -> str:
        """The context of the step under preparation: one span from its batch to its result."""
        if not (start and self._telemetry.enabled):
            return ""
        if self._step_span is None:
            self._step_span = self._telemetry.start("scheduler.step", links=links)
        return traceparent(self._step_span)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

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


def _machine_key(worker: WorkerDescription) -> tuple[str, tuple[int, ...], int]:
    """What a machine is made for; another worker may serve another model, or smaller steps."""
    return worker.model_path, worker.eos_token_ids, worker.max_num_batched_tokens


def _within_limits(config: SchedulerConfig, worker: WorkerDescription) -> SchedulerConfig:
    """The configuration, with steps no larger than the worker takes."""
    max_num_batched_tokens = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    if max_num_batched_tokens < config.max_num_batched_tokens:
        log.warning(
            "steps are bounded by the worker", max_num_batched_tokens=max_num_batched_tokens
        )
    return replace(config, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
