"""Sessions: who may write, in which epoch, and which batch comes next.

One session is open at a time; opening one begins a new epoch. A session held by a stream
lives as long as the stream. When that breaks, its holder may resume it for a short grace,
unless somebody opened a newer one meanwhile. A session of unary calls has a lease, renewed
by every batch. Time is an argument, in milliseconds of a clock that never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvmem_svc.core.batch import BatchResult, Fence
from kvmem_svc.core.errors import (
    BatchConflict,
    LeaseExpired,
    SequenceGap,
    SessionHeld,
    StaleBootId,
    StaleEpoch,
    UnknownSession,
)
from kvmem_svc.core.limits import REPLY_WINDOW_BATCHES


@dataclass(slots=True)
class Session:
    """lease_expires_ms None: held by an open stream. may_be_taken: its stream is gone."""

    session_id: str
    epoch: int
    holder: str
    lease_expires_ms: int | None
    may_be_taken: bool = False


class SessionLedger:
    """The open session, its epoch, and the replies its holder may ask for again."""

    def __init__(self, kvmem_boot_id: str, lease_ttl_ms: int, resume_grace_ms: int) -> None:
        self.kvmem_boot_id = kvmem_boot_id
        self.worker_boot_id = ""
        self.lease_ttl_ms = lease_ttl_ms
        self.resume_grace_ms = resume_grace_ms
        self.session: Session | None = None
        self.epoch = 0
        self.next_batch_seq = 1
        self._replies: OrderedDict[int, tuple[bytes, BatchResult]] = OrderedDict()

    # --- opening and closing -----------------------------------------------------------

    def open(self, holder: str, now_ms: int, *, held_by_stream: bool) -> Session:
        """Begin a new epoch. Raises SessionHeld while another session is alive."""
        current = self.session
        if current is not None and not current.may_be_taken:
            lease = current.lease_expires_ms
            if lease is None or now_ms < lease:
                raise SessionHeld(
                    f"session {current.session_id} is held by {current.holder!r}",
                    retry_after_ms=self.lease_ttl_ms if lease is None else lease - now_ms,
                )
        self.epoch += 1
        self.next_batch_seq = 1
        self._replies.clear()
        self.session = Session(
            f"{self.kvmem_boot_id}.{self.epoch}",
            self.epoch,
            holder,
            None if held_by_stream else now_ms + self.lease_ttl_ms,
        )
        return self.session

    def resume(
        self, fence: Fence, last_result_batch_seq: int, now_ms: int, *, held_by_stream: bool
    ) -> Session:
        """Go on with a session whose stream broke. Raises what `check_fence` does, and
        SequenceGap when a batch after `last_result_batch_seq` has no reply kept any more."""
        session = self.check_fence(fence, now_ms, check_worker=False)
        newest = self.next_batch_seq - 1
        oldest_kept = next(iter(self._replies), self.next_batch_seq)
        if not oldest_kept - 1 <= last_result_batch_seq <= newest:
            raise SequenceGap(
                f"last_result_batch_seq is {last_result_batch_seq}; to resume session"
                f" {session.session_id} it must be {oldest_kept - 1} .. {newest}"
            )
        session.may_be_taken = False
        session.lease_expires_ms = None if held_by_stream else now_ms + self.lease_ttl_ms
        return session

    def release(self, session_id: str, now_ms: int) -> None:
        """The session's stream broke: it may be resumed for the grace, or taken over."""
        session = self.session
        if session is not None and session.session_id == session_id:
            session.may_be_taken = True
            session.lease_expires_ms = now_ms + self.resume_grace_ms

    def close(self, session_id: str) -> None:
        """The session's holder is done with it. Nothing happens unless it is the open one."""
        if self.session is not None and self.session.session_id == session_id:
            self.session = None

    # --- fences and batches ------------------------------------------------------------

    def fence(self) -> Fence:
        """The fence of the open session."""
        assert self.session is not None, "no session is open"
        return Fence(
            self.session.session_id, self.session.epoch, self.kvmem_boot_id, self.worker_boot_id
        )

    def check_fence(self, fence: Fence, now_ms: int, *, check_worker: bool = True) -> Session:
        """The session `fence` speaks for. Raises StaleBootId, StaleEpoch, UnknownSession or
        LeaseExpired."""
        if fence.kvmem_boot_id != self.kvmem_boot_id:
            raise StaleBootId(
                f"the fence is for memory service {fence.kvmem_boot_id!r}, this one is"
                f" {self.kvmem_boot_id!r}"
            )
        if fence.epoch < self.epoch:
            raise StaleEpoch(f"epoch {fence.epoch} is stale, the newest one is {self.epoch}")
        session = self.session
        if session is None or session.session_id != fence.session_id:
            raise UnknownSession(f"session {fence.session_id!r} is not open")
        if fence.epoch != session.epoch:
            raise UnknownSession(f"session {fence.session_id!r} has no epoch {fence.epoch}")
        if session.lease_expires_ms is not None and now_ms >= session.lease_expires_ms:
            raise LeaseExpired(
                f"the lease of session {session.session_id} ended"
                f" {now_ms - session.lease_expires_ms} ms ago"
            )
        if check_worker and self.worker_boot_id and fence.worker_boot_id != self.worker_boot_id:
            raise StaleBootId(
                f"the fence is for worker {fence.worker_boot_id!r}, the attached one is"
                f" {self.worker_boot_id!r}"
            )
        return session

    def renew(self, now_ms: int) -> None:
        """A batch came: the lease of a session of unary calls starts over."""
        session = self.session
        if session is None or session.lease_expires_ms is None or session.may_be_taken:
            return
        session.lease_expires_ms = now_ms + self.lease_ttl_ms

    def replay(self, batch_seq: int, digest: bytes) -> BatchResult | None:
        """The kept result of a batch sent again; None for the next one. Raises SequenceGap
        or BatchConflict."""
        if batch_seq == self.next_batch_seq:
            return None
        kept = self._replies.get(batch_seq)
        if kept is None:
            raise SequenceGap(
                f"batch_seq {batch_seq} is neither the next one, {self.next_batch_seq}, nor one"
                f" whose result is kept, {list(self._replies)}"
            )
        if kept[0] != digest:
            raise BatchConflict(f"batch {batch_seq} was applied with other ops")
        return kept[1]

    def record(self, digest: bytes, result: BatchResult) -> None:
        """Keep the result of the batch just applied, and expect the one after it."""
        self._replies[result.batch_seq] = (digest, result)
        if len(self._replies) > REPLY_WINDOW_BATCHES:
            self._replies.popitem(last=False)
        self.next_batch_seq = result.batch_seq + 1

    def attach_worker(self, worker_boot_id: str) -> None:
        """Another worker's pool: kept results name blocks that are gone."""
        self.worker_boot_id = worker_boot_id
        self._replies.clear()
