"""Sessions: who may write, in which epoch, and which batch comes next.

One session is open at a time. Granting one begins a new epoch, whose mutations are closed until
the session has confirmed a worker's pool: takeover is ordered. For how long a session holds is
not decided here (see `leases`): this is the journalled part, and knows no time.
"""

from __future__ import annotations

from collections import OrderedDict

from kvmem_svc.core.batch import BatchResult, Fence
from kvmem_svc.core.errors import (
    BatchConflict,
    NoPool,
    SequenceGap,
    StaleBootId,
    StaleEpoch,
    UnknownSession,
)
from kvmem_svc.core.limits import REPLY_WINDOW_BATCHES
from kvmem_svc.core.mutations import Session


class SessionLedger:
    """The open session, its epoch, and the replies its holder may ask for again.

    mutations_open: the open session has confirmed a pool. replies: batch_seq -> (digest, result)
    of the newest batches, oldest first.
    """

    def __init__(self, kvmem_boot_id: str) -> None:
        self.kvmem_boot_id = kvmem_boot_id
        self.worker_boot_id = ""
        self.session: Session | None = None
        self.epoch = 0
        self.mutations_open = False
        self.next_batch_seq = 1
        self.replies: OrderedDict[int, tuple[bytes, BatchResult]] = OrderedDict()

    # --- opening and closing -----------------------------------------------------------

    def grant(self, holder: str, holder_address: str) -> Session:
        """Begin a new epoch with mutations closed; whoever held the epoch before is fenced off."""
        self.epoch += 1
        self.mutations_open = False
        self.next_batch_seq = 1
        self.replies.clear()
        self.session = Session(
            f"{self.kvmem_boot_id}.{self.epoch}", self.epoch, holder, holder_address
        )
        return self.session

    def close(self) -> int:
        """The open session is over; its epoch, or 0 when there is none."""
        epoch = self.session.epoch if self.session is not None else 0
        self.session = None
        self.mutations_open = False
        return epoch

    def check_resume(self, fence: Fence, last_result_batch_seq: int) -> Session:
        """The session to go on with. Raises what `check_session` does, and SequenceGap when a
        batch after `last_result_batch_seq` has no reply kept any more."""
        session = self.check_session(fence)
        newest = self.next_batch_seq - 1
        oldest_kept = next(iter(self.replies), self.next_batch_seq)
        if not oldest_kept - 1 <= last_result_batch_seq <= newest:
            raise SequenceGap(
                f"last_result_batch_seq is {last_result_batch_seq}; to resume session"
                f" {session.session_id} it must be {oldest_kept - 1} .. {newest}"
            )
        return session

    # --- fences and batches ------------------------------------------------------------

    def fence(self) -> Fence:
        """The fence of the open session."""
        assert self.session is not None, "no session is open"
        return Fence(
            self.session.session_id, self.session.epoch, self.kvmem_boot_id, self.worker_boot_id
        )

    def check_session(self, fence: Fence) -> Session:
        """The session `fence` speaks for. Raises StaleBootId, StaleEpoch or UnknownSession."""
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
        return session

    def check_mutation(self, fence: Fence) -> Session:
        """As `check_session`, of one that may write. Raises NoPool before it has confirmed a pool,
        and StaleBootId for another worker's."""
        session = self.check_session(fence)
        if not self.mutations_open:
            raise NoPool(f"session {session.session_id} has not attached its worker's pool yet")
        if fence.worker_boot_id != self.worker_boot_id:
            raise StaleBootId(
                f"the fence is for worker {fence.worker_boot_id!r}, the attached one is"
                f" {self.worker_boot_id!r}"
            )
        return session

    def kept_result(self, batch_seq: int, digest: bytes) -> BatchResult | None:
        """The kept result of a batch sent again; None for the next one. Raises SequenceGap
        or BatchConflict."""
        if batch_seq == self.next_batch_seq:
            return None
        kept = self.replies.get(batch_seq)
        if kept is None:
            raise SequenceGap(
                f"batch_seq {batch_seq} is neither the next one, {self.next_batch_seq}, nor one"
                f" whose result is kept, {list(self.replies)}"
            )
        if kept[0] != digest:
            raise BatchConflict(f"batch {batch_seq} was applied with other ops")
        return kept[1]

    def record(self, digest: bytes, result: BatchResult) -> None:
        """Keep the result of the batch just applied, and expect the one after it."""
        self.replies[result.batch_seq] = (digest, result)
        if len(self.replies) > REPLY_WINDOW_BATCHES:
            self.replies.popitem(last=False)
        self.next_batch_seq = result.batch_seq + 1

    def attach_worker(self, worker_boot_id: str) -> None:
        """Another worker's pool: kept results name blocks that are gone."""
        self.worker_boot_id = worker_boot_id
        self.replies.clear()
