"""The mutations of the memory service: nothing else changes its state.

Each is carried out by `KvMemory.commit`, alike when it is made and when a journal is replayed. None
has a time: deciding to make one (leases, graces, TTLs) is `gatekeeper`'s, and is not part of the
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmem_svc.core.batch import Batch, BatchResult, Column, PoolGeometry
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.tenants import Quota

# Of what a mutation does and replies. To be raised with every change of either: the replay of a
# journal of another version could diverge.
CORE_VERSION = 9


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


@dataclass(frozen=True, slots=True)
class Configure:
    """How the service was started: what these say holds for every mutation after it."""

    use_prefix_cache: bool = True
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class Pin:
    """Hold what is cached of a prefix. token_ids: int32. ttl_ms is not counted here; 0: no end."""

    domain: Domain
    token_ids: Column
    ttl_ms: int = 0
    is_public: bool = False


@dataclass(frozen=True, slots=True)
class Unpin:
    """Let go of a pin, if it is still there."""

    pin_id: int


Mutation = GrantSession | ConfirmPool | ApplyBatch | CloseSession | Expire | Configure | Pin | Unpin


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
class PendingSwap:
    """A swap that the next step is to make: from host block to block of the pool, or the other
    way."""

    src_block_id: int
    dst_block_id: int


@dataclass(frozen=True, slots=True)
class PoolConfirmed:
    """is_new_pool False: the worker is the one attached before, and its KV is there."""

    is_new_pool: bool
    pending_copies: tuple[PendingCopy, ...] = ()
    pending_swap_ins: tuple[PendingSwap, ...] = ()
    pending_swap_outs: tuple[PendingSwap, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """epoch: of the session that was closed; 0 when none was open."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Expired:
    """What went: records, and among their sequences those that were live."""

    num_requests: int
    num_live_sequences: int


@dataclass(frozen=True, slots=True)
class Configured:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """pin_id 0: nothing of the prefix is cached."""

    pin_id: int
    num_pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Unpinned:
    """was_there: of a pin that was not, nothing was changed."""

    was_there: bool


Reply = (
    Session | PoolConfirmed | BatchResult | SessionClosed | Expired | Configured | Pinned | Unpinned
)
