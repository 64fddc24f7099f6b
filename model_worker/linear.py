"""Linear layers in C++: one reading of the weights for all rows, and the same bits in any batch.

The kernels and what they promise stand in `model_worker/native/linear.cpp` and `amx.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from model_worker.native import load_library

DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT_BYTES = 64
_HUGE_PAGE_BYTES = 2**21


class NativeLinear(torch.nn.Module):
    """A drop-in for one `torch.nn.Linear` at inference on the CPU, or for several side by side.

    Keeps the weights packed and the plain ones not at all. Inputs of another dtype than the
    weights' are converted to it, and the output has the input's.
    """

    def __init__(self, *linears: torch.nn.Linear) -> None:
        """Pack the weights of `linears`, of one in_features and one of DTYPES.

        The outputs of several are concatenated.
        """
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        dtype = weights[0].dtype
        assert dtype in DTYPES, dtype
        assert len({(weight.shape[1], weight.dtype) for weight in weights}) == 1
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.dtype = dtype
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self._packed = _pack(weight)
        self._bias = _joined_bias(linears)
        self._multiply = _library().octavo_linear
        # Looked up once: at one row a step spends a fifth of its time in Python.
        self._packed_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()
        self._is_bfloat16 = dtype == torch.bfloat16

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        if rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        num_rows = rows.shape[0]
        out = torch.empty((num_rows, self.out_features), dtype=self.dtype)
        self._multiply(
            rows.data_ptr(),
            rows.stride(0),
            self._packed_at,
            self._is_bfloat16,
            self._bias_at,
            out.data_ptr(),
            num_rows,
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        if out.dtype != x.dtype:
            out = out.to(x.dtype)
        return out.view(*x.shape[:-1], self.out_features)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features]; returns it in the kernel's layout."""
    library = _library()
    out_features, in_features = weight.shape
    is_bfloat16 = weight.dtype == torch.bfloat16
    size = library.octavo_packed_elements(out_features, in_features, is_bfloat16)
    packed = _aligned(size, weight.dtype)
    library.octavo_pack(
        weight.data_ptr(),
        packed.data_ptr(),
        out_features,
        in_features,
        is_bfloat16,
        torch.get_num_threads(),
    )
    return packed


def _aligned(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size], uninitialised; in pages as large as its bytes fill."""
    num_bytes = size * dtype.itemsize
    is_large = num_bytes >= _HUGE_PAGE_BYTES
    alignment = _HUGE_PAGE_BYTES if is_large else _ALIGNMENT_BYTES
    raw = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    whole = raw[start : start + num_bytes].view(dtype)
    if is_large:
        _library().octavo_advise_huge_pages(whole.data_ptr(), num_bytes)
    return whole


def _joined_bias(linears: Sequence[torch.nn.Linear]) -> torch.Tensor | None:
    """float32[sum of out_features], zeros for those without one; None when none has."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features)
            if linear.bias is None
            else linear.bias.detach().float()
            for linear in linears
        ]
    )


@cache
def _library() -> ctypes.CDLL:
    library = load_library()
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.octavo_packed_elements.argtypes = [long, long, integer]
    library.octavo_packed_elements.restype = long
    library.octavo_pack.argtypes = [pointer, pointer, long, long, integer, integer]
    library.octavo_pack.restype = None
    library.octavo_advise_huge_pages.argtypes = [pointer, long]
    library.octavo_advise_huge_pages.restype = None
    library.octavo_linear.argtypes = [
        *(pointer, long, pointer, integer, pointer, pointer),
        *(long, long, long, integer),
    ]
    library.octavo_linear.restype = None
    return library
