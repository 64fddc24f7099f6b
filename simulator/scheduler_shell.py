"""The shell of the scheduler: `scheduler_svc.loop` and `scheduler_svc.servicer` without asyncio.

What they do one after another in coroutines is here one callback after another, under the same
names. Deliveries are not merged for slow readers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from scheduler_svc.core import events, ops
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import InvalidRequestError, ModelLimits, resolve
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.sequence import GroupStatus, Request
from simulator.checkers import check_computed_once, check_victims
from simulator.clock import MS, SECOND
from simulator.kvmem_link import KvmemLink
from simulator.mailboxes import Mailbox, Mailboxes
from simulator.messages import (
    Abort,
    Generate,
    Output,
    WorkerInfo,
)
from simulator.network import End, Reason, Refused
from simulator.process import Process, Surroundings
from simulator.records import digest_of, request_of
from simulator.scheduler_marks import (
    count_abort,
    count_batch,
    count_reentered,
    count_retained,
    count_step,
)
from simulator.takeover import TakeOver
from simulator.turns import check_turns
from simulator.worker import Letters, expect
from simulator.worker_link import WorkerLink

# As in `scheduler_svc.loop`.
RECONNECT_FIRST_US = 50 * MS
RECONNECT_MOST_US = SECOND
STANDBY_POLL_US = 100 * MS


class SchedulerShell(Process):
    """One scheduler: a machine, its two peers, and the callers' mailboxes."""

    machine: Machine | None
    mailboxes: Mailboxes
    worker_info: WorkerInfo | None
    _kvmem: KvmemLink
    _worker: WorkerLink
    # Of this process alone, so that no other is taken for it.
    _holder: str
    # Where the scheduler is that has the session; None: nobody else has it.
    _owner_address: str | None
    _serving: bool
    _lost: str
    # Whose records the machine goes by.
    _kvmem_boot_id: str
    _pause_us: int
    # Another object, another wait for a lost peer.
    _losing_patience: object | None
    _num_copies_planned: int

    def __init__(self, name: str, world: Surroundings, kvmem: Process, worker: Process) -> None:
        super().__init__(name, world)
        self._peers = kvmem, worker
        knobs = world.knobs
        self._config = SchedulerConfig(
            knobs.max_num_batched_tokens,
            knobs.max_num_seqs,
            knobs.max_waiting,
            knobs.watermark,
            use_prefix_cache=knobs.use_prefix_cache
            and not (knobs.is_mixed and name != "scheduler-0"),
            preemption=knobs.preemption,
        )

    def boot(self) -> None:
        kvmem, worker = self._peers
        self._holder = f"{self.name}/{self.life}"
        self.machine = None
        self.mailboxes = Mailboxes(self, self._on_caller_gone)
        self.worker_info = None
        self._kvmem = KvmemLink(self, kvmem, self._holder, self._lose)
        self._worker = WorkerLink(self, worker, self._lose)
        self._owner_address = None
        self._serving = False
        self._lost = ""
        self._kvmem_boot_id = ""
        self._losing_patience = None
        self._num_copies_planned = 0
        self.note("starts")
        self._become_owner()

    @property
    def serving(self) -> bool:
        return self.alive and self._serving

    @property
    def at_rest(self) -> bool:
        """Connected, with nothing to do and nobody to answer or to wait for."""
        machine = self.machine
        return self.serving and machine is not None and machine.idle and not self.mailboxes

    def holds(self, session_id: str) -> bool:
        return self.serving and self._kvmem.fence.session_id == session_id

    # ---- for callers: servicer.Generate, Engine.submit, abort, leave ----

    def accept(self, service: str, end: End) -> None:
        assert service == "Generate", service
        end.on_message = partial(self._generate, end)

    def serve(self, method: str, request: object) -> bool:
        assert isinstance(request, Abort), method
        return self._abort(request.request_id, digest_of(request.secret))

    def _ready_machine(self) -> Machine:
        if self._owner_address is not None:
            raise Refused(Reason("NOT_LEADER", holder_address=self._owner_address))
        if self.machine is None:
            raise Refused("NOT_READY")
        return self.machine

    def _limits(self) -> ModelLimits:
        machine, worker = self._ready_machine(), self.worker_info
        assert worker is not None
        geometry = worker.geometry
        return ModelLimits(
            geometry.max_model_len,
            worker.vocab_size,
            geometry.num_blocks,
            geometry.block_size,
            machine.config.max_num_seqs,
        )

    def _generate(self, end: End, message: Generate) -> None:
        try:
            params = resolve(
                message.params,
                max_tokens=message.params.max_tokens,
                prompt_token_ids=message.prompt_token_ids,
                limits=self._limits(),
            )
            mailbox = self._submit(request_of(message, params), message, end)
        except (InvalidRequestError, Refused) as error:
            end.close(error.reason)
            return
        end.on_end = lambda _: self._leave(message.request_id, mailbox, complete=False)

    def _submit(self, request: Request, message: Generate, end: End) -> Mailbox:
        """Enter a request, or attach to it when it is there already. Raises Refused."""
        machine, marks = self._ready_machine(), self.world.marks
        request_id, received = request.request_id, message.attachment.received
        existing = machine.request_of(request_id)
        if existing is None:
            mailbox = self.mailboxes.attach(request, end)
            mailbox.received(dict(received))
            marks.hit("re-entered by its caller", bool(received))
            self._handle(events.RequestArrived(request, received))
            return mailbox
        if not _is_same_caller(existing, request):
            marks.hit("same id while live")
            raise Refused("REQUEST_EXISTS")
        mailbox = self.mailboxes.attach(existing, end)
        mailbox.received(dict(received))
        mailbox.came_late = machine.has_ended(request_id)
        self._handle(events.Attached(request_id, received))
        self.note(f"{request_id} is attached again")
        return mailbox

    def _abort(self, request_id: str, secret_digest: bytes) -> bool:
        machine = self._ready_machine()
        existing = machine.request_of(request_id)
        if existing is None:
            return False
        if secret_digest and existing.attach_secret_digest != secret_digest:
            return False
        self.mailboxes.stop_waiting(request_id)
        self.mailboxes.fail(request_id, "UNKNOWN_REQUEST")
        self._request_abort(request_id)
        return True

    def _request_abort(self, request_id: str) -> None:
        assert self.machine is not None
        group = self.machine.groups.get(request_id)
        if group is not None:
            count_abort(self.world.marks, group, self._worker.steps)
        self.note(f"aborts {request_id}")
        self._handle(events.AbortRequested(request_id))

    def _leave(self, request_id: str, mailbox: Mailbox, *, complete: bool) -> None:
        if self.mailboxes.get(request_id) is not mailbox:
            return
        self.mailboxes.remove(request_id)
        if complete:
            self.world.marks.hit("result delivered after its end", mailbox.came_late)
            self._handle(events.Delivered(request_id))
        elif mailbox.request.detach_ttl_ms:
            self.note(f"{request_id} has no caller for now")
            self._handle(events.Detached(request_id))
            self.mailboxes.wait_for(request_id, mailbox.request.detach_ttl_ms * MS)
        else:
            self._request_abort(request_id)

    def _on_caller_gone(self, request_id: str, last: bool) -> None:
        machine = self.machine
        request = machine.request_of(request_id) if machine is not None else None
        if machine is None or request is None:
            return
        if machine.has_ended(request_id) and request.detach_ttl_ms and not last:
            # It costs no blocks any more.
            self.mailboxes.wait_for(request_id, self.world.knobs.result_us, last=True)
            return
        self.world.marks.hit("detached request expired", bool(request.detach_ttl_ms))
        self.note(f"nobody came back for {request_id}")
        self._request_abort(request_id)

    # ---- the life of the engine: Engine.run, _become_owner, _connect, _disconnect ----

    def _become_owner(self) -> None:
        self._pause_us = RECONNECT_FIRST_US
        self._connect()

    def _connect(self) -> None:
        needed = self._config.max_waiting + 2 * self._config.max_num_seqs
        TakeOver(
            self._kvmem,
            self._worker,
            needed,
            self._on_opened,
            self._on_connected,
            self._on_not_connected,
        ).begin()

    def _on_opened(self) -> None:
        self._lost = ""
        self._kvmem.watch()

    def _on_connected(self, worker: WorkerInfo, connected: events.Connected) -> None:
        if self.machine is None:
            self.machine = Machine(_within_limits(self._config, worker), (0,), Letters)
        self.worker_info = worker
        if self._lost:
            self._on_not_connected(self._lost)
            return
        self._owner_address = None
        self._serving = True
        self._losing_patience = None
        self.note(
            f"is connected: {self._kvmem.fence.session_id}, {worker.boot_id},"
            f" {len(connected.adopted)} requests, {len(connected.retained)} results kept"
        )
        self._kvmem_boot_id = self._kvmem.fence.kvmem_boot_id
        self._num_copies_planned = len(connected.pending_copies)
        marks = self.world.marks
        count_reentered(marks, self.machine.groups, connected)
        self._handle(connected)
        count_retained(marks, self._kvmem.batch)
        self._worker.watch()

    def _on_not_connected(self, reason: str) -> None:
        self.note(f"not connected: {reason}")
        self._cancel_tasks()
        holder = reason.holder if isinstance(reason, Reason) else self._holder
        if reason == "SESSION_HELD" and holder != self._holder:
            assert isinstance(reason, Reason)
            self._stand_by(reason.holder_address)
            self.after(STANDBY_POLL_US, self._connect)
        else:
            self.after(self._pause_us, self._connect)
            self._pause_us = min(self._pause_us * 2, RECONNECT_MOST_US)

    def _stand_by(self, owner_address: str) -> None:
        """Another scheduler has the session, and with it every request."""
        self._owner_address = owner_address
        if self.machine is not None:
            self.note(f"{owner_address} has taken over")
            self.world.marks.hit("stood down", bool(self.machine.groups))
            self.machine = None
            self.worker_info = None
        self.mailboxes.stop_waiting_for_all()
        self.mailboxes.fail_all(Reason("NOT_LEADER", holder_address=owner_address))

    def _cancel_tasks(self) -> None:
        self._kvmem.cancel()
        self._worker.cancel()

    def _lose(self, reason: str) -> None:
        """The first loss counts; the engine gets to it in its next turn."""
        if not self._lost:
            self._lost = reason
            if self._serving:
                self.after(self.world.draw.randint(0, 200), self._disconnect)

    def _disconnect(self) -> None:
        self.note(f"has lost a peer: {self._lost}")
        self._serving = False
        self._handle(events.Disconnected())
        self._cancel_tasks()
        patience = self._losing_patience = object()
        self.after(self.world.knobs.recovery_us, partial(self._lose_patience, patience, self._lost))
        self._become_owner()

    def _lose_patience(self, patience: object, lost: str) -> None:
        """Tell the callers once the peer has been gone for too long."""
        if self._losing_patience is not patience:
            return
        reason = lost if lost in ("WORKER_LOST", "KVMEM_LOST") else "NOT_READY"
        machine = self.machine
        for request_id in self.mailboxes.fail_all(reason):
            self.world.marks.hit("patience lost")
            request = machine.request_of(request_id) if machine is not None else None
            if request is not None:
                self._handle(events.Detached(request_id))
                self.mailboxes.wait_for(request_id, request.detach_ttl_ms * MS)

    # ---- commands: Engine._handle, _carry_out, _apply, _execute ----

    def _handle(self, event: events.Event) -> None:
        assert self.machine is not None
        for command in self.machine.handle(event, self.clock.now_us / SECOND):
            self._carry_out(command)

    def _carry_out(self, command: events.Command) -> None:
        match command:
            case events.ApplyBatch(batch):
                self._apply(batch)
            case events.ExecuteStep(step):
                self._execute(step)
            case events.Adopted(request_id):
                self._wait_for_adopted(request_id)
            case events.Accepted(request_id):
                self.world.checks.commits.check_accepted(self._record_key(request_id))
                mailbox = self.mailboxes.get(request_id)
                if mailbox is not None:
                    mailbox.accept()
            case events.Emit(request_id):
                mailbox = self.mailboxes.get(request_id)
                if mailbox is not None:
                    self._emit(command, mailbox)
            case events.Reject(request_id, reason):
                self.note(f"rejects {request_id}: {reason}")
                self.mailboxes.fail(request_id, reason)

    def _wait_for_adopted(self, request_id: str) -> None:
        assert self.machine is not None
        group = self.machine.groups[request_id]
        self.world.marks.hit("adopted while it ran", group.status is GroupStatus.RUNNING)
        self.mailboxes.wait_for(request_id, group.request.detach_ttl_ms * MS)

    def _record_key(self, request_id: str) -> tuple[str, str, int]:
        assert self.machine is not None
        arrival_number = self.machine.groups[request_id].arrival_number
        return self._kvmem_boot_id, request_id, arrival_number

    def _emit(self, command: events.Emit, mailbox: Mailbox) -> None:
        for delta in command.deltas:
            emitted = mailbox.emitted.setdefault(delta.candidate, [])
            emitted.extend(delta.token_ids)
            key = self._record_key(command.request_id)
            self.world.checks.commits.check_emitted(key, delta.candidate, emitted)
        last = command.times is not None
        mailbox.put(Output(command.deltas, last))
        if last:
            # When the caller's stream has taken it.
            delay_us = self.world.draw.choice([0, 100, 5 * MS])
            self.after(delay_us, partial(self._leave, command.request_id, mailbox, complete=True))

    def _apply(self, batch: ops.Batch) -> None:
        expect(self._kvmem.batch is None, "one batch in flight", f"{batch.batch_seq}")
        assert self.machine is not None
        assert self.worker_info is not None
        check_victims(batch)
        overtaken = check_turns(
            batch,
            self.machine.groups.values(),
            self.worker_info.geometry.block_size,
            uses_cache=self.machine.config.use_prefix_cache,
        )
        self.world.marks.hit("overtaken by priority", overtaken)
        ended = self.world.checks.check_capacity_ends(
            batch,
            self.machine.groups.values(),
            self.worker_info.geometry,
            self.world.knobs.configuration.quota,
        )
        self.world.marks.hit("kv_capacity end", ended)
        self._kvmem.apply(batch, partial(self._on_batch_result, batch))

    def _on_batch_result(self, batch: ops.Batch, result: ops.BatchResult) -> None:
        self._num_copies_planned += len(result.copy_src)
        starved = count_batch(self.world.marks, batch, result)
        knobs = self.world.knobs
        wants_swaps = knobs.preemption is PreemptionMode.SWAP and knobs.num_host_blocks
        recomputed = any(isinstance(op, ops.Preempt) for op in batch.ops)
        self.world.marks.hit("host tier full", bool(wants_swaps and recomputed))
        self._handle(events.BatchApplied(result))
        following = self._kvmem.batch
        preempting = following is not None and any(
            isinstance(op, ops.Preempt | ops.SwapOut | ops.Free) for op in following.ops
        )
        if starved and result.levels.num_quarantined_blocks and not preempting:
            self.world.marks.hit("quarantined block waited for")

    def _execute(self, step: ops.Step) -> None:
        assert self.machine is not None
        most = self.machine.config.max_num_seqs
        num_rows = len(step.sequence_ids)
        expect(num_rows <= most, "sequences in a step", f"{num_rows} in step {step.step_id}")
        count_step(self.world.marks, step, self.machine.groups.values())
        if self.machine.config.use_prefix_cache and not self.world.knobs.is_mixed:
            block_size = self.worker_info.geometry.block_size if self.worker_info else 1
            check_computed_once(step, self.machine.groups.values(), block_size)
        if len(step.copy_src) < self._num_copies_planned:
            self.world.marks.hit("copy of a preempted group dropped")
        self._num_copies_planned = 0
        self.world.marks.hit("one step ahead", bool(self._worker.steps))
        self._worker.execute(
            step, self._kvmem.fence, lambda result: self._handle(events.StepExecuted(result))
        )


def _is_same_caller(existing: Request, request: Request) -> bool:
    return (
        bool(request.attach_secret_digest)
        and request.attach_secret_digest == existing.attach_secret_digest
        and request.digest == existing.digest
    )


def _within_limits(config: SchedulerConfig, worker: WorkerInfo) -> SchedulerConfig:
    max_num_batched_tokens = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    return replace(config, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
