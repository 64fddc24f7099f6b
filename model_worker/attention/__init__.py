"""Paged attention: what a backend is given, what it must do, and which ones there are.

A backend writes the keys and values of a step's tokens into the paged KV tensors of a layer
and attends from the step's queries over each sequence's block table (Kwon et al., 2023, §4.1,
"PagedAttention"). Prefill chunks and decodes of many sequences arrive in one flattened batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from model_worker.errors import WorkerError


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step lie. N sequences with rows in the batch, T tokens in all.

    Positions of sequence i's tokens in this step are
    `context_lens[i] - num_queries(i) .. context_lens[i] - 1`, and a token at position p sees
    the keys at 0 .. p of its own sequence.

    query_starts: int32[N + 1], sequence i has the rows query_starts[i]:query_starts[i + 1].
    context_lens: int32[N], KV that exists once this step's tokens are written.
    block_tables: int32[N, B], padded with zeros; row i is good for
        ceil(context_lens[i] / block_size) entries, what lies beyond must not be read.
    slot_mapping: int64[T], block_id * block_size + offset of each token.
    """

    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerSpec:
    """What a model's layer asks of attention; the same in every step.

    sliding_window: a token at position p sees the keys p - sliding_window + 1 .. p.
    softcap: scores s become softcap * tanh(s / softcap) before the mask.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class LayerKv:
    """The paged KV of one layer.

    keys: [num_blocks, num_kv_heads, block_size, head_dim];
    values: [num_blocks, num_kv_heads, block_size, value_head_dim].
    Slots that no token has been written to hold anything at all, NaN included.
    """

    spec: LayerSpec
    keys: torch.Tensor
    values: torch.Tensor


# Copies whole blocks: source and destination block ids, int32[C] each. Destinations are distinct,
# and within the same pools none of them is a source.
BlockCopy = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], None]
# Makes one from the pools to read and those to write, [num_blocks, ...] each; either may be in
# pinned memory of the host.
BlockCopier = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], BlockCopy]


class AttentionBackend(Protocol):
    """Computes paged attention. Created once; `plan` runs once a step, `forward` once a layer.

    device: where weights and KV must be. block_copier: None where torch's own
    indexing copies blocks.
    """

    name: str
    device: torch.device

    @property
    def block_copier(self) -> BlockCopier | None: ...

    def check(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> None:
        """Raise UnsupportedModelError when a layer like `spec` would not be computed rightly."""
        ...

    def plan(self, batch: AttentionBatch, block_size: int, device: torch.device) -> Any:
        """Whatever `forward` needs of `batch` that is the same for every layer."""
        ...

    def forward(
        self, layer: LayerKv, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """Write `key` and `value`, all of them before any is read; then attend.

        query: [T, num_heads, head_dim], key: [T, num_kv_heads, head_dim],
        value: [T, num_kv_heads, value_head_dim], any strides. Returns
        [T, num_heads, value_head_dim], contiguous, in query's dtype.
        """
        ...


# Backends by name, imported when asked for: a backend may need a compiler or a device.
BACKENDS = {
    "reference": ("model_worker.attention.reference", "ReferenceAttention"),
    "cpu": ("model_worker.attention.cpu", "CpuAttention"),
    "cuda": ("model_worker.attention.cuda", "CudaAttention"),
}


def create_backend(name: str) -> AttentionBackend:
    """The backend called `name`. Raises WorkerError for a name that is none."""
    if name not in BACKENDS:
        raise WorkerError(f"--attention {name}: there is no such backend, only {sorted(BACKENDS)}")
    module_name, class_name = BACKENDS[name]
    return getattr(importlib.import_module(module_name), class_name)()
