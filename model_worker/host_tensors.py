"""The host tier: swap space for blocks of the KV pool (Kwon et al. 2023, §4.5), and its size.

Blocks are moved whole. Beside a device with memory of its own it is pinned: the device reads
and writes it over the bus, in the order of its other work, so nobody waits for a swap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from model_worker.attention import BlockCopier, BlockCopy
from model_worker.errors import PoolSizeError

# Left to itself the tier takes this share of the host's memory that is free at start, at most so
# many bytes, and at most as many blocks as the pool has.
AUTOMATIC_MEMORY_SHARE = 0.125
MAX_AUTOMATIC_BYTES = 4 * 2**30
# Blocks that are in between at a time.
MAX_STAGED_BLOCKS = 64


def choose_num_host_blocks(
    *,
    block_bytes: int,
    num_blocks: int,
    available_bytes: int,
    swap_space_bytes: int | None = None,
) -> int:
    """How many blocks the host tier gets; may be none.

    With `swap_space_bytes`: what fits into it. Without: at most `num_blocks`, those of the pool.
    Raises PoolSizeError when that is more than `available_bytes`.
    """
    if swap_space_bytes is None:
        budget = min(int(available_bytes * AUTOMATIC_MEMORY_SHARE), MAX_AUTOMATIC_BYTES)
        return min(max(budget, 0) // block_bytes, num_blocks)
    if swap_space_bytes > available_bytes:
        raise PoolSizeError(
            f"--swap-space asks for {swap_space_bytes / 2**20:.1f} MiB, but only"
            f" {available_bytes / 2**20:.1f} MiB of the host's memory are available"
        )
    return swap_space_bytes // block_bytes


class HostTensors:
    """`num_blocks` host blocks for the pools of a KvTensors, [blocks, ...] each."""

    def __init__(
        self, pools: Sequence[torch.Tensor], num_blocks: int, block_copier: BlockCopier | None
    ) -> None:
        """block_copier: an attention backend's; None: torch's own indexing copies."""
        self.num_blocks = num_blocks
        # Left uninitialised, as the pool is: memory of the CPU's own is there when it is touched.
        host = [
            torch.empty(
                (num_blocks, *pool.shape[1:]),
                dtype=pool.dtype,
                pin_memory=pool.device.type != "cpu",
            )
            for pool in pools
            if num_blocks
        ]
        make = copier_in_torch if block_copier is None else block_copier
        self._copy_out = make(pools, host) if host else None
        self._copy_in = make(host, pools) if host else None

    def swap_out(
        self, block_ids: npt.NDArray[np.int32], host_block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Copy blocks of the pool to host blocks, int32[S] each; host blocks distinct."""
        _copy(self._copy_out, block_ids, host_block_ids)

    def swap_in(
        self, host_block_ids: npt.NDArray[np.int32], block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Copy host blocks to blocks of the pool, int32[S] each; the latter distinct."""
        _copy(self._copy_in, host_block_ids, block_ids)


def _copy(
    copy: BlockCopy | None, sources: npt.NDArray[np.int32], destinations: npt.NDArray[np.int32]
) -> None:
    assert sources.size == destinations.size == np.unique(destinations).size
    if sources.size:
        assert copy is not None, "there is no host tier"
        copy(sources, destinations)


def copier_in_torch(
    source_pools: Sequence[torch.Tensor], destination_pools: Sequence[torch.Tensor]
) -> BlockCopy:
    """A BlockCopier for pools that are in the CPU's memory."""

    def copy(sources: npt.NDArray[np.int32], destinations: npt.NDArray[np.int32]) -> None:
        for at in range(0, sources.size, MAX_STAGED_BLOCKS):
            piece = slice(at, at + MAX_STAGED_BLOCKS)
            src = torch.from_numpy(sources[piece].astype(np.int64))
            dst = torch.from_numpy(destinations[piece].astype(np.int64))
            for source, destination in zip(source_pools, destination_pools, strict=True):
                destination.index_copy_(0, dst, source.index_select(0, src))

    return copy
