"""Which CUDA kernels there are: their sources in `cuda/`, their variants, and how they are run.

Nothing here needs a GPU. A launcher compiles a `Kernel` and runs it: `cuda_launcher` on a device,
the tests on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from model_worker.errors import WorkerError

SOURCES = Path(__file__).resolve().parents[2] / "cuda"

HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
ELEMENTS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Query heads that one thread block takes; more of them for one KV head are cut into parts.
MAX_HEADS = 8

THREADS = 128
# Of copy_blocks: bytes that a thread block moves in one round, and how many it takes at least.
COPY_ROUND_BYTES = THREADS * 4 * 16
COPY_ROUNDS = 4

# A pointer as int, or a number of the width the kernel's parameter has.
Argument = int | np.int32 | np.int64 | np.float32
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """One kernel in one variant: file `cuda/<source>`, function `name`, macros `defines`."""

    source: str
    name: str
    defines: tuple[tuple[str, str], ...] = ()
    shared_bytes: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """Of every compiler."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


class Launcher(Protocol):
    """Compiles kernels and runs them, one after another, on tensors of its device."""

    device_type: str

    def prepare(self, kernel: Kernel) -> int:
        """Compile and load `kernel`; how many of its thread blocks the device holds at once.

        After that `launch` compiles nothing. Raises WorkerError.
        """
        ...

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Argument]) -> None:
        """Run a prepared kernel on `grid` thread blocks, after what was launched before."""
        ...


@dataclass(frozen=True)
class AttentionKernels:
    """The kernels for one type, head size and number of query heads per KV head.

    heads: of a thread block; parts: thread blocks that share a KV head; tile: in tokens.
    """

    attention: Kernel
    merge: Kernel
    heads: int
    parts: int
    tile: int


WRITE_KV = Kernel("write_kv.cu", "write_kv")
COPY_BLOCKS = Kernel("copy_blocks.cu", "copy_blocks")


@cache
def attention_kernels(dtype: torch.dtype, head_dim: int, group: int) -> AttentionKernels:
    """The variant for KV of `dtype` and `group` query heads per KV head."""
    parts = -(-group // MAX_HEADS)
    heads = -(-group // parts)
    row_bytes = head_dim * dtype.itemsize
    tile = 32 if 64 * row_bytes > 2**15 else 64
    # `Shared` of paged_attention.cu, member by member; its size is asserted there.
    weights_stride = 8 if heads > 4 else 4 if heads > 2 else heads
    floats = heads * head_dim + tile * weights_stride + heads * tile + 3 * 8
    shared_bytes = 4 * tile * row_bytes + 4 * floats + 2 * tile * 8
    defines = (
        ("ELEMENT", ELEMENTS[dtype]),
        ("HEAD_DIM", str(head_dim)),
        ("HEADS", str(heads)),
        ("SHARED_BYTES", str(-(-shared_bytes // 16) * 16)),
    )
    return AttentionKernels(
        Kernel("paged_attention.cu", "paged_attention", defines, -(-shared_bytes // 16) * 16),
        Kernel("paged_attention.cu", "merge_splits", defines),
        heads,
        parts,
        tile,
    )


def source_text(name: str) -> str:
    """A .cu file with what it includes from `cuda/` put in place: all that a compiler needs.

    One text, so that no cache keyed by it can miss a changed header. Raises WorkerError.
    """
    try:
        text = (SOURCES / name).read_text()
    except OSError as error:
        raise WorkerError(
            f"The CUDA kernels are not there ({error}): they come with a checkout of Octavo"
        ) from error
    return re.sub(r'^#include "(.+)"$', lambda match: source_text(match[1]), text, flags=re.M)


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The columns on `device`, in one copy; those of the widest type first, so all are aligned."""
    packed = np.concatenate([np.ascontiguousarray(c).reshape(-1).view(np.uint8) for c in columns])
    moved = torch.from_numpy(packed).to(device)
    parts, begin = [], 0
    for column in columns:
        part = moved[begin : begin + column.nbytes]
        begin += column.nbytes
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
        parts.append(part.view(dtype).view(column.shape))
    return parts
