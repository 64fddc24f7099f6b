"""Which cached blocks go first.

Segmented LRU (Karedla, Love and Wherry 1994): a block that was never found goes before one that
was, up to a quarter of the pool of those; within each the one used longest ago goes first, and of
one sequence the last one, for a prefix is worth nothing without its beginning. On the traces of
`benchmarks.prefix` that finds more than plain LRU where the pool is too small for them
(docs/adr/0008).

A block enters a queue whenever its last reference is gone, and one that is used again is not
looked for in it: its entry is stale, since its stamp is another one by then. So every operation
costs O(blocks named), however large the pool is.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.batch import NO_INT32, Column

# Of so many blocks of the pool one may be protected.
PROTECTED_DIVISOR = 4
# Blocks of one entry. What is taken from the front is looked at entry by entry.
MAX_ENTRY_BLOCKS = 256
# Stale ones are thrown out when the queue is this much longer than what it stands for.
MAX_STALE_RATIO = 2
MIN_COMPACTED_BLOCKS = 4096


class LruQueue:
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

    def take(self, count: int) -> list[tuple[int, Column]]:
        """The `count` blocks that go first, with their stamps; there are as many."""
        assert count <= self.num_blocks, f"{count} of {self.num_blocks} cached blocks"
        self.num_blocks -= count
        taken: list[tuple[int, Column]] = []
        while count:
            stamp, blocks = self._entries.popleft()
            self._num_queued -= blocks.size
            blocks = blocks[self._stamps[blocks] == stamp]
            if blocks.size > count:
                self._entries.appendleft((stamp, blocks[count:]))
                self._num_queued += blocks.size - count
                blocks = blocks[:count]
            if blocks.size:
                taken.append((stamp, blocks))
            count -= blocks.size
        return taken

    def blocks(self) -> Column:
        """All whose entry counts, the first to go first; int32."""
        held = [blocks[self._stamps[blocks] == stamp] for stamp, blocks in self._entries]
        return np.concatenate([NO_INT32, *held])

    def _compact(self) -> None:
        kept = [(stamp, blocks[self._stamps[blocks] == stamp]) for stamp, blocks in self._entries]
        self._entries = deque((stamp, blocks) for stamp, blocks in kept if blocks.size)
        self._num_queued = self.num_blocks


class EvictionOrder:
    """Two queues: on probation are blocks that nobody has found yet, or that were protected for
    too long. Those that were found are protected."""

    def __init__(self, stamps: npt.NDArray[np.int64]) -> None:
        num_blocks = stamps.size
        self._max_protected = num_blocks // PROTECTED_DIVISOR
        self.probation = LruQueue(stamps)
        self.protected = LruQueue(stamps)
        self._is_protected: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        # Since it was published.
        self.was_found: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    @property
    def num_blocks(self) -> int:
        return self.probation.num_blocks + self.protected.num_blocks

    def add(self, stamp: int, blocks: Column) -> None:
        """`blocks`, whose stamp this is, are used now; the first one goes first."""
        found = self.was_found[blocks]
        if not found.all():
            self.probation.add(stamp, blocks[~found])
        if found.any():
            self.protect(stamp, blocks[found])
            self._demote(self.protected.num_blocks - self._max_protected)

    def protect(self, stamp: int, blocks: Column) -> None:
        self._is_protected[blocks] = True
        self.protected.add(stamp, blocks)

    def _demote(self, count: int) -> None:
        if count > 0:
            for stamp, blocks in self.protected.take(count):
                self._is_protected[blocks] = False
                self.probation.add(stamp, blocks)

    def remove(self, blocks: Column) -> None:
        """They are used again: the caller gives them another stamp."""
        num_protected = int(np.count_nonzero(self._is_protected[blocks]))
        self._is_protected[blocks] = False
        self.protected.remove(num_protected)
        self.probation.remove(blocks.size - num_protected)

    def take(self, count: int) -> Column:
        """The `count` blocks that go first, int32; there are as many."""
        num_probation = min(count, self.probation.num_blocks)
        taken = self.probation.take(num_probation) + self.protected.take(count - num_probation)
        blocks = np.concatenate([NO_INT32, *(blocks for _, blocks in taken)])
        self._is_protected[blocks] = False
        self.was_found[blocks] = False
        return blocks

    def blocks(self) -> Column:
        """All of them, the first to go first; int32."""
        return np.concatenate((self.probation.blocks(), self.protected.blocks()))
