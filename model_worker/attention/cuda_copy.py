"""Copies of whole KV blocks, all of a step in one launch: copy-on-write, and swap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from model_worker.attention.cuda_kernels import (
    COPY_BLOCKS,
    COPY_ROUND_BYTES,
    COPY_ROUNDS,
    Launcher,
    upload,
)


class BlockCopier:
    """Copies blocks between two lists of pools, tensor by tensor; of one list to itself, too.

    A pool is [num_blocks, ...], contiguous, on the device or in pinned host memory, which the
    device reads and writes over the bus. Their addresses are uploaded once, here.
    """

    def __init__(
        self,
        launcher: Launcher,
        source_pools: Sequence[torch.Tensor],
        destination_pools: Sequence[torch.Tensor],
    ) -> None:
        self._launcher = launcher
        self._device = torch.device(launcher.device_type)
        self._pools = (list(source_pools), list(destination_pools))
        block_bytes = [self._block_bytes(pool) for pool in self._pools[0]]
        assert block_bytes == [self._block_bytes(pool) for pool in self._pools[1]]
        self._num_slices = max(1, -(-max(block_bytes) // (COPY_ROUND_BYTES * COPY_ROUNDS)))
        addresses = [np.array([p.data_ptr() for p in pools], np.int64) for pools in self._pools]
        self._columns = upload([*addresses, np.array(block_bytes, np.int64)], self._device)
        launcher.prepare(COPY_BLOCKS)

    def copy(
        self, source_block_ids: npt.NDArray[np.int32], destination_block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Both int32[C], within the pools. No destination twice, none that is a source as well
        (of the same pools): asserted, since pairs are copied in any order."""
        sources, destinations = source_block_ids, destination_block_ids
        assert sources.size == destinations.size == np.unique(destinations).size
        if self._pools[0][0].data_ptr() == self._pools[1][0].data_ptr():
            assert not np.intersect1d(sources, destinations).size
        for ids, pools in zip((sources, destinations), self._pools, strict=True):
            assert not ids.size or (ids.min() >= 0 and ids.max() < min(p.shape[0] for p in pools))
        if not sources.size:
            return
        ids = upload([sources.astype(np.int32), destinations.astype(np.int32)], self._device)
        self._launcher.launch(
            COPY_BLOCKS,
            (sources.size, len(self._pools[0]), self._num_slices),
            tuple(column.data_ptr() for column in (*self._columns, *ids)),
        )

    @staticmethod
    def _block_bytes(pool: torch.Tensor) -> int:
        num_bytes = pool[0].numel() * pool.element_size()
        assert pool.is_contiguous()
        assert num_bytes % 16 == pool.data_ptr() % 16 == 0
        return num_bytes
