"""Paged problems for attention backends: scattered blocks, poisoned slots, ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_worker.attention import AttentionBackend, AttentionBatch, LayerKv, LayerSpec


@dataclass(frozen=True)
class Case:
    """One step of one layer: the pool before it, and the step's query, key and value rows."""

    layer: LayerKv
    batch: AttentionBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.layer.keys.shape[2]

    def run(self, backend: AttentionBackend) -> tuple[torch.Tensor, LayerKv]:
        """(output, the pool after) on a copy of the pool."""
        layer = LayerKv(self.layer.spec, self.layer.keys.clone(), self.layer.values.clone())
        plan = backend.plan(self.batch, self.block_size, torch.device("cpu"))
        return backend.forward(layer, self.query, self.key, self.value, plan), layer


@dataclass(frozen=True)
class Tokens:
    """The whole keys, values and queries of one sequence, whatever step computes which."""

    query: torch.Tensor  # [length, num_heads, head_dim]
    key: torch.Tensor  # [length, num_kv_heads, head_dim]
    value: torch.Tensor


def draw_tokens(spec: LayerSpec, length: int, dtype: torch.dtype, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(length, heads, spec.head_dim, generator=generator).to(dtype)

    return Tokens(rows(spec.num_heads), rows(spec.num_kv_heads), rows(spec.num_kv_heads))


def build(
    spec: LayerSpec,
    sequences: Sequence[tuple[Tokens, int, int]],
    block_size: int,
    seed: int = 0,
) -> Case:
    """A step over sequences given as (tokens, context length, rows in this step).

    What lies before the step's rows is in the pool already, in blocks scattered at random; every
    other slot holds NaN.
    """
    draw = np.random.default_rng(seed)
    dtype = sequences[0][0].key.dtype
    num_blocks = [-(-context // block_size) for _, context, _ in sequences]
    pool_blocks = sum(num_blocks) + 2
    order = draw.permutation(pool_blocks).astype(np.int32)
    shape = (pool_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    tables = np.zeros((len(sequences), max(num_blocks)), np.int32)
    slots, parts, at = [], [], 0
    for index, (tokens, context, rows) in enumerate(sequences):
        table = order[at : at + num_blocks[index]]
        at += num_blocks[index]
        tables[index, : len(table)] = table
        for position in range(context):
            block, offset = int(table[position // block_size]), position % block_size
            if position < context - rows:
                keys[block, :, offset] = tokens.key[position]
                values[block, :, offset] = tokens.value[position]
            else:
                slots.append(block * block_size + offset)
        parts.append((tokens, slice(context - rows, context)))
    batch = AttentionBatch(
        query_starts=np.cumsum([0, *(rows for _, _, rows in sequences)]).astype(np.int32),
        context_lens=np.array([context for _, context, _ in sequences], np.int32),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
    )
    return Case(
        LayerKv(spec, keys, values),
        batch,
        *(torch.cat([getattr(t, name)[rows] for t, rows in parts]) for name in _ROWS),
    )


_ROWS = ("query", "key", "value")
