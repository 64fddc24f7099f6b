"""The KV pool of the worker: per layer, paged key and value tensors; and how large to make it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from model_worker.attention import BlockCopier, LayerKv, LayerSpec
from model_worker.errors import PoolSizeError
from model_worker.host_tensors import HostTensors

# Left to itself the pool takes this share of the memory that is free at start: the same machine
# runs the other services, and the weights of a step's activations come on top.
AUTOMATIC_MEMORY_SHARE = 0.25

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512 MB" or "1000000" as bytes. Raises PoolSizeError with the accepted units."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise PoolSizeError(f"{text!r} is not an amount of memory; write it like 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values in all layers."""
    per_slot = sum(spec.num_kv_heads * (spec.head_dim + spec.value_head_dim) for spec in specs)
    return per_slot * block_size * dtype.itemsize


def choose_num_blocks(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    kv_memory_bytes: int | None = None,
) -> int:
    """How many blocks the pool gets.

    With `kv_memory_bytes`: what fits into it. Without: what fits into a quarter of
    `available_bytes`, but no more than `max_num_seqs` sequences of `max_model_len` can use.
    Raises PoolSizeError when that is less than one sequence of `max_model_len` needs.
    """
    needed = math.ceil(max_model_len / block_size)
    budget = kv_memory_bytes
    if budget is None:
        budget = int(available_bytes * AUTOMATIC_MEMORY_SHARE)
    num_blocks = budget // block_bytes
    if kv_memory_bytes is None:
        num_blocks = min(num_blocks, needed * max_num_seqs)
    if num_blocks < needed:
        raise PoolSizeError(
            f"A sequence of {max_model_len} tokens needs {needed} blocks of {block_bytes} bytes"
            f" ({_mib(needed * block_bytes)}); there is room for {num_blocks} in {_mib(budget)}."
            " Raise --kv-memory or lower --max-model-len."
        )
    if num_blocks * block_bytes > available_bytes:
        raise PoolSizeError(
            f"--kv-memory asks for {_mib(num_blocks * block_bytes)}, but only"
            f" {_mib(available_bytes)} of memory are available"
        )
    return num_blocks


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


class KvTensors:
    """The pool: `num_blocks` blocks of `block_size` slots, in every layer; and its host tier."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        block_copier: BlockCopier | None = None,
        *,
        num_host_blocks: int = 0,
    ) -> None:
        """block_copier: an attention backend's. Raises PoolSizeError when there is no memory for
        the host tier."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.bytes_per_block = bytes_per_block(specs, block_size, dtype)
        # Left uninitialised: the system hands out memory as blocks are first written, and
        # attention reads no slot before that.
        self.layers = [
            LayerKv(
                spec,
                keys=torch.empty(
                    (num_blocks, spec.num_kv_heads, block_size, spec.head_dim),
                    dtype=dtype,
                    device=device,
                ),
                values=torch.empty(
                    (num_blocks, spec.num_kv_heads, block_size, spec.value_head_dim),
                    dtype=dtype,
                    device=device,
                ),
            )
            for spec in specs
        ]
        self._pools = [pool for layer in self.layers for pool in (layer.keys, layer.values)]
        self._copy = block_copier(self._pools, self._pools) if block_copier is not None else None
        try:
            self.host = HostTensors(self._pools, num_host_blocks, block_copier)
        except RuntimeError as error:  # torch's way to say that memory is out
            size = _mib(num_host_blocks * self.bytes_per_block)
            raise PoolSizeError(
                f"{num_host_blocks} host blocks ({size}) cannot be had: {error}"
            ) from error

    def copy_blocks(
        self, src_block_ids: npt.NDArray[np.int32], dst_block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Copy whole blocks in every layer, all sources read before any destination is written.

        Both int32[C], ids within the pool, destinations distinct (asserted).
        """
        assert src_block_ids.size == dst_block_ids.size
        assert np.unique(dst_block_ids).size == dst_block_ids.size
        if not src_block_ids.size:
            return
        if self._copy is not None and not np.intersect1d(src_block_ids, dst_block_ids).size:
            self._copy(src_block_ids, dst_block_ids)
            return
        src = torch.from_numpy(src_block_ids.astype(np.int64)).to(self.device)
        dst = torch.from_numpy(dst_block_ids.astype(np.int64)).to(self.device)
        for pool in self._pools:
            pool.index_copy_(0, dst, pool.index_select(0, src))
