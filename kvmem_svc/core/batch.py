"""Ops and results of a batch: the core's own mirror of `proto/octavo/v1/kvmem.proto`.

Columns are one-dimensional numpy arrays: sequence ids uint64, token ids, counts, table
indices and block ids int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.integer]

NO_INT32: Column = np.zeros(0, np.int32)
NO_UINT32: Column = np.zeros(0, np.uint32)
NO_UINT64: Column = np.zeros(0, np.uint64)


class OpStatus(IntEnum):
    """What became of one op; numbered as on the wire."""

    OK = 1
    NO_FREE_BLOCKS = 2
    NO_FREE_SEQUENCES = 3
    ALREADY_EXISTS = 4
    UNKNOWN_SEQUENCE = 5
    UNKNOWN_REQUEST = 6
    INVALID_STATE = 7
    INVALID_ARGUMENT = 8
    TENANT_QUOTA = 9
    NO_FREE_HOST_BLOCKS = 10


class FinishReason(IntEnum):
    """Why a sequence ended; numbered as on the wire. UNSPECIFIED: pruned, nobody wants it."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    KV_CAPACITY = 4


FINISH_REASONS = frozenset(map(int, FinishReason))


@dataclass(frozen=True, slots=True)
class Fence:
    """Who is speaking. The newest epoch of the living processes alone may write."""

    session_id: str
    epoch: int
    kvmem_boot_id: str
    worker_boot_id: str = ""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The shape of a worker's KV pool. block_size and max_model_len in tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes_per_block: int = 0
    kv_dtype: str = ""
    num_host_blocks: int = 0


# --- ops -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrivingCandidate:
    """A candidate of a request that another life of the memory service knew.

    output_token_ids: int32, without the prompt. With a finish_reason it has ended.
    """

    candidate: int
    output_token_ids: Column
    finish_reason: int = FinishReason.UNSPECIFIED
    scheduler_state: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrive:
    """candidates empty: one candidate, number 0, without output."""

    request_id: str
    prompt_token_ids: Column
    num_candidates: int = 1
    tenant: str = ""
    request_spec: bytes = b""
    request_digest: bytes = b""
    candidates: Sequence[ArrivingCandidate] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class AdmitMember:
    sequence_id: int
    num_slots: int
    share_from: int = 0
    num_shared_blocks: int = 0
    use_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    members: Sequence[AdmitMember]


@dataclass(frozen=True, slots=True)
class Commit:
    """num_tokens empty: one token each.

    state_words: empty, or uint64, one for each sequence, whose 8 bytes are its scheduler_state.
    states: (sequence_id, scheduler_state) pairs, set after the words.
    """

    sequence_ids: Column
    token_ids: Column
    num_computed_tokens: Column
    num_tokens: Column = field(default_factory=lambda: NO_INT32)
    states: Sequence[tuple[int, bytes]] = ()
    state_words: Column = field(default_factory=lambda: NO_UINT64)


@dataclass(frozen=True, slots=True)
class Reserve:
    """group_sizes empty: every sequence is a group of its own."""

    sequence_ids: Column
    num_slots: Column
    group_sizes: Column = field(default_factory=lambda: NO_INT32)


@dataclass(frozen=True, slots=True)
class Append:
    sequence_id: int
    token_ids: Column


@dataclass(frozen=True, slots=True)
class Fork:
    """token_ids and state_words: none, or one for the parent and one for each child, in this
    order."""

    sequence_id: int
    num_children: int
    token_ids: Column = field(default_factory=lambda: NO_INT32)
    state_words: Column = field(default_factory=lambda: NO_UINT64)


@dataclass(frozen=True, slots=True)
class Preempt:
    sequence_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Running sequences of one request."""

    sequence_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SwapInMember:
    sequence_id: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Swapped sequences of one request."""

    members: Sequence[SwapInMember]


@dataclass(frozen=True, slots=True)
class Free:
    sequence_ids: Sequence[int]
    finish_reason: int = FinishReason.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Confirm:
    request_id: str


Op = Arrive | Admit | Commit | Reserve | Append | Fork | Preempt | SwapOut | SwapIn | Free | Confirm


def op_name(op: Op) -> str:
    """As on the wire: "swap_out" of a SwapOut."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(op).__name__)[1:]


@dataclass(frozen=True, slots=True)
class Batch:
    """The ops of one step. `digest` stands for their content: equal digests, equal ops.

    `encoded` is that content as it came, for a journal; the core does not read it.
    """

    fence: Fence
    batch_seq: int
    step_id: int
    acknowledged_step: int
    ops: Sequence[Op]
    digest: bytes
    encoded: bytes = b""


# --- results ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """candidate_sequence_ids: in the order of the op's candidates, when it had any."""

    sequence_id: int
    arrival_number: int
    candidate_sequence_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BlockTable:
    """num_computed_tokens: from the start, of which the KV need not be computed."""

    sequence_id: int
    block_ids: Column
    table_version: int
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    tables: Sequence[BlockTable]


@dataclass(frozen=True, slots=True)
class SwappedIn:
    tables: Sequence[BlockTable]


@dataclass(frozen=True, slots=True)
class Forked:
    """block_ids and table_version: the table that every child starts with."""

    child_sequence_ids: Sequence[int]
    block_ids: Column
    table_version: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """failed_groups: int32, indices into group_sizes. quota_groups: those of them that failed by
    their tenant's quota."""

    failed_groups: Column
    quota_groups: Column = field(default_factory=lambda: NO_INT32)


OpValue = Arrived | Admitted | SwappedIn | Forked | Reserved


@dataclass(frozen=True, slots=True)
class OpResult:
    status: OpStatus
    message: str = ""
    value: OpValue | None = None


OK = OpResult(OpStatus.OK)


@dataclass(frozen=True, slots=True)
class TableDeltas:
    """Changed entries of block tables, one a row: table[table_indices] = block_ids.

    table_versions is the version of the row's sequence after the op that changed it.
    """

    sequence_ids: Column
    table_indices: Column
    block_ids: Column
    table_versions: Column


NO_DELTAS = TableDeltas(NO_UINT64, NO_INT32, NO_INT32, NO_UINT32)


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Pairs of blocks, int32[C] each. No destination is repeated and none is also a source."""

    src_block_ids: Column
    dst_block_ids: Column


NO_COPIES = BlockCopies(NO_INT32, NO_INT32)


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """free + cached + in_use + quarantined + reserved = num_blocks, always."""

    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_in_use_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_reserved_blocks: int = 0
    num_free_sequences: int = 0
    num_free_host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BatchResult:
    """num_allocated_blocks and num_freed_blocks: what this batch took and gave back.

    swap_ins: from host blocks to blocks of the pool, before the copies of the same step; swap_outs:
    the other way, after them.
    """

    batch_seq: int
    results: Sequence[OpResult]
    deltas: TableDeltas
    copies: BlockCopies
    levels: PoolLevels
    num_allocated_blocks: int = 0
    num_freed_blocks: int = 0
    swap_ins: BlockCopies = NO_COPIES
    swap_outs: BlockCopies = NO_COPIES
