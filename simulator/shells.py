"""The shells of memory service and worker, as `kvmem_svc.servicer` and `model_worker.servicer`
are, over the simulated network. (The scheduler's is in `scheduler_shell`.)"""

from __future__ import annotations

from collections import deque
from functools import partial

from benchmarks.kvmem_adapter import apply_batch, levels_of
from kvmem_svc.core import batch as kv
from kvmem_svc.core.errors import KvMemoryError
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from model_worker.errors import StepError
from model_worker.fencing import Fence, Fencing
from simulator import checkers
from simulator.clock import MS
from simulator.messages import (
    ApplyBatch,
    AttachPool,
    Execute,
    OpenSession,
    PoolAttached,
    SessionOpened,
    WorkerInfo,
)
from simulator.network import End, Refused
from simulator.process import Process, Surroundings
from simulator.wording import batch_in_words, result_in_words, step_in_words
from simulator.worker import EOS, VOCAB, TagWorker, expect


class KvmemShell(Process):
    """The memory service. A start is a new boot id and an empty memory: it has no journal yet."""

    memory: KvMemory
    gatekeeper: Gatekeeper
    # The stream that holds the session.
    _stream: End | None
    _copies: checkers.CopyCheck

    def __init__(self, world: Surroundings) -> None:
        super().__init__("kvmem", world)
        self._last_holder = ""

    def boot(self) -> None:
        # The least that a scheduler with these limits accepts.
        max_sequences = self.world.knobs.max_waiting + 2 * self.world.knobs.max_num_seqs
        self.memory = KvMemory(f"kvmem-{self.life}", max_sequences=max_sequences)
        self.gatekeeper = Gatekeeper(self.memory)
        self._stream = None
        self._copies = checkers.CopyCheck()
        self.note(f"starts as {self.memory.ledger.kvmem_boot_id}")

    @property
    def _now_ms(self) -> int:
        return self.clock.now_us // MS

    # ---- the session stream ----

    def accept(self, service: str, end: End) -> None:
        if service == "Session":
            end.on_message = partial(self._on_message, end)
            end.on_end = lambda _: self._on_stream_end(end)

    def _on_message(self, end: End, message: OpenSession | ApplyBatch) -> None:
        try:
            if isinstance(message, OpenSession):
                self._open(end, message)
            else:
                self._apply(end, message)
        except KvMemoryError as error:
            self._count_refusal(error)
            end.close(error.reason)
            self._on_stream_end(end)

    def _open(self, end: End, message: OpenSession) -> None:
        memory = self.memory
        if message.resume is not None:
            session = self.gatekeeper.resume_session(
                message.resume, message.last_result_batch_seq, self._now_ms
            )
            if self._stream is not None:
                self._stream.close("UNKNOWN_SESSION")
            self._expect_newest(message.resume)
            self.world.marks.hit("session resumed")
            self.note(f"resumes {session.session_id} for {message.holder}")
        else:
            session = self.gatekeeper.open_session(message.holder, self._now_ms)
            if self._last_holder not in ("", message.holder):
                self.world.marks.hit("session taken over")
            self._last_holder = message.holder
            self.note(f"opens {session.session_id} for {message.holder}")
        self._stream = end
        checkers.check_memory(memory)
        end.send(
            SessionOpened(memory.ledger.fence(), memory.ledger.next_batch_seq, memory.last_step_id)
        )

    def _apply(self, end: End, message: ApplyBatch) -> None:
        memory, batch = self.memory, message.batch
        num_batches = memory.num_batches
        result = apply_batch(self.gatekeeper, batch, message.fence, self._now_ms)
        self._expect_newest(message.fence, memory.ledger.worker_boot_id)
        checkers.check_memory(memory)
        if memory.num_batches == num_batches:
            self.world.marks.hit("batch replayed")
            self.note(f"batch {batch.batch_seq} again: the same result")
        else:
            self.world.checks.commits.on_applied(memory, batch, result)
            self._copies.on_applied(batch, result)
            self.note(batch_in_words(batch))
            self.note("   " + result_in_words(batch, result))
        end.send(result)

    def _on_stream_end(self, end: End) -> None:
        session = self.memory.ledger.session
        if self._stream is end and session is not None:
            self._stream = None
            self.gatekeeper.release_session(session, self._now_ms)
            self.note(f"the stream of {session.session_id} has ended")

    # ---- unary ----

    def serve(self, method: str, request: object) -> PoolAttached:
        assert isinstance(request, AttachPool), method
        memory = self.memory
        try:
            confirmed = self.gatekeeper.attach_pool(
                request.fence, request.worker_boot_id, request.geometry, self._now_ms
            )
        except KvMemoryError as error:
            self._count_refusal(error)
            raise Refused(error.reason, error.message) from error
        self._expect_newest(request.fence)
        checkers.check_memory(memory)
        if confirmed.is_new_pool:
            self.note(
                f"attaches the pool of {request.worker_boot_id}:"
                f" {request.geometry.num_blocks} blocks of {request.geometry.block_size}"
            )
        return PoolAttached(memory.ledger.fence(), levels_of(memory.levels()))

    def _expect_newest(self, fence: kv.Fence, worker_boot_id: str | None = None) -> None:
        """What was just carried out came from the newest session; checked without the fence."""
        ledger = self.memory.ledger
        right = fence.kvmem_boot_id == ledger.kvmem_boot_id and fence.epoch == ledger.epoch
        if worker_boot_id is not None:
            right = right and fence.worker_boot_id == worker_boot_id
        expect(right, "fenced at kvmem", f"{fence} was obeyed in epoch {ledger.epoch}")

    def _count_refusal(self, error: KvMemoryError) -> None:
        self.note(f"refuses: {error.reason}: {error.message}")
        mark = {
            "SESSION_HELD": "session held",
            "STALE_EPOCH": "stale epoch refused at kvmem",
            "STALE_BOOT_ID": "stale boot id refused at kvmem",
            "LEASE_EXPIRED": "lease expired",
        }.get(error.reason)
        if mark is not None:
            self.world.marks.hit(mark)


