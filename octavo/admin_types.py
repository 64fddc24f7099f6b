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
    """How the pool's blocks are spread; the first five sum to num_blocks at every idle moment.

    num_free_host_blocks: of the host tier, when there is one.
    """

    num_free_blocks: int
    num_cached_blocks: int
    num_in_use_blocks: int
    num_quarantined_blocks: int
    num_reserved_blocks: int
    num_free_sequences: int
    num_free_host_blocks: int = 0

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that nobody holds: free ones, and cached ones, which are kept for their content
        until somebody needs them."""
        return self.num_free_blocks + self.num_cached_blocks


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Of the attached pool: sequences that looked for a prefix and those that found one, their
    tokens in all and found, blocks that entered the cache and that were taken from it."""

    enabled: bool = False
    num_lookups: int = 0
    num_hits: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_published: int = 0
    num_evictions: int = 0
    num_pins: int = 0


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Who holds the session, or held it last, and of what epoch it is. orphaned_ms: for how long
    there has been none; 0: there is one. mutations_open: batches are taken."""

    holder: str = ""
    holder_address: str = ""
    epoch: int = 0
    mutations_open: bool = False
    orphaned_ms: int = 0
    journal_healthy: bool = True


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pool levels and counters since the pool was attached; geometry None: it is not yet.

    num_finished_sequences: ended, their request not confirmed yet. num_expired_requests: over the
    life of the memory service, as is last_step_id, the newest step that was prepared.
    num_recorded_tokens: generated since the process started.
    """

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
    session: SessionStats = SessionStats()
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    num_finished_sequences: int = 0
    num_expired_requests: int = 0
    num_tenants: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    last_step_id: int = 0
    num_recorded_tokens: int = 0


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    SWAPPED = "swapped"  # its KV is in the host tier


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


@dataclass(frozen=True, slots=True)
class SequenceSummary:
    """One sequence without its table. num_shared_blocks: those that other tables hold as well."""

    sequence_id: int
    request_id: str
    arrival_number: int
    candidate: int
    tenant: str
    status: SequenceStatus
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_shared_blocks: int
    num_host_blocks: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class SequencePage:
    """Some of all sequences, in order of their ids; truncated: there are more above the last."""

    sequences: tuple[SequenceSummary, ...]
    truncated: bool


# ---------------------------------------------------------------- ops


@dataclass(frozen=True, slots=True)
class Arrive:
    """candidate_indices: which candidates it brings, of a request that was known before; empty:
    candidate 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_candidates: int
    candidate_indices: tuple[int, ...] = ()


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


@dataclass(frozen=True, slots=True)
class SwapOut:
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    sequence_ids: tuple[int, ...]


Op = Arrive | Admit | Commit | Reserve | Append | Fork | Preempt | Free | Confirm | SwapOut | SwapIn


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
    TENANT_QUOTA = "tenant_quota"
    NO_FREE_HOST_BLOCKS = "no_free_host_blocks"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True)
class Arrived:
    """candidate_sequence_ids: one for each of the op's candidate_indices, in their order."""

    sequence_id: int
    arrival_number: int
    candidate_sequence_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceTable:
    sequence_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    tables: tuple[SequenceTable, ...]


@dataclass(frozen=True, slots=True)
class SwappedIn:
    tables: tuple[SequenceTable, ...]


@dataclass(frozen=True, slots=True)
class Forked:
    """block_ids: the table that every child starts with."""

    child_sequence_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    failed_groups: tuple[int, ...]


Outcome = Arrived | Admitted | Forked | Reserved | SwappedIn


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
