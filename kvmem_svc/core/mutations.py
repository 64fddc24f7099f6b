"""The mutations of the memory service: nothing else changes its state.

Each is carried out by `KvMemory.commit`, alike when it is made and when a journal is replayed. None
has a time: deciding to make one (leases, graces, TTLs) is `gatekeeper`'s, and is not part of the
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmem_svc.core.batch import Batch, BatchResult, PoolGeometry

# Of what a mutation does and replies. To be raised with every change of either: the replay of a
# journal of another version could diverge.
CORE_VERSION = 3


@dataclass(frozen=True, slots=True)
class GrantSession:
    """A new session begins the next epoch, its mutations closed. Replied to with the Session."""

    holder: str
    holder_address: str = ""


@dataclass(frozen=True, slots=True)
class ConfirmPool:
    """The pool of a worker is there, and obeys the open session alone: mutations are open.

    last_executed_step: the newest step that worker has executed for this memory service.
    """

    worker_boot_id: str
    geometry: PoolGeometry
    last_executed_step: int = 0


@dataclass(frozen=True, slots=True)
class ApplyBatch:
    """The ops of a step. Replied to with the BatchResult."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The open session is over: its holder is done, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class Expire:
    """Nobody came for these requests: their blocks are taken back and their records go."""

    request_ids: Sequence[str]


Mutation = GrantSession | ConfirmPool | ApplyBatch | CloseSession | Expire


@dataclass(frozen=True, slots=True)
class Session:
    """The open session: who holds it, and where the holder's callers reach it."""

    session_id: str
    epoch: int
    holder: str
    holder_address: str = ""


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that the next step is to make; `sequence_id` holds the destination."""

    src_block_id: int
    dst_block_id: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class PoolConfirmed:
    """is_new_pool False: the worker is the one attached before, and its KV is there."""

    is_new_pool: bool
    pending_copies: tuple[PendingCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """epoch: of the session that was closed; 0 when none was open."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Expired:
    """What went: records, and among their sequences those that were live."""

    num_requests: int
    num_live_sequences: int


Reply = Session | PoolConfirmed | BatchResult | SessionClosed | Expired