class WorkerShell(Process):
    """The model worker: real fencing, one model thread, and a model that checks every slot."""

    boot_id: str
    geometry: kv.PoolGeometry
    model: TagWorker
    fencing: Fencing
    _ready: bool
    _holder: End | None
    _queue: deque[tuple[End, Execute]]
    _busy: bool
    # The newest epoch let in, by boot id of the memory service.
    _newest_epochs: dict[str, int]

    def __init__(self, world: Surroundings, kvmem: KvmemShell) -> None:
        super().__init__("worker", world)
        self._kvmem = kvmem

    def boot(self) -> None:
        """A new boot id; the KV is gone."""
        self.boot_id = f"worker-{self.life}"
        self.geometry = self.world.knobs.geometry(self.life)
        self.model = TagWorker(self.geometry.block_size, self.world.checks.tree)
        self.fencing = Fencing(self.boot_id)
        self._ready = False
        self._holder = None
        self._queue = deque()
        self._busy = False
        self._newest_epochs = {}
        self.note(f"starts as {self.boot_id}")
        self.after(self.world.draw.choice([0, 0, 20 * MS, 200 * MS]), self._get_ready)

    def _get_ready(self) -> None:
        self._ready = True

    def serve(self, method: str, request: object) -> WorkerInfo:
        del request
        assert method == "GetInfo", method
        if not self._ready:
            raise Refused("NOT_READY", "the model is being loaded")
        return WorkerInfo(
            self.boot_id,
            self.geometry,
            VOCAB,
            (EOS,),
            self.world.knobs.worker_max_num_batched_tokens,
        )

    # ---- the Execute stream ----

    def accept(self, service: str, end: End) -> None:
        if not self._ready:
            end.close("NOT_READY")
        elif service == "Execute":
            end.on_message = partial(self._on_step, end)
            end.on_end = lambda _: self._let_go(end)

    def _let_go(self, end: End) -> None:
        if self._holder is end:
            self._holder = None

    def _refuse(self, end: End, reason: str, message: str) -> None:
        self.note(f"refuses: {reason}: {message}")
        if reason == "STALE_EPOCH":
            self.world.marks.hit("stale epoch refused at worker")
        elif reason == "STALE_BOOT_ID":
            self.world.marks.hit("stale boot id refused at worker")
        end.close(reason)
        self._let_go(end)

    def _on_step(self, end: End, message: Execute) -> None:
        try:
            self._take_hold(end, _worker_fence(message.fence))
        except (StepError, Refused) as error:
            self._refuse(end, error.reason, error.message)
            return
        self._queue.append((end, message))
        self._work()

    def _take_hold(self, end: End, fence: Fence) -> None:
        is_newer = self.fencing.check(fence)
        self._expect_newest(fence)
        if self._holder is not end:
            if self._holder is not None and not is_newer:
                raise Refused("SESSION_HELD", f"epoch {fence.epoch} already has a stream open")
            if self._holder is not None:
                self.world.marks.hit("stream replaced at worker")
                self._holder.close("STALE_EPOCH")
            self._holder = end
        if is_newer:
            self.fencing.install(fence)
            self.note(f"installs {fence.session_id}")

    # ---- the model thread ----

    def _work(self) -> None:
        """Begin the next step, if there is one and none runs."""
        while self._queue and not self._busy:
            end, message = self._queue.popleft()
            fence, step = _worker_fence(message.fence), message.step
            try:
                if self.fencing.begin_step(fence, step.step_id):
                    self.model.forget()
                    self.model.last_step_id = 0
            except StepError as error:
                self._refuse(end, error.reason, error.message)
                continue
            self._busy = True
            self.note(step_in_words(step))
            duration_us = self.world.draw.randint(*self.world.knobs.step_duration_us)
            self.after(duration_us, partial(self._finish, end, message))

    def _finish(self, end: End, message: Execute) -> None:
        step = message.step
        expect(
            len(step.input_token_ids) <= self.world.knobs.worker_max_num_batched_tokens,
            "worker limits",
            f"{len(step.input_token_ids)} tokens in step {step.step_id}",
        )
        num_copies = self.model.num_copies
        result = self.model.execute(step)
        self.world.marks.hit("copied on write", self.model.num_copies - num_copies)
        tables = (self.model.known[i].table for i in step.sequence_ids.tolist())
        checkers.check_blocks_are_held(self._kvmem.memory, message.fence, step, tables)
        self.fencing.end_step(step.step_id)
        self.note(f"has executed step {step.step_id}: tokens {result.sampled_token_ids.tolist()}")
        self._busy = False
        end.send(result)
        self._work()

    def _expect_newest(self, fence: Fence) -> None:
        """No step that is let in is of an epoch before another's, nor for another worker."""
        newest = self._newest_epochs.get(fence.kvmem_boot_id, 0)
        expect(
            fence.worker_boot_id == self.boot_id and fence.epoch >= newest,
            "fenced at the worker",
            f"{fence} was obeyed by {self.boot_id} after epoch {newest}",
        )
        self._newest_epochs[fence.kvmem_boot_id] = fence.epoch


def _worker_fence(fence: kv.Fence) -> Fence:
    return Fence(fence.session_id, fence.epoch, fence.kvmem_boot_id, fence.worker_boot_id)
