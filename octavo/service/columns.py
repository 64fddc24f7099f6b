"""Columns of numbers on the wire: little-endian `bytes`, one element type per field."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

I32 = np.dtype("<i4")
U32 = np.dtype("<u4")
U64 = np.dtype("<u8")
F32 = np.dtype("<f4")


class ColumnError(ValueError):
    """The bytes of a column are not a whole number of elements."""


def pack(values: Iterable[int] | npt.NDArray, dtype: np.dtype) -> bytes:
    """Encode `values` as a column of `dtype`. Raises OverflowError when one does not fit."""
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False).tobytes()
    return np.array(list(values), dtype=dtype).tobytes()


def unpack(column: bytes, dtype: np.dtype, field: str = "column") -> npt.NDArray:
    """Decode a column without copying; the array is read-only. Raises ColumnError."""
    if len(column) % dtype.itemsize:
        raise ColumnError(
            f"{field}: {len(column)} bytes are not a whole number of {dtype.itemsize}-byte elements"
        )
    return np.frombuffer(column, dtype=dtype)
