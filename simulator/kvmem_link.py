"""A scheduler's way to the memory service: `scheduler_svc.kvmem_port` without asyncio.

What is done there by coroutines, one line after another, is here one callback after another. Where
those are cancelled, nothing of them is called any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvmem_svc.core import batch as kv
from scheduler_svc.core import ops
from simulator.clock import MS, SECOND
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
    WorkerInfo,
)
from simulator.network import DEADLINE_EXCEEDED, UNAVAILABLE, Call, End
from simulator.process import Process

if TYPE_CHECKING:
    from simulator.scheduler_shell import SchedulerShell

# As in `scheduler_svc.kvmem_port` and `scheduler_svc.peers`.
OPEN_DEADLINE_US = 5 * SECOND
BATCH_DEADLINE_US = 30 * SECOND
RESUME_FOR_US = 10 * SECOND
RESUME_ATTEMPT_US = SECOND
RESUME_PAUSE_US = 20 * MS
RESUME_PAUSE_MOST_US = 200 * MS
BEATS_PER_LEASE = 4
PASSING = frozenset(("KVMEM_LOST", "NOT_READY", "DRAINING", "JOURNAL_FAILED"))

OnFailed = Callable[[str], None]


class KvmemLink:
    """The memory service over one session stream, which is resumed when it breaks."""

    fence: kv.Fence

    def __init__(
        self, shell: SchedulerShell, kvmem: Process, holder: str, on_lost: OnFailed
    ) -> None:
        """`on_lost` is called with the reason when the session is not to be gone on with."""
        self.batch: ops.Batch | None = None
        self._shell, self._kvmem, self._holder, self._on_lost = shell, kvmem, holder, on_lost
        # Counts what was cancelled: callbacks of before are dropped.
        self._turn = 0
        self._stream: End | None = None
        self._opening: End | None = None
        self._watch: End | None = None
        self._on_result: Callable[[ops.BatchResult], None] | None = None
        self._resuming_since_us: int | None = None
        self._pause_us = 0
        self._worker: WorkerInfo | None = None
        self._lease_us = SECOND
        self._last_result_batch_seq = 0
        self._acknowledged_step = 0

    def cancel(self) -> None:
        """Drop everything under way. The session stays as it is."""
        self._turn += 1
        self.batch = None
        self._resuming_since_us = None
        for stream in (self._opening, self._watch):
            if stream is not None:
                stream.close("CANCELLED")
        self._opening = self._watch = None

    def _now(self, action: Callable[..., None]) -> Callable[..., None]:
        """`action`, unless it is cancelled by then."""
        turn = self._turn

        def guarded(*args: Any) -> None:
            if self._turn == turn:
                action(*args)

        return guarded

    def _call(
        self,
        request: object,
        deadline_us: int,
        on_reply: Callable[..., None],
        on_failed: OnFailed,
    ) -> None:
        method = type(request).__name__
        call = Call(
            self._shell,
            self._kvmem,
            method,
            request,
            self._now(on_reply),
            self._now(lambda reason: on_failed(lost(reason))),
        )
        self._shell.network.call(call, deadline_us)

    # ---- taking over ----

    def open(
        self,
        worker: WorkerInfo,
        on_opened: Callable[[SessionOpened], None],
        on_failed: OnFailed,
    ) -> None:
        """Begin a session, after ending a former one of ours."""
        # Of that one: a session resumed before `attach` has no pool to confirm yet.
        self._worker = None
        stream, self._stream = self._stream, None
        if stream is None:
            self._open_new(worker, on_opened, on_failed)
            return

        def go_on(_: object) -> None:
            stream.close("CANCELLED")
            self._open_new(worker, on_opened, on_failed)

        self._call(CloseSession(self.fence), RESUME_ATTEMPT_US, go_on, go_on)

    def _open_new(
        self,
        worker: WorkerInfo,
        on_opened: Callable[[SessionOpened], None],
        on_failed: OnFailed,
    ) -> None:
        def opened_new(opened: SessionOpened) -> None:
            fence = opened.fence
            # Before the pool is attached the worker is to obey the fence already.
            self.fence = kv.Fence(
                fence.session_id, fence.epoch, fence.kvmem_boot_id, worker.boot_id
            )
            self._lease_us = opened.lease_ttl_ms * MS
            self._last_result_batch_seq = opened.next_batch_seq - 1
            on_opened(opened)

        message = OpenSession(self._holder, self._shell.name)
        self._open_stream(message, OPEN_DEADLINE_US, opened_new, on_failed)

    def _open_stream(
        self,
        message: OpenSession,
        timeout_us: int,
        on_opened: Callable[[SessionOpened], None],
        on_failed: OnFailed,
    ) -> None:
        stream = self._opening = self._shell.network.open_stream(
            self._shell, self._kvmem, "Session"
        )

        def opened(reply: SessionOpened) -> None:
            self._opening = None
            self._stream = stream
            stream.on_message = self._now(self._on_result_arrived)
            stream.on_end = self._now(partial(self._on_stream_end, stream))
            on_opened(reply)

        def failed(reason: str) -> None:
            if self._opening is stream:
                self._opening = None
                stream.close("CANCELLED")
                on_failed(lost(reason))

        stream.on_message, stream.on_end = self._now(opened), self._now(failed)
        stream.send(message)
        self._shell.after(timeout_us, self._now(partial(failed, DEADLINE_EXCEEDED)))

    def attach(
        self,
        worker: WorkerInfo,
        last_executed_step: int,
        on_attached: Callable[[PoolAttached], None],
        on_failed: OnFailed,
    ) -> None:
        self._worker = worker
        self._acknowledged_step = last_executed_step
        request = AttachPool(self.fence, worker.boot_id, worker.geometry, last_executed_step)

        def attached(reply: PoolAttached) -> None:
            self.fence = reply.fence
            on_attached(reply)

        self._call(request, OPEN_DEADLINE_US, attached, on_failed)

    def adopt(self, on_adopted: Callable[[Adopted], None], on_failed: OnFailed) -> None:
        self._call(AdoptSequences(self.fence), OPEN_DEADLINE_US, on_adopted, on_failed)

    # ---- batches ----

    def apply(self, batch: ops.Batch, on_result: Callable[[ops.BatchResult], None]) -> None:
        """Also over a resumed session: a batch that was not answered is sent again."""
        self.batch, self._on_result = batch, on_result
        self._shell.after(BATCH_DEADLINE_US, self._now(partial(self._on_batch_deadline, batch)))
        self._send_batch()

    def _send_batch(self) -> None:
        stream = self._stream
        if self.batch is None or self._resuming_since_us is not None:
            return
        assert stream is not None
        if stream.open:
            stream.send(ApplyBatch(self.fence, self.batch))
        else:
            self._resume(stream, UNAVAILABLE)

    def _on_batch_deadline(self, batch: ops.Batch) -> None:
        if self.batch is batch:
            self._on_lost("KVMEM_LOST")

    def _on_result_arrived(self, result: ops.BatchResult) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None, f"a result of {result.batch_seq}, and no batch"
        assert self._on_result is not None
        self._last_result_batch_seq = batch.batch_seq
        self._acknowledged_step = batch.acknowledged_step
        self._on_result(result)

    def _on_stream_end(self, stream: End, reason: str) -> None:
        # Nobody reads from it while no batch is under way.
        if self.batch is not None:
            self._resume(stream, reason)

    # ---- keeping it ----

    def watch(self) -> None:
        """Keep the session alive, and notice when the peer is gone. From `open` on."""
        self._watch_health()
        self._shell.after(self._lease_us // BEATS_PER_LEASE, self._now(self._beat))

    def _watch_health(self) -> None:
        stream = self._stream
        watch = self._watch = self._shell.network.open_stream(self._shell, self._kvmem, "Health")

        def ended(reason: str) -> None:
            self._watch = None
            assert stream is not None
            self._resume(stream, reason)
            if self._watch is None and self._resuming_since_us is None:
                self._watch_health()

        watch.on_end = self._now(ended)

    def _beat(self) -> None:
        if self._stream is not None:
            self._stream.send(Heartbeat())
        self._shell.after(self._lease_us // BEATS_PER_LEASE, self._now(self._beat))

    def _resume(self, broken: End, reason: str) -> None:
        """Go on with the session over a new stream."""
        if self._stream is not broken or self._resuming_since_us is not None:
            return
        reason = lost(reason)
        if reason not in PASSING:
            self._on_lost(reason)
            return
        self._shell.note(f"resumes {self.fence.session_id}")
        self._resuming_since_us = self._shell.clock.now_us
        self._pause_us = RESUME_PAUSE_US
        self._try_to_resume()

    def _try_to_resume(self) -> None:
        message = OpenSession(
            self._holder, self._shell.name, self.fence, self._last_result_batch_seq
        )
        self._open_stream(message, RESUME_ATTEMPT_US, self._on_reopened, self._on_not_resumed)

    def _on_reopened(self, opened: SessionOpened) -> None:
        if self.batch is not None and opened.next_batch_seq == self.batch.batch_seq:
            self._shell.world.marks.hit("batch lost and sent again")
        if opened.mutations_open or self._worker is None:
            self._on_resumed()
            return
        # It came back from its journal, and takes the pool for gone until told otherwise.
        self.attach(
            self._worker,
            self._acknowledged_step,
            lambda _: self._on_resumed(),
            self._on_not_resumed,
        )

    def _on_resumed(self) -> None:
        self._resuming_since_us = None
        self._shell.note(f"goes on with {self.fence.session_id}")
        if self._watch is None:
            self._watch_health()
        self._send_batch()

    def _on_not_resumed(self, reason: str) -> None:
        since_us = self._resuming_since_us
        assert since_us is not None
        if reason not in PASSING or self._shell.clock.now_us - since_us > RESUME_FOR_US:
            self._on_lost(reason)
            return
        self._shell.after(self._pause_us, self._now(self._try_to_resume))
        self._pause_us = min(self._pause_us * 2, RESUME_PAUSE_MOST_US)


def lost(reason: str) -> str:
    """What is said of a failure: what the peer said, or that it is gone."""
    return "KVMEM_LOST" if reason in (UNAVAILABLE, DEADLINE_EXCEEDED) else reason
