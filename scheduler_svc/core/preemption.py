"""How a group that has to give way is preempted: by recomputation or by swapping (paper §4.5).

Recomputing costs a prefill of every token that has KV; swapping costs two copies of its blocks.
Which is cheaper depends on the machine, so the worker measures both when it starts. What is left
out: blocks of it that may still be in the prefix cache when it comes back (which speaks for
recomputing), and that a prefill shares its step with others (which speaks for neither).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.core.sequence import SequenceGroup


class PreemptionMode(StrEnum):
    """auto: whichever is estimated to cost less."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True)
class TierRates:
    """What a worker has measured. A rate of 0 is not known.

    swap_bytes_per_s: of a copy between the pool and the host tier, one way.
    """

    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0
    kv_bytes_per_block: int = 0


def num_blocks_of(group: SequenceGroup) -> int:
    """Blocks that the group holds, those that its candidates share once."""
    return len({block for sequence in group.live for block in sequence.block_table})


def num_tokens_to_recompute(group: SequenceGroup, block_size: int) -> int:
    """What another prefill of the group would compute: what its candidates share once."""
    num_shared = len(group.request.prompt_token_ids) // block_size * block_size
    return sum(
        sequence.num_computed_tokens - (num_shared if i else 0)
        for i, sequence in enumerate(group.live)
    )


def recompute_s(num_tokens: int, rates: TierRates) -> float:
    """Estimated seconds of a prefill of so many tokens."""
    return num_tokens / rates.prefill_tokens_per_s


def swap_s(num_blocks: int, rates: TierRates) -> float:
    """Estimated seconds of so many blocks' way out and in."""
    return 2 * num_blocks * rates.kv_bytes_per_block / rates.swap_bytes_per_s


class Preemption:
    """Chooses for each victim."""

    def __init__(self, mode: PreemptionMode, rates: TierRates, block_size: int) -> None:
        self._mode = mode
        self._rates = rates
        self._block_size = block_size

    def swaps(self, group: SequenceGroup, num_free_host_blocks: int) -> bool:
        """Whether the group is to be swapped out. With the host tier full it is recomputed."""
        if self._mode is PreemptionMode.RECOMPUTE or _computes_for_siblings(group):
            return False
        num_blocks = num_blocks_of(group)
        if num_blocks > num_free_host_blocks:
            return False
        return self._mode is PreemptionMode.SWAP or self._swapping_is_cheaper(group, num_blocks)

    def _swapping_is_cheaper(self, group: SequenceGroup, num_blocks: int) -> bool:
        rates = self._rates
        if not (rates.prefill_tokens_per_s and rates.swap_bytes_per_s):
            return False
        num_tokens = num_tokens_to_recompute(group, self._block_size)
        return swap_s(num_blocks, rates) < recompute_s(num_tokens, rates)


def _computes_for_siblings(group: SequenceGroup) -> bool:
    """Whether a candidate has yet to compute blocks that others already count on: these are not
    worth keeping, and it would get blocks of its own to write in when it comes back."""
    return any(
        sequence.prefix_source is not None
        and sequence.prefix_source.num_computed_tokens < sequence.prefix_source_tokens
        for sequence in group.live
    )
