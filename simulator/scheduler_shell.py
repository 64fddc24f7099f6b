"""The shell of the scheduler: `scheduler_svc.loop`, `ports` and `servicer` without asyncio.

What they do one after another in coroutines is here one callback after another, under the same
names. Two things differ. Deliveries are not merged for slow readers. And where a seed says so
(`Knobs.resumes_sessions`), a session whose connection broke is resumed and the batch in flight sent
again, which the memory service can do and the real shell does not ask for yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from scheduler_svc.core import events, ops
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import InvalidRequestError, ModelLimits, resolve
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason
from simulator.checkers import check_victims
from simulator.clock import MS, SECOND
from simulator.connection import Connection, Mailbox
from simulator.messages import (
    Accepted,
    ApplyBatch,
    AttachPool,
    Execute,
    Generate,
    OpenSession,
    Output,
    PoolAttached,
    SessionOpened,
    WorkerInfo,
)
from simulator.network import UNAVAILABLE, Call, End
from simulator.process import Process, Surroundings
from simulator.scheduler_marks import count_abort, count_batch, count_step
from simulator.worker import Letters, expect

# As in `scheduler_svc.loop` and `scheduler_svc.ports`.
RECONNECT_FIRST_US = 50 * MS
RECONNECT_MOST_US = SECOND
OPEN_DEADLINE_US = 5 * SECOND
BATCH_DEADLINE_US = 30 * SECOND
STEP_DEADLINE_US = 300 * SECOND
RESUME_PAUSE_US = 50 * MS
RESUME_FOR_US = SECOND


class SchedulerShell(Process):
    """One scheduler: a machine, its two peers, and the callers' mailboxes."""

    machine: Machine | None
    mailboxes: dict[str, Mailbox]
    worker_info: WorkerInfo | None
    _connection: Connection
    _pause_us: int

    def __init__(self, name: str, world: Surroundings, kvmem: Process, worker: Process) -> None:
        super().__init__(name, world)
        self._kvmem, self._worker = kvmem, worker
        knobs = world.knobs
        self._config = SchedulerConfig(
            knobs.max_num_batched_tokens, knobs.max_num_seqs, knobs.max_waiting, knobs.watermark
        )

    def boot(self) -> None:
        self.machine = None
        self.mailboxes = {}
        self.worker_info = None
        self._pause_us = RECONNECT_FIRST_US
        self._connection = Connection(self.clock.now_us)
        self.note("starts")
        self._connect()

    @property
    def serving(self) -> bool:
        return self.alive and self._connection.serving

    @property
    def at_rest(self) -> bool:
        """Connected, with nothing to do and nobody to answer."""
        machine = self.machine
        return self.serving and machine is not None and machine.idle and not self.mailboxes

    # ---- for callers: servicer.Generate, Engine.submit, abort, leave ----

    def accept(self, service: str, end: End) -> None:
        assert service == "Generate", service
        end.on_message = partial(self._generate, end)

    def serve(self, method: str, request: object) -> bool:
        assert method == "Abort"
        assert isinstance(request, str)
        return self._abort(request)

    def _generate(self, end: End, message: Generate) -> None:
        machine, worker = self.machine, self.worker_info
        if machine is None or worker is None:
            end.close("NOT_READY")
            return
        geometry = worker.geometry
        limits = ModelLimits(
            geometry.max_model_len,
            worker.vocab_size,
            geometry.num_blocks,
            geometry.block_size,
            machine.config.max_num_seqs,
        )
        try:
            params = resolve(
                message.params,
                max_tokens=message.params.max_tokens,
                prompt_token_ids=message.prompt_token_ids,
                limits=limits,
            )
        except InvalidRequestError as error:
            end.close(error.reason)
            return
        if message.request_id in self.mailboxes:
            self.world.marks.hit("same id while live")
            end.close("REQUEST_EXISTS")
            return
        request = Request(message.request_id, message.prompt_token_ids, params)
        mailbox = self.mailboxes[message.request_id] = Mailbox(end, request)
        end.on_end = lambda _: self._leave(message.request_id, mailbox, complete=False)
        self._handle(events.RequestArrived(request))

    def _abort(self, request_id: str) -> bool:
        mailbox = self.mailboxes.pop(request_id, None)
        if mailbox is None:
            return False
        mailbox.end.close("UNKNOWN_REQUEST")
        assert self.machine is not None
        group = self.machine.groups.get(request_id)
        if group is not None:
            count_abort(self.world.marks, group, self._connection.step)
        self.note(f"aborts {request_id}")
        self._handle(events.AbortRequested(request_id))
        return True

    def _leave(self, request_id: str, mailbox: Mailbox, *, complete: bool) -> None:
        if self.mailboxes.get(request_id) is not mailbox:
            return
        if not complete:
            self._abort(request_id)
            return
        del self.mailboxes[request_id]
        mailbox.end.close("OK")
        self._handle(events.Delivered(request_id))

    # ---- the life of the engine: Engine.run, _connect, KvMemoryPort.open, _disconnect ----

    def _connect(self) -> None:
        former, self._connection = self._connection, Connection(self.clock.now_us)
        connection = self._connection
        connection.session = former.session
        if former.execute is not None:
            former.execute.close("CANCELLED")
        self._call(self._worker, "GetInfo", None, self._on_described)

    def _call(
        self, peer: Process, method: str, request: object, on_reply: Callable[[Any], None]
    ) -> None:
        """A unary call on the way to being connected."""
        guarded = partial(self._of, self._connection)
        call = Call(self, peer, method, request, guarded(on_reply), guarded(self._on_not_connected))
        self.network.call(call, OPEN_DEADLINE_US)

    def _of(self, connection: Connection, action: Callable[..., None]) -> Callable[..., None]:
        """`action`, unless the connection is over by then."""

        def guarded(*args: Any) -> None:
            if self._connection is connection:
                action(*args)

        return guarded

    def _on_not_connected(self, reason: str) -> None:
        self.note(f"not connected: {reason}")
        # Nothing of this attempt goes on; a session stream is left until the next one opens.
        former, self._connection = self._connection, Connection(self.clock.now_us)
        self._connection.session, self._connection.execute = former.session, former.execute
        self.after(self._pause_us, self._of(self._connection, self._connect))
        self._pause_us = min(self._pause_us * 2, RECONNECT_MOST_US)

    def _on_described(self, worker: WorkerInfo) -> None:
        known = self.worker_info
        if known is None or known.max_num_batched_tokens != worker.max_num_batched_tokens:
            self.machine = Machine(_within_limits(self._config, worker), (0,), Letters)
        self.worker_info = worker
        connection = self._connection
        connection.worker = worker
        if connection.session is not None:
            connection.session.close("CANCELLED")
        self._open_session(OpenSession(self.name), self._on_opened, self._on_not_connected)
        self.after(OPEN_DEADLINE_US, self._of(connection, self._on_open_deadline))

    def _on_open_deadline(self) -> None:
        if not self._connection.serving and not self._connection.lost:
            self._on_not_connected("KVMEM_LOST")

    def _open_session(
        self,
        message: OpenSession,
        on_opened: Callable[[SessionOpened], None],
        on_end: Callable[[str], None],
    ) -> None:
        connection = self._connection
        stream = self.network.open_stream(self, self._kvmem, "Session")
        connection.session = stream
        stream.on_message = self._of(connection, on_opened)
        stream.on_end = self._of(connection, on_end)
        stream.send(message)

    def _on_opened(self, opened: SessionOpened) -> None:
        connection = self._connection
        assert connection.session is not None
        assert connection.worker is not None
        connection.session.on_end = self._of(connection, self._on_kvmem_ended)
        worker = connection.worker
        request = AttachPool(opened.fence, worker.boot_id, worker.geometry)
        self._call(self._kvmem, "AttachPool", request, partial(self._on_attached, opened))

    def _on_attached(self, opened: SessionOpened, attached: PoolAttached) -> None:
        connection = self._connection
        assert self.machine is not None
        assert connection.worker is not None
        assert connection.session is not None
        needed = self._config.max_waiting + 2 * self._config.max_num_seqs
        if attached.levels.num_free_sequences < needed:
            self._on_not_connected("INTERNAL")
            return
        connection.fence = attached.fence
        connection.last_result_batch_seq = opened.next_batch_seq - 1
        connection.session.on_message = self._of(connection, self._on_batch_result)
        connection.serving = True
        self._pause_us = RECONNECT_FIRST_US
        geometry = connection.worker.geometry
        self.note(f"is connected: {attached.fence.session_id}, {attached.fence.worker_boot_id}")
        self._handle(
            events.Connected(
                opened.next_batch_seq,
                opened.last_step_id,
                geometry.num_blocks,
                geometry.block_size,
                attached.levels,
            )
        )
        self._watch(self._kvmem, self._on_kvmem_ended)
        self._watch(self._worker, self._on_worker_ended)
        if not connection.session.open:
            self._on_kvmem_ended(UNAVAILABLE)

    def _watch(self, peer: Process, on_end: Callable[[str], None]) -> None:
        watch = self.network.open_stream(self, peer, "Health")
        watch.on_end = self._of(self._connection, on_end)
        self._connection.watches.append(watch)

    def _on_worker_ended(self, reason: str) -> None:
        self._lose("WORKER_LOST" if reason == UNAVAILABLE else reason)

    def _on_kvmem_ended(self, reason: str) -> None:
        connection = self._connection
        if not connection.serving:
            # Between the session's opening and the pool's: AttachPool will say what is wrong.
            return
        if self.world.knobs.resumes_sessions and reason == UNAVAILABLE and not connection.lost:
            self._resume()
        else:
            self._lose("KVMEM_LOST" if reason == UNAVAILABLE else reason)

    def _lose(self, reason: str) -> None:
        """The first loss counts; the engine gets to it in its next turn."""
        connection = self._connection
        if connection.serving and not connection.lost:
            connection.lost = reason
            self.after(self.world.draw.randint(0, 200), self._of(connection, self._disconnect))

    def _disconnect(self) -> None:
        connection = self._connection
        reason = connection.lost
        self.note(f"has lost a peer: {reason}")
        connection.serving = False
        for watch in connection.watches:
            watch.close("CANCELLED")
        told = reason if reason in ("WORKER_LOST", "KVMEM_LOST") else "NOT_READY"
        self._handle(events.Disconnected(told, "a peer was lost"))
        self._connect()

    # ---- resuming ----

    def _resume(self) -> None:
        """Go on with the session over a new connection, for as long as its grace may last."""
        connection = self._connection
        if connection.resuming_since_us is not None or connection.fence is None:
            return
        connection.resuming_since_us = self.clock.now_us
        self.note(f"tries to resume {connection.fence.session_id}")
        self._try_to_resume()

    def _try_to_resume(self) -> None:
        connection = self._connection
        assert connection.session is not None
        connection.session.close("CANCELLED")
        message = OpenSession(self.name, connection.fence, connection.last_result_batch_seq)
        self._open_session(message, self._on_resumed, self._on_not_resumed)

    def _on_not_resumed(self, reason: str) -> None:
        connection = self._connection
        assert connection.resuming_since_us is not None
        if reason != UNAVAILABLE:
            self._lose(reason)
        elif self.clock.now_us - connection.resuming_since_us > RESUME_FOR_US:
            self._lose("KVMEM_LOST")
        else:
            self.after(RESUME_PAUSE_US, self._of(connection, self._try_to_resume))

    def _on_resumed(self, opened: SessionOpened) -> None:
        connection = self._connection
        assert connection.session is not None
        connection.resuming_since_us = None
        connection.session.on_message = self._of(connection, self._on_batch_result)
        connection.session.on_end = self._of(connection, self._on_kvmem_ended)
        self._watch(self._kvmem, self._on_kvmem_ended)
        batch = connection.batch
        if batch is not None:
            if opened.next_batch_seq == batch.batch_seq:
                self.world.marks.hit("batch lost and sent again")
            self._send_batch(batch)

    # ---- commands: Engine._handle, _carry_out, _apply, _execute ----

    def _handle(self, event: events.Event) -> None:
        assert self.machine is not None
        for command in self.machine.handle(event, self.clock.now_us / SECOND):
            self._carry_out(command)

    def _carry_out(self, command: events.Command) -> None:
        connection = self._connection
        match command:
            case events.ApplyBatch(batch):
                expect(connection.batch is None, "one batch in flight", f"{batch.batch_seq}")
                check_victims(batch)
                connection.batch = batch
                if connection.resuming_since_us is None:
                    self._send_batch(batch)
            case events.ExecuteStep(step):
                expect(connection.step is None, "one step in flight", f"{step.step_id}")
                connection.step = step
                self._execute(step)
            case events.Accepted(request_id):
                self.world.checks.commits.check_accepted(self._record_key(request_id))
                if request_id in self.mailboxes:
                    self.mailboxes[request_id].end.send(Accepted())
            case events.Emit(request_id):
                if request_id in self.mailboxes:
                    self._emit(command, self.mailboxes[request_id])
            case events.Reject(request_id, reason):
                mailbox = self.mailboxes.pop(request_id, None)
                self.note(f"rejects {request_id}: {reason}")
                # A lost peer ends also what its caller has just aborted.
                told = mailbox is not None or connection.lost
                expect(told, "refusals have a caller", f"{request_id}: {reason} was told to nobody")
                if mailbox is not None:
                    mailbox.end.close(reason)

    def _record_key(self, request_id: str) -> tuple[str, int, str]:
        fence = self._connection.fence
        assert fence is not None
        return fence.kvmem_boot_id, fence.epoch, request_id

    def _emit(self, command: events.Emit, mailbox: Mailbox) -> None:
        for delta in command.deltas:
            emitted = mailbox.emitted.setdefault(delta.index, [])
            emitted.extend(delta.token_ids)
            key = self._record_key(command.request_id)
            self.world.checks.commits.check_emitted(key, delta.index, emitted)
            if delta.finish_reason is FinishReason.KV_CAPACITY:
                assert self._connection.worker is not None
                self.world.marks.hit("kv_capacity end")
                self.world.checks.check_capacity_end(
                    mailbox.request, self._connection.worker.geometry
                )
        last = command.times is not None
        mailbox.end.send(Output(command.deltas, last))
        if last:
            # When the caller's stream has taken it.
            delay_us = self.world.draw.choice([0, 100, 5 * MS])
            self.after(delay_us, partial(self._leave, command.request_id, mailbox, complete=True))

    def _send_batch(self, batch: ops.Batch) -> None:
        connection = self._connection
        assert connection.session is not None
        assert connection.fence is not None
        if not connection.session.open:
            self._on_kvmem_ended(UNAVAILABLE)
            return
        connection.session.send(ApplyBatch(connection.fence, batch))
        deadline = self._of(connection, partial(self._on_batch_deadline, batch))
        self.after(BATCH_DEADLINE_US, deadline)

    def _on_batch_deadline(self, batch: ops.Batch) -> None:
        if self._connection.batch is batch:
            self._lose("KVMEM_LOST")

    def _on_batch_result(self, result: ops.BatchResult) -> None:
        connection = self._connection
        batch, connection.batch = connection.batch, None
        expect(
            batch is not None, "one batch in flight", f"a result of {result.batch_seq}, no batch"
        )
        assert batch is not None
        connection.last_result_batch_seq = result.batch_seq
        connection.num_copies_planned += len(result.copy_src)
        starved = count_batch(self.world.marks, batch, result)
        self._handle(events.BatchApplied(result))
        following = self._connection.batch
        preempting = following is not None and any(
            isinstance(op, ops.Preempt | ops.Free) for op in following.ops
        )
        if starved and result.levels.num_quarantined_blocks and not preempting:
            self.world.marks.hit("quarantined block waited for")

    def _execute(self, step: ops.Step) -> None:
        connection = self._connection
        if connection.execute is None:
            stream = self.network.open_stream(self, self._worker, "Execute")
            stream.on_message = self._of(connection, self._on_step_result)
            stream.on_end = self._of(connection, self._on_worker_ended)
            connection.execute = stream
        elif not connection.execute.open:
            self._lose("WORKER_LOST")
            return
        assert connection.fence is not None
        assert self.machine is not None
        count_step(self.world.marks, step, self.machine.groups.values())
        if len(step.copy_src) < connection.num_copies_planned:
            self.world.marks.hit("copy of a preempted group dropped")
        connection.num_copies_planned = 0
        connection.execute.send(Execute(connection.fence, step))
        self.after(STEP_DEADLINE_US, self._of(connection, partial(self._on_step_deadline, step)))

    def _on_step_deadline(self, step: ops.Step) -> None:
        if self._connection.step is step:
            self._lose("WORKER_LOST")

    def _on_step_result(self, result: ops.StepResult) -> None:
        connection = self._connection
        connection.step = None
        self._handle(events.StepExecuted(result))


def _within_limits(config: SchedulerConfig, worker: WorkerInfo) -> SchedulerConfig:
    max_num_batched_tokens = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    return replace(config, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
