"""Attention as its definition reads, in float64 loops: shares nothing with the backends."""

from __future__ import annotations

import math

import numpy as np
import torch

from model_worker.attention import AttentionBatch, LayerKv, LayerSpec


def naive_attention(
    spec: LayerSpec, query: np.ndarray, histories: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """query: [T, heads, dim]; one (keys, values) [context, kv_heads, dim] for each query row,
    holding exactly the tokens at positions 0 .. its own."""
    out = np.zeros((query.shape[0], spec.num_heads, spec.value_head_dim))
    for row, (keys, values) in enumerate(histories):
        own = len(keys) - 1
        for head in range(spec.num_heads):
            kv_head = head * spec.num_kv_heads // spec.num_heads
            total, weighted = 0.0, np.zeros(spec.value_head_dim)
            for position in range(len(keys)):
                if spec.sliding_window is not None and own - position >= spec.sliding_window:
                    continue
                score = float(query[row, head] @ keys[position, kv_head]) * spec.scaling
                if spec.softcap is not None:
                    score = spec.softcap * math.tanh(score / spec.softcap)
                total += math.exp(score)
                weighted += math.exp(score) * values[position, kv_head]
            out[row, head] = weighted / total
    return out


class Case:
    """Random sequences with a history in a NaN pool, and the queries of one step.

    shapes: (tokens already present, tokens of this step) of each sequence.
    """

    def __init__(
        self,
        spec: LayerSpec,
        shapes: list[tuple[int, int]],
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        first_block: int = 0,
        num_blocks: int | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        lengths = [past + new for past, new in shapes]
        per_sequence = [-(-length // block_size) for length in lengths]
        needed = sum(per_sequence)
        ids = first_block + rng.permutation(needed + 2)[:needed]
        self.spec, self.block_size = spec, block_size
        shape = (num_blocks or first_block + needed + 2, spec.num_kv_heads, block_size)
        self.layer = LayerKv(
            spec,
            torch.empty((*shape, spec.head_dim), dtype=dtype),
            torch.empty((*shape, spec.value_head_dim), dtype=dtype),
        )
        touched = torch.from_numpy(np.arange(first_block, first_block + needed + 2))
        self.layer.keys[touched] = torch.nan
        self.layer.values[touched] = torch.nan

        # Rounded to dtype once, so that what is compared is the attention and nothing else.
        def random(*size: int) -> np.ndarray:
            drawn = torch.from_numpy(rng.standard_normal(size)).to(dtype)
            return drawn.double().numpy()

        tables = np.zeros((len(shapes), max(per_sequence)), np.int32)
        slots, queries, keys, values, self.histories = [], [], [], [], []
        for i, (past, new) in enumerate(shapes):
            table = ids[sum(per_sequence[:i]) : sum(per_sequence[: i + 1])]
            tables[i, : table.size] = table
            k = random(lengths[i], spec.num_kv_heads, spec.head_dim)
            v = random(lengths[i], spec.num_kv_heads, spec.value_head_dim)
            positions = np.arange(lengths[i])
            slot = table[positions // block_size].astype(np.int64) * block_size
            slot += positions % block_size
            for p in range(past):
                block, offset = divmod(int(slot[p]), block_size)
                self.layer.keys[block, :, offset] = torch.from_numpy(k[p]).to(dtype)
                self.layer.values[block, :, offset] = torch.from_numpy(v[p]).to(dtype)
            slots.append(slot[past:])
            keys.append(k[past:])
            values.append(v[past:])
            queries.append(random(new, spec.num_heads, spec.head_dim))
            self.histories += [(k[: p + 1], v[: p + 1]) for p in range(past, lengths[i])]
        self.batch = AttentionBatch(
            query_starts=np.cumsum([0, *(new for _, new in shapes)]).astype(np.int32),
            context_lens=np.array(lengths, np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate(slots),
        )
        self.query = np.concatenate(queries)
        self.inputs = [
            torch.from_numpy(np.concatenate(parts)).to(dtype) for parts in (queries, keys, values)
        ]

    def run(self, backend) -> np.ndarray:
        plan = backend.plan(self.batch, self.block_size, torch.device("cpu"))
        with torch.inference_mode():
            out = backend.forward(self.layer, *self.inputs, plan)
        assert out.dtype == self.layer.keys.dtype
        assert out.is_contiguous()
        return out.double().numpy()

    def expected(self) -> np.ndarray:
        return naive_attention(self.spec, self.query, self.histories)
