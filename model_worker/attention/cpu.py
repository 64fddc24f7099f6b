"""Paged attention in C++: reads each KV block where it lies, once, in one fixed order.

The kernel and what it promises stand in `model_worker/native/paged_attention.cpp`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

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
        *((name, ctypes.c_void_p) for name in ("keys", "values", "query", "out")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_starts", "context_lens")),
        *((name, ctypes.c_int64) for name in ("table_stride", "block_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int32) for name in ("num_sequences", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "block_size", "sliding_window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("num_threads", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Plan:
    """Columns of the batch, kept alive for as long as pointers to them are about."""

    block_tables: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    block_size: int


class CpuAttention:
    """The `cpu` backend: float32 and bfloat16 KV, grouped queries, sliding windows, softcap."""

    name = "cpu"
    device = torch.device("cpu")
    block_copier = None

    def __init__(self) -> None:
        """Builds the library on first use. Raises NativeBuildError."""
        self._library = load_library()
        self._library.octavo_write_slots.restype = None

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
        return Plan(
            np.ascontiguousarray(batch.block_tables, np.int32),
            np.ascontiguousarray(batch.query_starts, np.int32),
            np.ascontiguousarray(batch.context_lens, np.int32),
            np.ascontiguousarray(batch.slot_mapping, np.int64),
            block_size,
        )

    def forward(
        self,
        layer: LayerKv,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor:
        self._write(layer.keys, key, plan)
        self._write(layer.values, value, plan)
        return self._attend(layer, query, plan).to(query.dtype)

    def _write(self, pool: torch.Tensor, source: torch.Tensor, plan: Plan) -> None:
        source = source.to(pool.dtype)
        if source.stride(2) != 1:
            source = source.contiguous()
        size = pool.element_size()
        num_tokens, num_kv_heads, head_dim = source.shape
        self._library.octavo_write_slots(
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_int64(source.stride(0) * size),
            ctypes.c_int64(source.stride(1) * size),
            ctypes.c_void_p(pool.data_ptr()),
            ctypes.c_int64(pool.stride(0) * size),
            ctypes.c_int64(pool.stride(1) * size),
            ctypes.c_int64(head_dim * size),
            ctypes.c_int32(plan.block_size),
            ctypes.c_void_p(plan.slot_mapping.ctypes.data),
            ctypes.c_int32(num_tokens),
            ctypes.c_int32(num_kv_heads),
        )

    def _attend(self, layer: LayerKv, query: torch.Tensor, plan: Plan) -> torch.Tensor:
        spec = layer.spec
        # Held in a name while the kernel has its address.
        query = query.float()
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty((query.shape[0], spec.num_heads, spec.head_dim), dtype=torch.float32)
        problem = _Problem(
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
            query=query.data_ptr(),
            out=out.data_ptr(),
            block_tables=plan.block_tables.ctypes.data,
            query_starts=plan.query_starts.ctypes.data,
            context_lens=plan.context_lens.ctypes.data,
            table_stride=plan.block_tables.shape[1],
            block_stride=layer.keys.stride(0),
            head_stride=layer.keys.stride(1),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            num_sequences=len(plan.context_lens),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=plan.block_size,
            sliding_window=spec.sliding_window or 0,
            scaling=spec.scaling,
            softcap=spec.softcap or 0.0,
            num_threads=torch.get_num_threads(),
        )
        failed = self._library.octavo_paged_attention(
            ctypes.byref(problem), ctypes.c_int(layer.keys.dtype == torch.bfloat16)
        )
        assert not failed, f"no variant for heads of {spec.head_dim}"
        return out
