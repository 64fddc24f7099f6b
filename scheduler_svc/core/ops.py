"""What the scheduler says to the memory service and to the worker, and what they answer.

Columns are numpy arrays; the wire's shape of each stands in `proto/octavo/v1`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import ArrivingCandidate, Request
from scheduler_svc.core.stopping import FinishReason

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

NO_INT32 = np.empty(0, np.int32)
NO_UINT32 = np.empty(0, np.uint32)
NO_UINT64 = np.empty(0, np.uint64)

# As an input token: the one which the worker drew last for the sequence.
DRAWN_LAST = -1


@dataclass(frozen=True)
class Arrive:
    """candidates empty: one candidate without output."""

    request: Request
    candidates: tuple[ArrivingCandidate, ...] = ()


@dataclass(frozen=True)
class AdmitMember:
    sequence_id: int
    num_slots: int
    share_from: int = 0
    num_shared_blocks: int = 0
    use_prefix_cache: bool = False


@dataclass(frozen=True)
class Admit:
    members: tuple[AdmitMember, ...]


@dataclass(frozen=True)
class Commit:
    """Columns over N sequences: tokens each took, and how many of each are now computed."""

    sequence_ids: UInt64s
    num_tokens: Int32s
    token_ids: Int32s
    num_computed_tokens: Int32s
    # What the scheduler keeps with each sequence: see `scheduler_svc.core.adoption`.
    state_words: UInt64s


@dataclass(frozen=True)
class Reserve:
    """Columns over N sequences in G groups; each group is all or nothing."""

    sequence_ids: UInt64s
    num_slots: Int32s
    group_sizes: Int32s


@dataclass(frozen=True)
class Fork:
    """The parent takes token_ids[0], child i takes token_ids[i + 1]."""

    sequence_id: int
    token_ids: tuple[int, ...]
    state_words: tuple[int, ...]


@dataclass(frozen=True)
class Preempt:
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True)
class SwapOut:
    """Of one group: all of them or none."""

    sequence_ids: tuple[int, ...]


@dataclass(frozen=True)
class SwapInMember:
    sequence_id: int
    num_slots: int


@dataclass(frozen=True)
class SwapIn:
    members: tuple[SwapInMember, ...]


@dataclass(frozen=True)
class Free:
    sequence_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Confirm:
    request_id: str


Op = Arrive | Admit | Commit | Reserve | Fork | Preempt | SwapOut | SwapIn | Free | Confirm


@dataclass(frozen=True)
class Batch:
    """The ops of one message. `prepares_step`: an Execute of `step_id` is to follow."""

    batch_seq: int
    step_id: int
    acknowledged_step: int
    ops: tuple[Op, ...]
    prepares_step: bool = False


class OpStatus(IntEnum):
    """The numbers are those of the wire enum."""

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


@dataclass(frozen=True)
class Table:
    """num_computed_tokens: KV that is there, or that a sibling computes."""

    sequence_id: int
    block_ids: list[int]
    table_version: int
    num_computed_tokens: int = 0


@dataclass(frozen=True)
class OpResult:
    """The status of one op and what it made; the fields of other kinds stay empty."""

    status: OpStatus
    message: str = ""
    sequence_id: int = 0
    arrival_number: int = 0
    candidate_sequence_ids: tuple[int, ...] = ()
    tables: tuple[Table, ...] = ()
    child_sequence_ids: tuple[int, ...] = ()
    failed_groups: tuple[int, ...] = ()
    # Those of them that failed by their tenant's quota.
    quota_groups: tuple[int, ...] = ()


OK = OpResult(OpStatus.OK)


@dataclass(frozen=True)
class TableDeltas:
    """Changed table entries, one a row: table[table_indices] = block_ids."""

    sequence_ids: UInt64s = field(default_factory=lambda: NO_UINT64)
    table_indices: Int32s = field(default_factory=lambda: NO_INT32)
    block_ids: Int32s = field(default_factory=lambda: NO_INT32)
    table_versions: UInt32s = field(default_factory=lambda: NO_UINT32)


NO_DELTAS = TableDeltas()


@dataclass(frozen=True)
class PoolLevels:
    """num_free_blocks: those that hold a cached prefix which nobody uses are free as well."""

    num_free_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_free_sequences: int = 0
    num_free_host_blocks: int = 0


@dataclass(frozen=True)
class BlockCopies:
    """int32 columns. Of a swap one of the two is of host blocks."""

    src: Int32s = field(default_factory=lambda: NO_INT32)
    dst: Int32s = field(default_factory=lambda: NO_INT32)

    def __bool__(self) -> bool:
        return bool(len(self.src))


NO_COPIES = BlockCopies()


@dataclass(frozen=True)
class BatchResult:
    batch_seq: int
    results: tuple[OpResult, ...]
    deltas: TableDeltas
    copy_src: Int32s
    copy_dst: Int32s
    levels: PoolLevels
    swap_ins: BlockCopies = field(default_factory=BlockCopies)
    swap_outs: BlockCopies = field(default_factory=BlockCopies)


@dataclass(frozen=True)
class SequenceStart:
    """A sequence in full, for a worker that does not know it."""

    sequence_id: int
    block_ids: tuple[int, ...]
    table_version: int
    params: SamplingParams
    sample_index: int
    masked_token_ids: tuple[int, ...]
    masked_before_position: int
    request_id: str
    traceparent: str


@dataclass(frozen=True)
class Step:
    """One Execute. Columns over the N rows of the batch, as in `worker.proto`."""

    step_id: int
    starts: tuple[SequenceStart, ...]
    deltas: TableDeltas
    copy_src: Int32s
    copy_dst: Int32s
    dropped_sequence_ids: UInt64s
    sequence_ids: UInt64s
    table_versions: UInt32s
    num_input_tokens: Int32s
    num_computed_tokens: Int32s
    input_token_ids: Int32s
    num_samples: Int32s
    # Before the copies, and after them.
    swap_ins: BlockCopies = field(default_factory=BlockCopies)
    swap_outs: BlockCopies = field(default_factory=BlockCopies)


@dataclass(frozen=True)
class StepTimings:
    """Microseconds, measured at the worker."""

    idle_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True)
class StepResult:
    """sampled_token_ids int32[sum of num_samples], logprobs float32 beside it."""

    step_id: int
    sampled_token_ids: Int32s
    logprobs: npt.NDArray[np.float32]
    timings: StepTimings = StepTimings()


@dataclass(frozen=True)
class RetainedStep:
    """A result the worker still has, with the rows it is of; columns as in `Step`."""

    result: StepResult
    sequence_ids: UInt64s
    num_input_tokens: Int32s
    num_computed_tokens: Int32s
    num_samples: Int32s


@dataclass(frozen=True)
class AdoptedSequence:
    """A sequence as the memory service has it. `running`: it has blocks; `swapped`: it has host
    blocks."""

    sequence_id: int
    candidate: int
    running: bool
    finish_reason: FinishReason | None
    # Ended without a reason: it was pruned, and nothing of it is wanted.
    pruned: bool
    output_token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    table_version: int
    state_word: int
    swapped: bool = False


@dataclass(frozen=True)
class AdoptedRequest:
    """A request's record."""

    request: Request
    arrival_number: int
    sequences: tuple[AdoptedSequence, ...]


@dataclass(frozen=True)
class PendingCopy:
    """A copy-on-write that no executed step has made, and the sequence it is for."""

    sequence_id: int
    src_block_id: int
    dst_block_id: int
