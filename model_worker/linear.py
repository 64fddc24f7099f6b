"""Linear layers in C++: one reading of the weights for all rows, and the same bits in any batch.

The kernel and what it promises stand in `model_worker/native/linear.cpp`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from model_worker.native import load_library

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


class NativeLinear(torch.nn.Module):
    """A drop-in for `torch.nn.Linear` at inference, on the CPU.

    Keeps the weight packed, and the plain one not at all; inputs are computed in float32 and
    the output has the input's dtype.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Pack the weight of `linear`, of one of WEIGHT_DTYPES."""
        super().__init__()
        weight = linear.weight.detach().contiguous()
        assert weight.dtype in WEIGHT_DTYPES, weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library = _declared(load_library())
        size = self._library.octavo_packed_elements(self.out_features, self.in_features)
        self._packed = torch.empty(size, dtype=weight.dtype)
        self._library.octavo_pack(
            weight.data_ptr(),
            self._packed.data_ptr(),
            self.out_features,
            self.in_features,
            weight.element_size(),
        )
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features).float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty((rows.shape[0], self.out_features), dtype=torch.float32)
        self._library.octavo_linear(
            rows.data_ptr(),
            rows.stride(0),
            self._packed.data_ptr(),
            self._packed.dtype == torch.bfloat16,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


def replace_linears(model: Any) -> int:
    """Put a NativeLinear in the place of every Linear of the model; how many there were.

    Modules that share a weight (a tied head) each get a packed copy of their own.
    """
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype in WEIGHT_DTYPES:
                setattr(module, name, NativeLinear(child))
                count += 1
    return count


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.octavo_packed_elements.argtypes = [long, long]
    library.octavo_packed_elements.restype = long
    library.octavo_pack.argtypes = [pointer, pointer, long, long, long]
    library.octavo_pack.restype = None
    library.octavo_linear.argtypes = [
        *(pointer, long, pointer, integer, pointer, pointer),
        *(long, long, long, integer),
    ]
    library.octavo_linear.restype = None
    return library
