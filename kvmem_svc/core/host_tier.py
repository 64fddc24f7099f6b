"""The host tier: swap space for the KV of sequences that had to leave the pool.

Preemption by swapping is PagedAttention's (Kwon et al. 2023, §4.5): all blocks of a sequence group
go and come back together. A host block is reference counted as a block of the pool is, since
sequences that share one share its copy here; it is written once and then only read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.batch import Column
from kvmem_svc.core.moves import StepMoves


class HostTier:
    """Host blocks 0 .. num_blocks - 1. Every operation costs O(blocks named).

    `ref_counts` is int32[num_blocks]: the swapped sequences that each block belongs to. One that
    nobody refers to any more waits until no step can touch it, as blocks of the pool do.
    """

    def __init__(self, num_blocks: int, moves: StepMoves) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.num_in_use = 0
        self.num_quarantined = 0
        # Blocks that were moved here, and back, since the pool was attached.
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self._moves = moves
        self._returned: list[int] = []
        self._num_ever_used = 0
        # Release step -> blocks.
        self._quarantine: dict[int, list[Column]] = {}

    @property
    def num_free(self) -> int:
        return len(self._returned) + self.num_blocks - self._num_ever_used

    @property
    def num_ever_used(self) -> int:
        """Blocks with an id of this or above have never been given."""
        return self._num_ever_used

    def free_blocks(self) -> Column:
        """Those that were given before, int32, the next to be given last."""
        return np.array(self._returned, np.int32)

    def quarantined_blocks(self) -> Column:
        """All in quarantine, int32, in no special order."""
        held = [blocks for group in self._quarantine.values() for blocks in group]
        return np.concatenate([np.zeros(0, np.int32), *held])

    def begin_step(self, acknowledged_step: int) -> None:
        """What waited for `acknowledged_step` is free."""
        if not self._quarantine:  # as in most steps
            return
        for due in [step for step in self._quarantine if step <= acknowledged_step]:
            for blocks in self._quarantine.pop(due):
                self.num_quarantined -= blocks.size
                self._returned.extend(blocks.tolist())

    def hold_longer(self, blocks: Column, release_step: int) -> None:
        """Those of `blocks` that are in quarantine stay there until `release_step`."""
        for step in [step for step in self._quarantine if step < release_step]:
            for held in self._quarantine.pop(step):
                self.num_quarantined -= held.size
                longer = np.isin(held, blocks)
                self._hold(held[longer], release_step)
                self._hold(held[~longer], step)

    def allocate(self, ref_counts: Column) -> Column:
        """A block for each of `ref_counts`, with so many references; int32.

        The caller has planned: asking for more than `num_free` is a bug.
        """
        count = ref_counts.size
        assert count <= self.num_free, f"{count} host blocks of {self.num_free}"
        num_again = min(count, len(self._returned))
        given = [self._returned.pop() for _ in range(num_again)]
        first_time = range(self._num_ever_used, self._num_ever_used + count - num_again)
        self._num_ever_used = first_time.stop
        blocks = np.array([*given, *first_time], np.int32)
        assert not self.ref_counts[blocks].any(), f"one of {blocks} still has references"
        self.ref_counts[blocks] = ref_counts
        self.num_in_use += count
        self.num_swapped_out += count
        return blocks

    def unreference(self, blocks: Column) -> None:
        """Drop one reference to each of `blocks` (distinct). The last one retires a block, until
        the step being prepared is acknowledged if that is to read or write it, else until every
        step that was issued is."""
        left = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = left
        retired = blocks[left == 0]
        if not retired.size:
            return
        moves = self._moves
        self.num_in_use -= retired.size
        is_touched = np.isin(retired, moves.touched_host_blocks())
        self._hold(retired[is_touched], moves.step_id)
        retired = retired[~is_touched]
        if moves.nothing_in_flight:
            self._returned.extend(retired.tolist())
        else:
            self._hold(retired, moves.newest_issued_step)

    def _hold(self, blocks: Column, release_step: int) -> None:
        if blocks.size:
            self._quarantine.setdefault(release_step, []).append(blocks)
            self.num_quarantined += blocks.size
