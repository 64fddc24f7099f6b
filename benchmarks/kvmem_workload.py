"""What `benchmarks.kvmem` asks of the memory service, as ops of the wire, and how it counts.

The same ops go to the core alone and to a service (see `kvmem_sides`); vLLM gets the same
prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.service.columns import I32, U64, pack
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2

BLOCK_SIZE = 16
PROMPT_LEN = 64
MAX_MODEL_LEN = 4096
# Of the host tier: for a request that is swapped out, and those that steps under way still read.
NUM_HOST_BLOCKS = 128
VOCABULARY = 50_000
WARMUP_STEPS = 64

Tokens = npt.NDArray[np.int32]


@dataclass
class Timings:
    """Samples of one kind, in nanoseconds."""

    samples_ns: list[int] = field(default_factory=list)

    @property
    def mean_us(self) -> float:
        """Total divided by count: nothing is left out."""
        return round(sum(self.samples_ns) / len(self.samples_ns) / 1000, 1)

    def percentile_us(self, percent: float) -> float:
        return round(float(np.percentile(self.samples_ns, percent)) / 1000, 1)


def summary(name: str, timings: Timings) -> dict[str, float]:
    return {
        name: timings.mean_us,
        f"{name}_p50": timings.percentile_us(50),
        f"{name}_p99": timings.percentile_us(99),
    }


# --- prompts and tokens ----------------------------------------------------------------


def random_tokens(seed: int | tuple[int, ...], *shape: int) -> Tokens:
    """Token ids without a common prefix: nothing is shared by accident."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape, np.int32)


def staggered_prompts(num_sequences: int, seed: int = 0) -> list[Tokens]:
    """Lengths differ, so that about one sequence in BLOCK_SIZE needs a block in each step."""
    tokens = random_tokens(seed, num_sequences, PROMPT_LEN + BLOCK_SIZE)
    return [row[: PROMPT_LEN + number % BLOCK_SIZE] for number, row in enumerate(tokens)]


def num_blocks_for(num_sequences: int, num_steps: int) -> int:
    per_sequence = -(-(PROMPT_LEN + BLOCK_SIZE + num_steps) // BLOCK_SIZE)
    return num_sequences * (per_sequence + 1)


# --- ops -------------------------------------------------------------------------------


def add_arrive(step: pb.StepOps, request_id: str, prompt: Tokens, num_candidates: int = 1) -> None:
    arrive = step.ops.add().arrive
    arrive.request_id = request_id
    arrive.num_candidates = num_candidates
    arrive.prompt_token_ids.extend(prompt.tolist())


def add_admit(step: pb.StepOps, sequence_id: int, num_slots: int) -> None:
    step.ops.add().admit.members.add(
        sequence_id=sequence_id, num_slots=num_slots, use_prefix_cache=True
    )


def add_computed(step: pb.StepOps, sequence_id: int, token: int, num_computed: int) -> None:
    """A prefill was executed, and this is the token that it led to."""
    commit = step.ops.add().commit
    commit.sequence_ids = pack([sequence_id], U64)
    commit.token_ids = pack([token], I32)
    commit.num_computed_tokens = pack([num_computed], I32)


def add_fork(step: pb.StepOps, sequence_id: int) -> None:
    fork = step.ops.add().fork
    fork.sequence_id = sequence_id
    fork.num_children = 1


def add_reserve(step: pb.StepOps, sequence_id: int, num_slots: int) -> None:
    reserve = step.ops.add().reserve
    reserve.sequence_ids = pack([sequence_id], U64)
    reserve.num_slots = pack([num_slots], I32)


def add_swap_out(step: pb.StepOps, sequence_ids: Sequence[int]) -> None:
    step.ops.add().swap_out.sequence_ids.extend(sequence_ids)


def add_swap_in(step: pb.StepOps, sequence_id: int, num_slots: int) -> None:
    step.ops.add().swap_in.members.add(sequence_id=sequence_id, num_slots=num_slots)


def add_free(step: pb.StepOps, sequence_ids: Sequence[int]) -> None:
    free = step.ops.add().free
    free.sequence_ids.extend(sequence_ids)
    free.finish_reason = types_pb2.FINISH_REASON_STOP


def add_confirm(step: pb.StepOps, request_id: str) -> None:
    step.ops.add().confirm.request_id = request_id


class Decoding:
    """N sequences whose prompts are computed and that decode a token in each step."""

    def __init__(self, sequence_ids: Sequence[int], prompts: Sequence[Tokens]) -> None:
        self.sequence_ids = np.array(sequence_ids, np.uint64)
        self.lengths = np.array([prompt.size for prompt in prompts], np.int32)

    def add_step(self, step: pb.StepOps, tokens: Tokens) -> None:
        """One token more each, int32[N], and the slots that the next ones need."""
        ids = pack(self.sequence_ids, U64)
        commit = step.ops.add().commit
        commit.sequence_ids = ids
        commit.token_ids = pack(tokens, I32)
        commit.num_computed_tokens = pack(self.lengths, I32)
        self.lengths = self.lengths + 1
        reserve = step.ops.add().reserve
        reserve.sequence_ids = ids
        reserve.num_slots = pack(self.lengths, I32)
