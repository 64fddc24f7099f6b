"""Paged attention on a CUDA device: the kernels in `cuda/`, over the pool where it lies.

Every query row, of a decode or of a prefill chunk, is one row of the same kernel: a chunk reads
its sequence's KV once per row. That is right and simple, and slow for long prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_worker.attention import AttentionBatch, BlockCopy, LayerKv, LayerSpec
from model_worker.attention.cuda_copy import BlockCopier
from model_worker.attention.cuda_kernels import (
    ELEMENTS,
    HEAD_DIMS,
    WRITE_KV,
    AttentionKernels,
    Launcher,
    attention_kernels,
    upload,
)
from model_worker.errors import UnsupportedModelError

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 128
# A split of fewer tiles is not worth its merging; more splits than this merge slowly.
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 128


@dataclass(frozen=True)
class Plan:
    """The step's columns on the device, in one upload.

    slot_mapping: int64[T]; row_sequences: int32[T]; row_lengths: int32[T], tokens that each
    query row sees at most; block_tables: int32[N, B]. max_row_length: of row_lengths.
    """

    slot_mapping: torch.Tensor
    row_sequences: torch.Tensor
    row_lengths: torch.Tensor
    block_tables: torch.Tensor
    max_row_length: int


def choose_tiles_per_split(
    num_tiles: int, num_thread_blocks: int, num_resident_thread_blocks: int
) -> int:
    """How many tiles a split takes, so that the thread blocks fill the device once.

    num_tiles: of the longest row. num_thread_blocks: there are without splitting.
    """
    wanted = -(-num_resident_thread_blocks // num_thread_blocks)
    tiles = max(-(-num_tiles // min(wanted, MAX_SPLITS)), MIN_TILES_PER_SPLIT)
    return min(tiles, num_tiles)


class CudaAttention:
    """The `cuda` backend: float32, float16 and bfloat16 KV, grouped queries, windows, softcap."""

    name = "cuda"

    def __init__(self, launcher: Launcher | None = None, split_tokens: int | None = None) -> None:
        """launcher: None is the current CUDA device. Raises WorkerError when there is none.

        split_tokens: None chooses by what fills the device, so rounding depends on the batch;
        a number, a multiple of 64, makes every row's bits the same in any company.
        """
        if launcher is None:
            from model_worker.attention.cuda_launcher import CupyLauncher

            launcher = CupyLauncher()
        self.launcher = launcher
        self.device = torch.device(launcher.device_type)
        assert split_tokens is None or (split_tokens > 0 and split_tokens % 64 == 0), split_tokens
        self._split_tokens = split_tokens
        self._num_resident: dict[AttentionKernels, int] = {}

    def check(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> None:
        """Refuse what the kernels do not compute; compile and load those `spec` needs."""
        if dtype not in ELEMENTS:
            raise UnsupportedModelError(
                f"cuda attention has no {dtype}, only {', '.join(map(str, ELEMENTS))}"
            )
        if spec.head_dim not in HEAD_DIMS or spec.value_head_dim != spec.head_dim:
            raise UnsupportedModelError(
                f"cuda attention has no heads of {spec.head_dim} (values {spec.value_head_dim});"
                f" there are {', '.join(map(str, HEAD_DIMS))}; --attention reference has all"
            )
        if spec.num_heads % spec.num_kv_heads:
            raise UnsupportedModelError(
                f"{spec.num_heads} query heads cannot be grouped over {spec.num_kv_heads} KV heads"
            )
        if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE:
            raise UnsupportedModelError(
                f"cuda attention has no blocks of {block_size} tokens, only"
                f" {MIN_BLOCK_SIZE}..{MAX_BLOCK_SIZE}"
            )
        self.launcher.prepare(WRITE_KV)
        kernels = attention_kernels(dtype, spec.head_dim, spec.num_heads // spec.num_kv_heads)
        self.launcher.prepare(kernels.merge)
        self._num_resident[kernels] = self.launcher.prepare(kernels.attention)

    def block_copier(
        self, source_pools: Sequence[torch.Tensor], destination_pools: Sequence[torch.Tensor]
    ) -> BlockCopy:
        """Copies of all pools in one launch."""
        return BlockCopier(self.launcher, source_pools, destination_pools).copy

    def plan(self, batch: AttentionBatch, block_size: int, device: torch.device) -> Plan:
        del block_size
        if device.type != self.device.type:
            raise UnsupportedModelError(f"cuda attention cannot run on {device}")
        num_rows = np.diff(batch.query_starts)
        sequences = np.repeat(np.arange(num_rows.size, dtype=np.int32), num_rows)
        behind = batch.query_starts[1:][sequences] - np.arange(sequences.size)
        lengths = (batch.context_lens[sequences] - behind + 1).astype(np.int32)
        columns = upload(
            [batch.slot_mapping.astype(np.int64), sequences, lengths, batch.block_tables], device
        )
        return Plan(*columns, max_row_length=int(lengths.max(initial=0)))

    def forward(
        self,
        layer: LayerKv,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        self._write(layer, key, value, plan)
        return self._attend(layer, query, plan).to(query.dtype)

    def _write(self, layer: LayerKv, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> None:
        pool = layer.keys
        # Held in names while the kernel has their addresses.
        key, value = (_rows_in_chunks(rows.to(pool.dtype)) for rows in (key, value))
        grid = (key.shape[0], 1, 1)
        self.launcher.launch(
            WRITE_KV,
            grid,
            (
                *(tensor.data_ptr() for tensor in (key, value, layer.keys, layer.values)),
                plan.slot_mapping.data_ptr(),
                *_byte_strides(key, value),
                *_byte_strides(pool),
                np.int32(pool.shape[1]),
                np.int32(pool.shape[3] * pool.element_size() // 16),
                np.int32(pool.shape[2]),
            ),
        )

    def _attend(self, layer: LayerKv, query: torch.Tensor, plan: Plan) -> torch.Tensor:
        spec, pool = layer.spec, layer.keys
        query = query.to(pool.dtype)
        if query.stride(2) != 1:
            query = query.contiguous()
        group = spec.num_heads // spec.num_kv_heads
        kernels = attention_kernels(pool.dtype, spec.head_dim, group)
        num_rows, window = query.shape[0], spec.sliding_window or 0
        tiles_per_split, num_splits = self._splits(kernels, spec, num_rows, plan.max_row_length)
        out = query.new_empty((num_rows, spec.num_heads, spec.head_dim))
        # What the splits leave; nobody looks at it when there is one.
        split_shape = (num_rows, spec.num_heads, num_splits if num_splits > 1 else 0)
        stats = query.new_empty((*split_shape, 2), dtype=torch.float32)
        partial_out = query.new_empty((*split_shape, spec.head_dim), dtype=torch.float32)
        self.launcher.launch(
            kernels.attention,
            (num_rows, spec.num_kv_heads * kernels.parts, num_splits),
            (
                *(t.data_ptr() for t in (pool, layer.values, query, out, stats, partial_out)),
                *(t.data_ptr() for t in (plan.block_tables, plan.row_sequences, plan.row_lengths)),
                np.int64(plan.block_tables.shape[1]),
                *_byte_strides(pool),
                *_byte_strides(query),
                *map(np.int32, (pool.shape[2], spec.num_heads, group, kernels.parts)),
                np.int32(window),
                np.int32(tiles_per_split),
                np.float32(spec.scaling),
                np.float32(spec.softcap or 0.0),
            ),
        )
        if num_splits > 1:
            self.launcher.launch(
                kernels.merge,
                (num_rows, spec.num_heads, 1),
                (
                    *(t.data_ptr() for t in (out, stats, partial_out, plan.row_lengths)),
                    *map(np.int32, (num_splits, window, tiles_per_split)),
                ),
            )
        return out

    def _splits(
        self, kernels: AttentionKernels, spec: LayerSpec, num_rows: int, max_row_length: int
    ) -> tuple[int, int]:
        """(tiles per split, splits) of the longest row."""
        longest = max_row_length
        if spec.sliding_window is not None:
            # A window that begins inside a tile reaches into one more.
            longest = min(longest, spec.sliding_window + kernels.tile - 1)
        num_tiles = -(-longest // kernels.tile)
        if self._split_tokens is not None:
            tiles_per_split = self._split_tokens // kernels.tile
        else:
            tiles_per_split = choose_tiles_per_split(
                num_tiles, num_rows * spec.num_kv_heads * kernels.parts, self._num_resident[kernels]
            )
        return tiles_per_split, -(-num_tiles // tiles_per_split)


def _byte_strides(*tensors: torch.Tensor) -> list[np.int64]:
    """Of the first two dimensions of each."""
    return [np.int64(t.stride(i) * t.element_size()) for t in tensors for i in range(2)]


def _rows_in_chunks(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [T, heads, dim], copied only where its rows are not made of aligned 16-byte pieces."""
    size = rows.element_size()
    places = (rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size)
    if rows.stride(2) == 1 and not any(place % 16 for place in places):
        return rows
    return rows.contiguous()
