"""The shell of the memory service: `kvmem_svc.servicer` and `kvmem_svc.__main__` over the
simulated network, with a journal that outlives the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.kvmem_adapter import apply_batch, levels_of
from kvmem_svc.core import batch as kv
from kvmem_svc.core.errors import KvMemoryError
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import ApplyBatch as ApplyBatchMutation
from kvmem_svc.core.mutations import Mutation, PoolConfirmed, Reply, Session
from simulator import checkers, messages
from simulator.clock import MS
from simulator.journal import Disk, Record
from simulator.messages import (
    Adopted,
    AdoptSequences,
    ApplyBatch,
    AttachPool,
    CloseSession,
    Heartbeat,
    OpenSession,
    PoolAttached,
    SessionOpened,
)
from simulator.network import End, Reason, Refused
from simulator.process import Died, Process, Surroundings
from simulator.scheduler_marks import moments_of
from simulator.wording import batch_in_words, result_in_words
from simulator.worker import expect

# As in `kvmem_svc.servicer`.
TICK_US = 100 * MS

# What a scheduler is never told, whoever died: it numbers its batches and steps right, and what
# it may ask for again is kept.
MISTAKES = frozenset(("SEQUENCE_GAP", "BATCH_CONFLICT", "INVALID_BATCH", "STEP_OUT_OF_ORDER"))


class KvmemShell(Process):
    """The memory service. A start goes on from the journal, if there is one."""

    memory: KvMemory
    gatekeeper: Gatekeeper
    # The stream that holds the session.
    _stream: End | None
    # The epoch whose holder has confirmed the pool to this process.
    _confirmed_epoch: int
    _recovered: bool
    _ticking: bool

    def __init__(self, world: Surroundings) -> None:
        super().__init__("kvmem", world)
        self.disk = Disk()
        self._copies = checkers.CopyCheck()
        self._last_holder = ""
        # How the process is to die when it writes the next record, and what happens then.
        self._death: tuple[str, Callable[[], None]] | None = None

    def boot(self) -> None:
        knobs = self.world.knobs
        memory = self.disk.recover(self.memory, self.world.draw) if self.life > 1 else None
        self._recovered = memory is not None
        if memory is None:
            # The least that a scheduler with these limits accepts.
            memory = self.disk.begin(knobs.max_waiting + 2 * knobs.max_num_seqs)
            self._copies = checkers.CopyCheck()
            if self.life > 1:
                self.world.marks.hit("journal lost")
        self.memory = memory
        self.gatekeeper = Gatekeeper(
            memory, knobs.lease_times, self._record, recovered=self._recovered
        )
        self._stream = None
        self._confirmed_epoch = 0
        self._death = None
        self._ticking = False
        self.note(f"starts as {memory.ledger.kvmem_boot_id}, recovered: {self._recovered}")
        checkers.check_memory(memory)
        self.world.checks.kv.on_started(memory)
        self.gatekeeper.configure(knobs.configuration_of(self.life))
        self.after(TICK_US, self._tick)

    @property
    def _now_ms(self) -> int:
        return self.clock.now_us // MS

    def _tick(self) -> None:
        self._ticking = True
        request_ids = self.gatekeeper.tick(self._now_ms)
        self._ticking = False
        if request_ids:
            self.world.marks.hit("orphans expired", len(request_ids))
            self.note(f"nobody came for {request_ids}: expired")
        self.after(TICK_US, self._tick)

    # ---- the journal ----

    def die_in_write(self, how: str, then: Callable[[], None]) -> None:
        """To die with the next record: "torn" in the middle of it, "written" right after it."""
        self._death = (how, then)

    def live_on(self) -> None:
        """Not to die in a write after all."""
        self._death = None

    def _record(self, mutation: Mutation, reply: Reply) -> None:
        """A mutation was carried out; nobody has been answered yet."""
        record = Record(mutation, reply)
        how, then = self._death or ("", None)
        if how == "torn":
            self.disk.tear(record)
        else:
            self.disk.append(record)
            checkers.check_memory(self.memory)
            self.world.checks.commits.on_recorded(self.memory, mutation, reply)
            self.world.checks.kv.on_recorded(
                self.memory, mutation, reply, self._now_ms, is_asked_for=not self._ticking
            )
            self._count(mutation, reply)
            if isinstance(mutation, ApplyBatchMutation):
                assert isinstance(reply, kv.BatchResult)
                self._copies.on_applied(mutation.batch, reply)
            elif isinstance(reply, PoolConfirmed) and reply.is_new_pool:
                self._copies = checkers.CopyCheck()
        if then is not None:
            self.world.marks.hit("torn tail" if how == "torn" else "died before it answered")
            self.note(f"dies with a record {how}: {type(mutation).__name__}")
            self.kill()
            then()
            raise Died

    def _count(self, mutation: Mutation, reply: Reply) -> None:
        if isinstance(mutation, ApplyBatchMutation) and isinstance(reply, kv.BatchResult):
            pairs = zip(mutation.batch.ops, reply.results, strict=True)
            over = [op for op, one in pairs if one.status is kv.OpStatus.TENANT_QUOTA]
            needy = sum(isinstance(op, kv.Admit | kv.Reserve) for op in over)
            self.world.marks.hit("quota refused", needy)

    @property
    def swap_under_way(self) -> bool:
        """Whether a step that is not acknowledged swaps something."""
        manager = self.memory.manager if self.life else None
        if manager is None:
            return False
        steps = manager.pool.moves.by_step.values()
        return any(moves.swap_ins or moves.swap_outs for moves in steps)

    # ---- the session stream ----

    def accept(self, service: str, end: End) -> None:
        if service == "Session":
            end.on_message = partial(self._on_message, end)
            end.on_end = lambda _: self._on_stream_end(end)

    def _on_message(self, end: End, message: OpenSession | ApplyBatch | Heartbeat) -> None:
        try:
            match message:
                case OpenSession():
                    self._open(end, message)
                case ApplyBatch():
                    self._apply(end, message)
                case Heartbeat():
                    self._beat(end)
        except KvMemoryError as error:
            end.close(self._refusal(error))
            self._on_stream_end(end)

    def _open(self, end: End, message: OpenSession) -> None:
        memory = self.memory
        if message.resume is not None:
            session = self.gatekeeper.resume_session(
                message.resume, message.last_result_batch_seq, self._now_ms
            )
            self._let_go_of_stream("UNKNOWN_SESSION")
            self._expect_newest(message.resume)
            self.world.marks.hit("session resumed")
            self.world.marks.hit("session resumed after a recovery", self._recovered)
            self.note(f"resumes {session.session_id} for {message.holder}")
        else:
            session = self.gatekeeper.open_session(
                message.holder, self._now_ms, message.holder_address
            )
            self._let_go_of_stream("STALE_EPOCH")
            if self._last_holder not in ("", message.holder_address):
                self.world.marks.hit("session taken over")
            self._last_holder = message.holder_address
            self.note(f"opens {session.session_id} for {message.holder}")
        self._stream = end
        end.send(
            SessionOpened(
                memory.ledger.fence(),
                memory.ledger.next_batch_seq,
                memory.last_step_id,
                self.gatekeeper.leases.times.lease_ttl_ms,
                self.gatekeeper.mutations_open,
            )
        )

    def _let_go_of_stream(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.close(reason)
            self._stream = None

    def _apply(self, end: End, message: ApplyBatch) -> None:
        memory, batch = self.memory, message.batch
        num_batches = memory.num_batches
        try:
            result = apply_batch(self.gatekeeper, batch, message.fence, self._now_ms)
        except Died:
            self.note(batch_in_words(batch) + ": not answered")
            raise
        self._expect_newest(message.fence, memory.ledger.worker_boot_id)
        self._expect_confirmed()
        if memory.num_batches == num_batches:
            self.world.marks.hit("batch replayed")
            self.note(f"batch {batch.batch_seq} again: the same result")
        else:
            self.note(batch_in_words(batch))
            self.note("   " + result_in_words(batch, result))
            for moment in moments_of(batch, result):
                self.network.count(moment)
        end.send(result)
        if self.world.draw.random() < 0.5:
            # When there is time before the next mutation, which does it otherwise.
            memory.settle()

    def _beat(self, end: End) -> None:
        session = self._session()
        if self._stream is end and session is not None:
            self.gatekeeper.heartbeat(session, self._now_ms)

    def _session(self) -> Session | None:
        return self.memory.ledger.session

    def _on_stream_end(self, end: End) -> None:
        session = self._session()
        if self._stream is end:
            self._stream = None
            if session is not None:
                self.gatekeeper.release_session(session, self._now_ms)
                self.note(f"the stream of {session.session_id} has ended")

    # ---- unary ----

    def serve(self, method: str, request: object) -> object:
        try:
            match request:
                case AttachPool():
                    return self._attach_pool(request)
                case AdoptSequences(fence):
                    adopted = tuple(self.gatekeeper.adopt(fence, self._now_ms))
                    self._expect_confirmed()
                    return Adopted(adopted)
                case messages.Pin(fence, pin):
                    pinned = self.gatekeeper.pin(fence, pin, self._now_ms)
                    self.note(f"pins {pinned.num_pinned_tokens} tokens as {pinned.pin_id}: {pin}")
                    self._expect_confirmed()
                    return pinned
                case messages.Unpin(fence, pin_id):
                    self.gatekeeper.unpin(fence, pin_id, self._now_ms)
                    self.note(f"lets go of pin {pin_id}")
                    return None
                case CloseSession(fence):
                    self.gatekeeper.close_session(fence, self._now_ms)
                    self._let_go_of_stream("UNKNOWN_SESSION")
                    self.note(f"closes {fence.session_id}")
                    return None
        except KvMemoryError as error:
            raise Refused(self._refusal(error), error.message) from error
        raise NotImplementedError(method)

    def _attach_pool(self, request: AttachPool) -> PoolAttached:
        memory = self.memory
        has_records = memory.manager is not None and bool(memory.manager.requests)
        confirmed = self.gatekeeper.attach_pool(
            request.fence,
            request.worker_boot_id,
            request.geometry,
            self._now_ms,
            request.last_executed_step,
        )
        self._expect_newest(request.fence)
        self._confirmed_epoch = memory.ledger.epoch
        self.world.marks.hit("pending copies adopted", bool(confirmed.pending_copies))
        swaps = [*confirmed.pending_swap_ins, *confirmed.pending_swap_outs]
        self.world.marks.hit("pending swaps adopted", bool(swaps))
        if confirmed.is_new_pool:
            self.world.marks.hit("new worker adopted", has_records)
        self.note(
            f"attaches the pool of {request.worker_boot_id}, new: {confirmed.is_new_pool}:"
            f" {request.geometry.num_blocks} blocks of {request.geometry.block_size}; step"
            f" {request.last_executed_step} was the last; pending copies:"
            f" {[(c.src_block_id, c.dst_block_id) for c in confirmed.pending_copies]}, swaps:"
            f" {swaps}"
        )
        return PoolAttached(memory.ledger.fence(), levels_of(memory.levels()), confirmed)

    # ---- checks of this shell's own ----

    def _expect_newest(self, fence: kv.Fence, worker_boot_id: str | None = None) -> None:
        """What was just carried out came from the newest session; checked without the fence."""
        ledger = self.memory.ledger
        right = fence.kvmem_boot_id == ledger.kvmem_boot_id and fence.epoch == ledger.epoch
        if worker_boot_id is not None:
            right = right and fence.worker_boot_id == worker_boot_id
        expect(right, "fenced at kvmem", f"{fence} was obeyed in epoch {ledger.epoch}")

    def _expect_confirmed(self) -> None:
        """Nothing is changed or adopted before this process was told that the KV is there, and
        that nobody else writes it."""
        epoch = self.memory.ledger.epoch
        expect(
            self._confirmed_epoch == epoch,
            "confirmed before changed",
            f"epoch {epoch} was obeyed before it confirmed its worker's pool",
        )

    def _refusal(self, error: KvMemoryError) -> Reason:
        expect(
            error.reason not in MISTAKES, "no scheduler errs", f"{error.reason}: {error.message}"
        )
        self.note(f"refuses: {error.reason}: {error.message}")
        mark = {
            "SESSION_HELD": "session held",
            "STALE_EPOCH": "stale epoch refused at kvmem",
            "STALE_BOOT_ID": "stale boot id refused at kvmem",
            "LEASE_EXPIRED": "lease expired",
        }.get(error.reason)
        if mark is not None:
            self.world.marks.hit(mark)
        metadata = error.metadata
        return Reason(
            error.reason,
            holder=metadata.get("holder", ""),
            holder_address=metadata.get("holder_address", ""),
        )
