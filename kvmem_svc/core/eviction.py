"""Which cached blocks go first: those used longest ago, of one sequence the last ones first.

A block enters the queue whenever its last reference is gone, and one that is used again is not
looked for in it: its entry is stale, since its stamp is another one by then. So every operation
costs O(blocks named), however large the pool is.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.batch import NO_INT32, Column

# Blocks of one entry. What is taken from the front is looked at entry by entry.
MAX_ENTRY_BLOCKS = 256
# Stale ones are thrown out when the queue is this much longer than what it stands for.
MAX_STALE_RATIO = 2
MIN_COMPACTED_BLOCKS = 4096


class EvictionQueue:
    """Least recently used first. `stamps` is the pool's, int64[num_blocks]: the entry that
    counts for a block is the one with its stamp."""

    def __init__(self, stamps: npt.NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._entries: deque[tuple[int, Column]] = deque()
        self._num_queued = 0
        # Blocks whose entry counts.
        self.num_blocks = 0

    def add(self, stamp: int, blocks: Column) -> None:
        """`blocks`, whose stamp this is, are used now; the first one goes first."""
        for start in range(0, blocks.size, MAX_ENTRY_BLOCKS):
            self._entries.append((stamp, blocks[start : start + MAX_ENTRY_BLOCKS]))
        self._num_queued += blocks.size
        self.num_blocks += blocks.size
        if self._num_queued > MAX_STALE_RATIO * self.num_blocks + MIN_COMPACTED_BLOCKS:
            self._compact()

    def remove(self, count: int) -> None:
        """So many blocks are used again: the caller gives them another stamp."""
        self.num_blocks -= count

    def take(self, count: int) -> Column:
        """The `count` blocks that go first, int32; there are as many."""
        assert count <= self.num_blocks, f"{count} of {self.num_blocks} cached blocks"
        self.num_blocks -= count
        taken: list[Column] = []
        while count:
            stamp, blocks = self._entries.popleft()
            self._num_queued -= blocks.size
            blocks = blocks[self._stamps[blocks] == stamp]
            if blocks.size > count:
                self._entries.appendleft((stamp, blocks[count:]))
                self._num_queued += blocks.size - count
                blocks = blocks[:count]
            taken.append(blocks)
            count -= blocks.size
        return np.concatenate(taken) if taken else NO_INT32

    def blocks(self) -> Column:
        """All whose entry counts, the first to go first; int32."""
        held = [blocks[self._stamps[blocks] == stamp] for stamp, blocks in self._entries]
        return np.concatenate([NO_INT32, *held])

    def _compact(self) -> None:
        kept = [(stamp, blocks[self._stamps[blocks] == stamp]) for stamp, blocks in self._entries]
        self._entries = deque((stamp, blocks) for stamp, blocks in kept if blocks.size)
        self._num_queued = self.num_blocks
