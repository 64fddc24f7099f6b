"""Paged attention in plain torch: what the other backends are compared with.

Nothing here depends on the layout of a batch beyond what `AttentionBatch` says. Sequences with
one query row (decodes) are computed block by block, all of them together, straight from the
pool's layout; those with more (prefill chunks) one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from model_worker.attention import AttentionBatch, LayerKv, LayerSpec
from model_worker.errors import UnsupportedModelError

# Query rows of a prefill chunk that are scored at once; bounds the scores held in memory to
# num_heads * MAX_QUERY_ROWS * context floats.
MAX_QUERY_ROWS = 128

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Chunk:
    """One sequence with several query rows: rows first_row:first_row + num_rows of the batch."""

    first_row: int
    num_rows: int
    context_len: int
    block_ids: torch.Tensor  # int64[ceil(context_len / block_size)]


@dataclass(frozen=True)
class _Hidden:
    """Slots of the M blocks of `_Decodes` that their queries must not see.

    scores: bool[M, 1, 1, block_size]. partial: int64[P], the blocks that have any hidden slot;
    values: bool[P, 1, block_size, 1], theirs.
    """

    scores: torch.Tensor
    partial: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class _Decodes:
    """All sequences with one query row, as M (sequence, block) pairs.

    rows: int64[S], the query row of each sequence; sequence_of: int64[M] indexes them.
    block_of: int64[M], place of the block in its sequence's table; block_ids: int64[M].
    positions: int64[M, block_size], of each slot; query_positions: int64[M], of the query.
    """

    rows: torch.Tensor
    sequence_of: torch.Tensor
    block_of: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    query_positions: torch.Tensor
    max_blocks: int
    # By sliding window, since the layers of a model may differ in it and in nothing else.
    hidden: dict[int | None, _Hidden] = field(default_factory=dict)

    def hidden_slots(self, sliding_window: int | None) -> _Hidden:
        """The slots that the queries must not see; worked out by the first layer that asks."""
        if sliding_window not in self.hidden:
            mask = ~_visible(sliding_window, self.positions, self.query_positions[:, None])
            partial = torch.nonzero(mask.any(dim=1)).squeeze(1)
            self.hidden[sliding_window] = _Hidden(
                mask[:, None, None, :], partial, mask[partial][:, None, :, None]
            )
        return self.hidden[sliding_window]


@dataclass(frozen=True)
class Plan:
    """What every layer of a step shares."""

    block_of_token: torch.Tensor  # int64[T]
    offset_of_token: torch.Tensor  # int64[T]
    chunks: list[_Chunk]
    decodes: _Decodes | None


class ReferenceAttention:
    """The reference backend: any head size, grouped queries, sliding windows, softcap."""

    name = "reference"
    device = torch.device("cpu")
    block_copier = None

    def check(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> None:
        del block_size
        if dtype not in SUPPORTED_DTYPES:
            raise UnsupportedModelError(f"reference attention has no {dtype}")
        if spec.num_heads % spec.num_kv_heads:
            raise UnsupportedModelError(
                f"{spec.num_heads} query heads cannot be grouped over {spec.num_kv_heads} KV heads"
            )

    def plan(self, batch: AttentionBatch, block_size: int, device: torch.device) -> Plan:
        num_rows = np.diff(batch.query_starts)
        num_blocks = -(-batch.context_lens.astype(np.int64) // block_size)
        slots = torch.from_numpy(batch.slot_mapping).to(device)
        return Plan(
            block_of_token=slots // block_size,
            offset_of_token=slots % block_size,
            chunks=[
                _Chunk(
                    first_row=int(batch.query_starts[i]),
                    num_rows=int(num_rows[i]),
                    context_len=int(batch.context_lens[i]),
                    block_ids=_indices(batch.block_tables[i, : num_blocks[i]], device),
                )
                for i in np.flatnonzero(num_rows > 1)
            ],
            decodes=_plan_decodes(batch, np.flatnonzero(num_rows == 1), num_blocks, block_size),
        )

    def forward(
        self,
        layer: LayerKv,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        layer.keys[plan.block_of_token, :, plan.offset_of_token] = key
        layer.values[plan.block_of_token, :, plan.offset_of_token] = value
        out = query.new_empty((query.shape[0], query.shape[1], layer.spec.value_head_dim))
        if plan.decodes is not None:
            out[plan.decodes.rows] = _attend_decodes(layer, query, plan.decodes).to(out.dtype)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            out[rows] = _attend_chunk(layer, query[rows], chunk).to(out.dtype)
        return out


def _indices(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _plan_decodes(
    batch: AttentionBatch, sequences: np.ndarray, num_blocks: np.ndarray, block_size: int
) -> _Decodes | None:
    """Lay out the blocks of the sequences that have one query row; None when none has."""
    if not sequences.size:
        return None
    sequence_of = np.repeat(np.arange(sequences.size), num_blocks[sequences])
    ends = np.cumsum(num_blocks[sequences])
    block_of = np.arange(ends[-1]) - np.repeat(ends - num_blocks[sequences], num_blocks[sequences])
    query_positions = batch.context_lens[sequences][sequence_of].astype(np.int64) - 1
    return _Decodes(
        rows=torch.from_numpy(batch.query_starts[sequences].astype(np.int64)),
        sequence_of=torch.from_numpy(sequence_of),
        block_of=torch.from_numpy(block_of),
        block_ids=torch.from_numpy(
            batch.block_tables[sequences[sequence_of], block_of].astype(np.int64)
        ),
        positions=torch.from_numpy(block_of[:, None] * block_size + np.arange(block_size)),
        query_positions=torch.from_numpy(query_positions),
        max_blocks=int(num_blocks[sequences].max()),
    )


def _visible(
    sliding_window: int | None, key_positions: torch.Tensor, query_positions: torch.Tensor
) -> torch.Tensor:
    """Which keys a query sees: those at or before it, within the sliding window if there is one."""
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    return visible


def _scores(spec: LayerSpec, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """query: [..., rows, head_dim], keys: [..., slots, head_dim] -> [..., rows, slots], float32."""
    scores = (query.float() * spec.scaling) @ keys.float().transpose(-1, -2)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores


def _attend_decodes(layer: LayerKv, query: torch.Tensor, plan: _Decodes) -> torch.Tensor:
    """One query row per sequence: [S, num_heads, value_head_dim] in float32.

    Scores and weighted sums are made per block in the pool's own layout; only the softmax, which
    spans a whole sequence, needs the blocks of a sequence side by side.
    """
    spec = layer.spec
    num_sequences, group = plan.rows.numel(), spec.num_heads // spec.num_kv_heads
    per_sequence = query[plan.rows].reshape(num_sequences, spec.num_kv_heads, group, spec.head_dim)
    hidden = plan.hidden_slots(spec.sliding_window)

    keys = layer.keys.index_select(0, plan.block_ids)  # [M, num_kv_heads, block_size, head_dim]
    scores = _scores(spec, per_sequence.index_select(0, plan.sequence_of), keys)
    # Unwritten slots may hold NaN: filled over here, and their values zeroed below.
    scores.masked_fill_(hidden.scores, -torch.inf)
    side_by_side = scores.new_full((num_sequences, plan.max_blocks, *scores.shape[1:]), -torch.inf)
    side_by_side[plan.sequence_of, plan.block_of] = scores
    side_by_side -= side_by_side.amax(dim=(1, 4), keepdim=True)
    weights = side_by_side.exp_()
    weights /= weights.sum(dim=(1, 4), keepdim=True)

    values = layer.values.index_select(0, plan.block_ids).float()
    values[hidden.partial] = values[hidden.partial].masked_fill(hidden.values, 0.0)
    per_block = weights[plan.sequence_of, plan.block_of] @ values
    out = per_block.new_zeros((num_sequences, plan.max_blocks, *per_block.shape[1:]))
    out[plan.sequence_of, plan.block_of] = per_block
    return out.sum(dim=1).reshape(num_sequences, spec.num_heads, spec.value_head_dim)


def _attend_chunk(layer: LayerKv, query: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """Several query rows of one sequence: [num_rows, num_heads, value_head_dim] in float32.

    Gathers exactly the context's tokens, so a slot that nobody has written is never read.
    """
    spec, length = layer.spec, chunk.context_len
    group = spec.num_heads // spec.num_kv_heads
    keys = _gather(layer.keys, chunk.block_ids, length)
    values = _gather(layer.values, chunk.block_ids, length)
    key_positions = torch.arange(length, device=query.device)
    query_positions = key_positions[length - chunk.num_rows :]
    # [num_kv_heads, group, num_rows, head_dim]: the heads of a group share one KV head.
    grouped = query.reshape(chunk.num_rows, spec.num_kv_heads, group, spec.head_dim)
    grouped = grouped.permute(1, 2, 0, 3)
    outs = []
    for rows, positions in zip(
        grouped.split(MAX_QUERY_ROWS, dim=2), query_positions.split(MAX_QUERY_ROWS), strict=True
    ):
        scores = _scores(spec, rows, keys[:, None])
        visible = _visible(spec.sliding_window, key_positions, positions[:, None])
        scores.masked_fill_(~visible, -torch.inf)
        outs.append(torch.softmax(scores, dim=-1) @ values[:, None])
    out = torch.cat(outs, dim=2)
    return out.permute(2, 0, 1, 3).reshape(chunk.num_rows, spec.num_heads, spec.value_head_dim)


def _gather(pool: torch.Tensor, block_ids: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` slots of a sequence's blocks: [num_kv_heads, length, dim], float32."""
    blocks = pool[block_ids].transpose(0, 1)
    return blocks.reshape(pool.shape[1], -1, pool.shape[3])[:, :length].float()
