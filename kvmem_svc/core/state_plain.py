"""Columns and attributes of the state as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvmem_svc.core.batch import Column

Plain = dict[str, Any]


def scalars(owner: object, names: Sequence[str]) -> Plain:
    """The attributes of these names."""
    return {name: getattr(owner, name) for name in names}


def set_scalars(owner: object, names: Sequence[str], plain: Plain) -> None:
    for name in names:
        setattr(owner, name, plain[name])


def column(values: Column) -> list[Any]:
    """[dtype, bytes]."""
    return [values.dtype.str, values.tobytes()]


def array(plain: list[Any]) -> Column:
    """The column that `column` was given, with memory of its own."""
    dtype, content = plain
    return np.frombuffer(content, np.dtype(dtype)).copy()


def pairs(mapping: dict[int, int]) -> list[list[int]]:
    """In order."""
    return [[key, value] for key, value in mapping.items()]


def mapping(plain: list[list[int]]) -> dict[int, int]:
    return {key: value for key, value in plain}
