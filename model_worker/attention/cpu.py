"""Paged attention in C++: reads each KV block where it lies, once, in one fixed order.

The kernel and what it promises stand in `model_worker/native/paged_attention.cpp`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from model_worker.attention import AttentionBatch, LayerKv, LayerSpec
from model_worker.errors import UnsupportedModelError
from model_worker.native import load_library

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)
KV_DTYPES = (torch.float32, torch.bfloat16)


class _Problem(ctypes.Structure):
    """`Problem` of paged_attention.cpp, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key", "value", "query", "out")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        ("slot_mapping", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_stride", "block_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, ctypes.c_int32) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "block_size", "sliding_window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_int32) for name in ("num_threads", "kv_is_bfloat16")),
        ("query_is_bfloat16", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Plan:
    """A step's problem without its layer, and the columns it points to, kept alive with it."""

    problem: _Problem
    columns: tuple[npt.NDArray[Any], ...]


class CpuAttention:
    """The `cpu` backend: float32 and bfloat16 KV, grouped queries, sliding windows, softcap."""

    name = "cpu"
    device = torch.device("cpu")
    block_copier = None

    def __init__(self) -> None:
        """Builds the library on first use. Raises NativeBuildError."""
        self._attend = load_library().octavo_paged_attention
        self._attend.argtypes = [ctypes.c_void_p]
        self._attend.restype = ctypes.c_int

    def check(self, spec: LayerSpec, block_size: int, dtype: torch.dtype) -> None:
        del block_size
        if dtype not in KV_DTYPES:
            raise UnsupportedModelError(f"cpu attention has no {dtype}, only float32 and bfloat16")
        if spec.head_dim not in HEAD_DIMS or spec.value_head_dim != spec.head_dim:
            raise UnsupportedModelError(
                f"cpu attention has no heads of {spec.head_dim} (values {spec.value_head_dim});"
                f" there are {', '.join(map(str, HEAD_DIMS))}; --attention reference has all"
            )
        if spec.num_heads % spec.num_kv_heads:
            raise UnsupportedModelError(
                f"{spec.num_heads} query heads cannot be grouped over {spec.num_kv_heads} KV heads"
            )

    def plan(self, batch: AttentionBatch, block_size: int, device: torch.device) -> Plan:
        if device.type != "cpu":
            raise UnsupportedModelError(f"cpu attention cannot run on {device}")
        block_tables = np.ascontiguousarray(batch.block_tables, np.int32)
        query_starts = np.ascontiguousarray(batch.query_starts, np.int32)
        context_lens = np.ascontiguousarray(batch.context_lens, np.int32)
        slot_mapping = np.ascontiguousarray(batch.slot_mapping, np.int64)
        problem = _Problem(
            block_tables=block_tables.ctypes.data,
            query_starts=query_starts.ctypes.data,
            context_lens=context_lens.ctypes.data,
            slot_mapping=slot_mapping.ctypes.data,
            table_stride=block_tables.shape[1],
            num_sequences=len(context_lens),
            block_size=block_size,
            num_threads=torch.get_num_threads(),
        )
        return Plan(problem, (block_tables, query_starts, context_lens, slot_mapping))

    def forward(
        self,
        layer: LayerKv,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        # All held in names of their own while the kernel has their addresses.
        dtype = query.dtype
        query = _rows(query, dtype if dtype in KV_DTYPES else torch.float32)
        key, value = _rows(key, layer.keys.dtype), _rows(value, layer.values.dtype)
        spec, problem = layer.spec, plan.problem
        out = torch.empty((query.shape[0], spec.num_heads, spec.head_dim), dtype=query.dtype)
        problem.keys, problem.values = layer.keys.data_ptr(), layer.values.data_ptr()
        problem.block_stride, problem.head_stride, _, _ = layer.keys.stride()
        problem.key, problem.value = key.data_ptr(), value.data_ptr()
        problem.query, problem.out = query.data_ptr(), out.data_ptr()
        problem.key_token_stride, problem.key_head_stride, _ = key.stride()
        problem.value_token_stride, problem.value_head_stride, _ = value.stride()
        problem.query_token_stride, problem.query_head_stride, _ = query.stride()
        problem.num_heads, problem.num_kv_heads = spec.num_heads, spec.num_kv_heads
        problem.head_dim, problem.sliding_window = spec.head_dim, spec.sliding_window or 0
        problem.scaling, problem.softcap = spec.scaling, spec.softcap or 0.0
        problem.kv_is_bfloat16 = layer.keys.dtype == torch.bfloat16
        problem.query_is_bfloat16 = query.dtype == torch.bfloat16
        failed = self._attend(ctypes.byref(problem))
        assert not failed, f"no variant for heads of {spec.head_dim}"
        return out if out.dtype == dtype else out.to(dtype)


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor`, [tokens, heads, head_dim], as `dtype` and with each row in one piece."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
