"""What the KV memory service shows of itself: block tables, pool levels, applied batches.

Frozen dataclasses. Block ids are physical block numbers, 0 .. num_blocks - 1; a table's
position i holds the block of tokens [i * block_size, (i + 1) * block_size).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octavo.types import FinishReason, PoolGeometry


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """How the pool's blocks are spread; the five sum to num_blocks at every idle moment."""

    num_free_blocks: int
    num_cached_blocks: int
    num_in_use_blocks: int
    num_quarantined_blocks: int
    num_reserved_blocks: int
    num_free_sequences: int

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that nobody holds: free ones, and cached ones, which are kept for their content
        until somebody needs them."""
        return self.num_free_blocks + self.num_cached_blocks


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pool levels and counters since the pool was attached; geometry None: it is not yet."""

    geometry: PoolGeometry | None
    levels: PoolLevels
    num_requests: int
    num_sequences: int
    num_shared_blocks: int
    peak_in_use_blocks: int
    num_allocations: int
    num_copies_on_write: int
    num_preemptions: int
    num_batches: int
    kvmem_boot_id: str
    worker_boot_id: str


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence with its block table; ref_counts[i] is how many tables hold block_ids[i]."""

    sequence_id: int
    request_id: str
    candidate: int
    status: SequenceStatus
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    table_version: int
    block_ids: tuple[int, ...]
    ref_counts: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The tables of some or all sequences; truncated: there were more than fit the reply."""

    sequences: tuple[SequenceView, ...]
    truncated: bool


# ---------------------------------------------------------------- ops


@dataclass(frozen=True, slots=True)
class Arrive:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_candidates: int


@dataclass(frozen=True, slots=True)
class AdmitMember:
    sequence_id: int
    num_slots: int
    share_from: int
    num_shared_blocks: int


@dataclass(frozen=True, slots=True)
class Admit:
    members: tuple[AdmitMember, ...]


@dataclass(frozen=True, slots=True)
class CommitRow:
    sequence_id: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    rows: tuple[CommitRow, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """groups: (sequence_id, num_slots) of each member; a group is all or nothing."""

    groups: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Append:
    sequence_id: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """token_ids: none, or the parent's and then each child's."""

    sequence_id: int
    num_children: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempt:
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    sequence_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Confirm:
    request_id: str


Op = Arrive | Admit | Commit | Reserve | Append | Fork | Preempt | Free | Confirm


# ---------------------------------------------------------------- results


class OpStatus(StrEnum):
    OK = "ok"
    NO_FREE_BLOCKS = "no_free_blocks"
    NO_FREE_SEQUENCES = "no_free_sequences"
    ALREADY_EXISTS = "already_exists"
    UNKNOWN_SEQUENCE = "unknown_sequence"
    UNKNOWN_REQUEST = "unknown_request"
    INVALID_STATE = "invalid_state"
    INVALID_ARGUMENT = "invalid_argument"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class Arrived:
    sequence_id: int
    arrival_number: int


@dataclass(frozen=True, slots=True)
class SequenceTable:
    sequence_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    tables: tuple[SequenceTable, ...]


@dataclass(frozen=True, slots=True)
class Forked:
    """block_ids: the table that every child starts with."""

    child_sequence_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    failed_groups: tuple[int, ...]


Outcome = Arrived | Admitted | Forked | Reserved


@dataclass(frozen=True, slots=True)
class AppliedOp:
    """An op with what became of it; outcome None: the status says it all."""

    op: Op
    status: OpStatus
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class TableDelta:
    """table[table_index] of the sequence is block_id from now on."""

    sequence_id: int
    table_index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    src_block_id: int
    dst_block_id: int


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """One batch as the memory service applied it. deltas: of Reserve and Append."""

    batch_seq: int
    step_id: int
    acknowledged_step: int
    ops: tuple[AppliedOp, ...]
    deltas: tuple[TableDelta, ...]
    copies: tuple[BlockCopy, ...]
    levels: PoolLevels


Event = BlockTables | AppliedBatch
