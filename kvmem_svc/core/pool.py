"""The block pool: which physical blocks are free, cached, in use, or waiting for a step to end.

Reference counts and copy-on-write follow PagedAttention (Kwon et al. 2023, §4.4). The
quarantine is Octavo's own: a worker runs steps behind the memory service's back, so a block
that nobody refers to any more may still be read or written by a step in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.eviction import EvictionOrder
from kvmem_svc.core.moves import StepMoves
from kvmem_svc.core.prefix_cache import PrefixCache
from kvmem_svc.core.tenants import FIRST_CAPACITY

Blocks = npt.NDArray[np.integer]


class BlockPool:
    """Blocks 0 .. num_blocks - 1. Every operation costs O(blocks named), never O(pool).

    `ref_counts` is int32[num_blocks]; only the pages of blocks ever handed out are touched,
    and so are those of the free list: a stack of returned blocks above the ones not used yet.
    A block that nobody refers to and that `cache` has published keeps its content until there
    is no other one left to hand out.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.moves = StepMoves()
        self.cache = PrefixCache(num_blocks, block_size)
        self.ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.num_in_use = 0
        self.num_quarantined = 0
        self.peak_in_use = 0
        self.num_allocations = 0
        self.num_freed = 0
        self.num_copies_on_write = 0
        self.num_evictions = 0
        # By number of a tenant the blocks in use that are counted for it: for whoever was given
        # a block when nobody held it, until nobody holds it.
        self.num_blocks_of: npt.NDArray[np.int64] = np.zeros(FIRST_CAPACITY, np.int64)
        self._tenants: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._returned = np.empty(num_blocks, np.int32)
        self._num_returned = 0
        self._num_ever_used = 0
        # Every retirement has a stamp, which its blocks bear until they are used again: what
        # quarantine and queue hold of a block under another stamp is stale.
        self._stamps: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._last_stamp = 0
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._evictable = EvictionOrder(self._stamps)
        # Release step -> (stamp, blocks). At most one key per step in flight, and one more.
        self._quarantine: dict[int, list[tuple[int, Blocks]]] = {}

    @property
    def num_free(self) -> int:
        return self._num_returned + self.num_blocks - self._num_ever_used

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, whose content may still be asked for."""
        return self._evictable.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return self.num_free + self.num_cached

    def is_cached(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """bool, one for each of `blocks`: available, and published."""
        return self._is_cached[blocks]

    @property
    def num_ever_used(self) -> int:
        """Blocks with an id of this or above have never been handed out."""
        return self._num_ever_used

    def free_blocks(self) -> Blocks:
        """The returned part of the free list, top last; int32. For integrity checks."""
        return self._returned[: self._num_returned]

    def quarantined_blocks(self) -> Blocks:
        """All blocks in quarantine, int32, in no special order. For integrity checks."""
        held = [one for group in self._quarantine.values() for one in group]
        blocks = [self._still_there(stamp, blocks) for stamp, blocks in held]
        return np.concatenate([np.zeros(0, np.int32), *blocks])

    def cached_blocks(self) -> Blocks:
        """All cached blocks, int32, the first to be evicted first. For integrity checks."""
        return self._evictable.blocks()

    def begin_step(self, step_id: int, acknowledged_step: int) -> None:
        """Step `step_id` is being prepared; what waited for `acknowledged_step` is free."""
        self.moves.begin_step(step_id, acknowledged_step)
        for due in [step for step in self._quarantine if step <= acknowledged_step]:
            for stamp, retired in self._quarantine.pop(due):
                blocks = self._still_there(stamp, retired)
                self.num_quarantined -= blocks.size
                self._come_back(stamp, blocks)

    def hold_longer(self, blocks: Blocks, release_step: int) -> None:
        """Those of `blocks` that are in quarantine stay there until `release_step`."""
        for step in [step for step in self._quarantine if step < release_step]:
            for stamp, retired in self._quarantine.pop(step):
                held = self._still_there(stamp, retired)
                self.num_quarantined -= held.size
                longer = np.isin(held, blocks)
                self._hold(stamp, held[longer], release_step)
                self._hold(stamp, held[~longer], step)

    def reserve_tenants(self, capacity: int) -> None:
        """There are tenants with numbers up to capacity - 1."""
        if capacity > self.num_blocks_of.size:
            more = np.zeros(capacity - self.num_blocks_of.size, np.int64)
            self.num_blocks_of = np.concatenate((self.num_blocks_of, more))

    def tenants_of(self, blocks: Blocks) -> npt.NDArray[np.int32]:
        """The tenant that each of `blocks`, in use, is counted for."""
        return self._tenants[blocks]

    def _count_for(self, blocks: Blocks, tenants: Blocks | int) -> None:
        self._tenants[blocks] = tenants
        np.add.at(self.num_blocks_of, self._tenants[blocks], 1)
        self.num_in_use += blocks.size
        self.peak_in_use = max(self.peak_in_use, self.num_in_use)

    def allocate(self, count: int, tenants: Blocks | int) -> Blocks:
        """Take `count` blocks, each with one reference; int32[count]. Cached ones are evicted
        when there are not enough free ones. tenants: whom they are counted for.

        The caller has planned: asking for more than `num_available` is a bug.
        """
        assert 0 <= count <= self.num_available, f"{count} blocks of {self.num_available}"
        num_free = min(count, self.num_free)
        blocks = self._take_free(num_free)
        if num_free < count:
            blocks = np.concatenate((blocks, self._evict(count - num_free)))
        assert not self.ref_counts[blocks].any(), f"one of {blocks} still has references"
        self.ref_counts[blocks] = 1
        self._count_for(blocks, tenants)
        self.num_allocations += count
        return blocks

    def _take_free(self, count: int) -> Blocks:
        num_again = min(count, self._num_returned)
        top = self._num_returned - num_again
        blocks = self._returned[top : self._num_returned][::-1].copy()
        self._num_returned = top
        if num_again < count:
            start = self._num_ever_used
            self._num_ever_used = start + count - num_again
            first_time = np.arange(start, self._num_ever_used, dtype=np.int32)
            blocks = np.concatenate((blocks, first_time)) if num_again else first_time
        return blocks

    def _evict(self, count: int) -> Blocks:
        blocks = self._evictable.take(count)
        self.cache.forget(blocks)  # before anything else can happen to them
        self._is_cached[blocks] = False
        self._stamps[blocks] = 0
        self.num_evictions += count
        return blocks

    def hold(self, blocks: Blocks, tenant: int) -> None:
        """Add one reference to each of `blocks` (distinct, published), which may have none yet:
        then it is neither evicted nor, where it waits for a step, given to anybody else."""
        idle = blocks[self.ref_counts[blocks] == 0]
        if idle.size:
            cached = idle[self._is_cached[idle]]
            self._evictable.remove(cached)
            self.num_quarantined -= idle.size - cached.size
            self._is_cached[idle] = False
            self._stamps[idle] = 0
            self._count_for(idle, tenant)
        self.ref_counts[blocks] += 1
        self._evictable.was_found[blocks] = True

    def drop_content(self, blocks: Blocks) -> None:
        """`blocks` are not published any more: those that were only cached are free."""
        cached = blocks[self._is_cached[blocks]]
        self._evictable.remove(cached)
        self._evictable.was_found[blocks] = False
        self._is_cached[cached] = False
        self._stamps[cached] = 0
        self._put_back(cached)

    def reference(self, blocks: Blocks, count: Blocks | int = 1) -> None:
        """Add `count` references to each of `blocks` (distinct, in use)."""
        self.ref_counts[blocks] += count

    def unreference(self, blocks: Blocks) -> None:
        """Drop one reference to each of `blocks` (distinct); the last one retires a block."""
        left = self.ref_counts[blocks] - 1
        self.ref_counts[blocks] = left
        retired = blocks[left == 0]
        if retired.size:
            self._retire(retired)

    def copy_on_write(self, sources: Blocks, destinations: Blocks) -> Blocks:
        """Note that the step being prepared copies sources -> destinations.

        Each source loses one reference; a source may be named more than once.
        Both sides are held until the step is acknowledged. Returns the blocks to read from:
        a source which the same step fills by a copy is replaced by where that one reads, so
        the copies of a step may be carried out in any order or at once.
        """
        np.subtract.at(self.ref_counts, sources, 1)
        self.num_copies_on_write += sources.size
        origins = self.moves.of_step().add_copies(sources, destinations)
        left_alone = np.unique(sources[self.ref_counts[sources] == 0])
        if left_alone.size:  # published: even its only holder does not write to it
            self._retire(left_alone)
        return origins

    def _retire(self, blocks: Blocks) -> None:
        """Blocks whose last reference is gone wait for the newest step that could touch them.

        That is the newest one issued, or for a block that the step being prepared copies or
        swaps, that step itself.
        """
        moves = self.moves
        self.num_in_use -= blocks.size
        np.subtract.at(self.num_blocks_of, self._tenants[blocks], 1)
        self.num_freed += blocks.size
        self._last_stamp = stamp = self._last_stamp + 1
        self._stamps[blocks] = stamp
        touched = moves.touched_blocks()
        if touched.size:
            is_touched = np.isin(blocks, touched)
            self._hold(stamp, blocks[is_touched], moves.step_id)
            blocks = blocks[~is_touched]
        if moves.nothing_in_flight:
            self._come_back(stamp, blocks)
        else:
            self._hold(stamp, blocks, moves.newest_issued_step)

    def _hold(self, stamp: int, blocks: Blocks, release_step: int) -> None:
        if blocks.size:
            self._quarantine.setdefault(release_step, []).append((stamp, blocks))
            self.num_quarantined += blocks.size

    def _still_there(self, stamp: int, blocks: Blocks) -> Blocks:
        """Those of the blocks retired with `stamp` that were not used again."""
        return blocks[self._stamps[blocks] == stamp]

    def _come_back(self, stamp: int, blocks: Blocks) -> None:
        """No step can touch `blocks` any more: published ones are cached, the last one of a table
        to be evicted first; the others are free."""
        published = self.cache.is_published(blocks)
        if published.any():
            cached = blocks[published][::-1]
            self._is_cached[cached] = True
            self._evictable.add(stamp, cached)
            blocks = blocks[~published]
        self._stamps[blocks] = 0
        self._put_back(blocks)

    def _put_back(self, blocks: Blocks) -> None:
        top = self._num_returned + blocks.size
        self._returned[self._num_returned : top] = blocks
        self._num_returned = top
