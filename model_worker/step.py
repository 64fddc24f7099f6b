"""What goes into a step and what comes out: plain arrays, nothing of the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


def no_i32() -> I32:
    """An empty int32 column."""
    return np.empty(0, np.int32)


def no_u32() -> U32:
    """An empty uint32 column."""
    return np.empty(0, np.uint32)


def no_u64() -> U64:
    """An empty uint64 column."""
    return np.empty(0, np.uint64)


@dataclass(frozen=True)
class Sampling:
    """Everything a draw depends on beside the logits and the position.

    temperature >= 0 (0 is greedy and the rest is ignored), top_k: 0 or -1 are all tokens,
    0 < top_p <= 1, 0 <= min_p <= 1. `masked_token_ids` are not drawn for positions below
    `masked_before_position`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    masked_token_ids: tuple[int, ...] = ()
    masked_before_position: int = 0


@dataclass(frozen=True)
class SequenceStart:
    """A sequence the worker is to know from here on, or to replace whole."""

    sequence_id: int
    block_ids: I32
    table_version: int
    sampling: Sampling = field(default_factory=Sampling)
    traceparent: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class TableDeltas:
    """table[table_indices[d]] = block_ids[d] of sequence_ids[d]; versions are those after."""

    sequence_ids: U64 = field(default_factory=no_u64)
    table_indices: I32 = field(default_factory=no_i32)
    block_ids: I32 = field(default_factory=no_i32)
    table_versions: U32 = field(default_factory=no_u32)


@dataclass(frozen=True)
class StepInput:
    """One step, column by column as `ExecuteRequest` has it. N rows, T input tokens.

    sequence_ids: uint64[N]; table_versions: uint32[N]; num_input_tokens, num_computed_tokens,
    num_samples: int32[N]; input_token_ids: int32[T]. N may be 0: then swaps, copies, starts, deltas
    and drops are carried out and nothing is computed. Swap-ins come first, then copies, then
    swap-outs.
    """

    step_id: int
    sequence_ids: U64 = field(default_factory=no_u64)
    table_versions: U32 = field(default_factory=no_u32)
    num_input_tokens: I32 = field(default_factory=no_i32)
    num_computed_tokens: I32 = field(default_factory=no_i32)
    input_token_ids: I32 = field(default_factory=no_i32)
    num_samples: I32 = field(default_factory=no_i32)
    copy_src_block_ids: I32 = field(default_factory=no_i32)
    copy_dst_block_ids: I32 = field(default_factory=no_i32)
    swap_in_host_block_ids: I32 = field(default_factory=no_i32)
    swap_in_block_ids: I32 = field(default_factory=no_i32)
    swap_out_block_ids: I32 = field(default_factory=no_i32)
    swap_out_host_block_ids: I32 = field(default_factory=no_i32)
    starts: tuple[SequenceStart, ...] = ()
    deltas: TableDeltas = field(default_factory=TableDeltas)
    dropped_sequence_ids: U64 = field(default_factory=no_u64)
    traceparent: str = ""
    # When it stood ready for the model, as time.perf_counter_ns(); None: as it begins.
    ready_ns: int | None = None


@dataclass(frozen=True)
class StepTimings:
    """Where the time went, in microseconds.

    gap_us: from the end of the previous step to the beginning of this one, while there was work.
    idle_us: of that, what was spent with nothing to do, before this step stood ready; see
    `model_worker.gaps`. prepare_us: tables, copies and swaps, of which copy_us went into copies and
    swaps.
    """

    gap_us: int
    idle_us: int
    prepare_us: int
    copy_us: int
    forward_us: int
    sample_us: int


@dataclass(frozen=True)
class StepOutput:
    """What a step drew, in the order of the rows, num_samples of each.

    sampled_token_ids: int32[sum of num_samples]; logprobs: float32, same length, under the
    unmodified logits. started_unix_ns: when the worker began on the step.
    """

    step_id: int
    started_unix_ns: int
    sampled_token_ids: I32
    logprobs: F32
    timings: StepTimings


@dataclass(frozen=True)
class RetainedStep:
    """What a step had drawn, with the rows it had, for whoever takes its session's place.

    kvmem_boot_id: the life of the memory service it was executed for. The columns are those of
    StepInput.
    """

    kvmem_boot_id: str
    sequence_ids: U64
    num_input_tokens: I32
    num_computed_tokens: I32
    num_samples: I32
    output: StepOutput

    @classmethod
    def of(cls, kvmem_boot_id: str, step: StepInput, output: StepOutput) -> RetainedStep:
        """What is kept of an executed step: not its tables, nor what it was fed."""
        return cls(
            kvmem_boot_id,
            step.sequence_ids,
            step.num_input_tokens,
            step.num_computed_tokens,
            step.num_samples,
            output,
        )

    def is_repeated_by(self, step: StepInput) -> bool:
        """Whether `step` computes again what this one has: a row's sequence at its position."""
        mine = set(zip(self.sequence_ids.tolist(), self.num_computed_tokens.tolist(), strict=True))
        rows = zip(step.sequence_ids.tolist(), step.num_computed_tokens.tolist(), strict=True)
        return any(row in mine for row in rows)
