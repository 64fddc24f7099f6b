"""What the kernels must do, on whatever launcher they are given: the CPU's or a device's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from model_worker.attention import LayerKv, LayerSpec, create_backend
from model_worker.attention.cuda import CudaAttention
from model_worker.attention.cuda_copy import BlockCopier
from model_worker.attention.cuda_kernels import ELEMENTS, HEAD_DIMS, Launcher
from tests.attention.cases import Case, build, draw_tokens

REFERENCE = create_backend("reference")
GUARD_BYTES = 4096
# Nobody has a block of this number: reading a table where it is padded shows.
NO_BLOCK = 2**30


# Every head size in every type, with the group sizes in turn.
VARIANTS = [
    (dtype, head_dim, group)
    for (dtype, head_dim), group in zip(
        itertools.product(ELEMENTS, HEAD_DIMS), itertools.cycle((1, 3, 4, 8, 9)), strict=False
    )
]


class Guards(TorchFunctionMode):
    """Puts tensors between guard bands, and says when something wrote there.

    What is allocated while it is entered has bands too and is NaN at first, as the bands are: a
    read outside a buffer, and an element nobody has written, make NaN.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD_BYTES,), 255, dtype=torch.uint8, device=self._device)
        self._buffers.append((buffer, size))
        return buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(*shape)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = self.allocate(tensor.shape, tensor.dtype)
        placed.copy_(tensor)
        return placed

    def check(self) -> None:
        for buffer, size in self._buffers:
            assert bool((buffer[:GUARD_BYTES] == 255).all()), "written before a buffer"
            assert bool((buffer[GUARD_BYTES + size :] == 255).all()), "written behind a buffer"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.new_empty:
            return self.allocate(args[1], kwargs.get("dtype", args[0].dtype))
        return func(*args, **kwargs)


def spec_of(
    group: int, head_dim: int = 64, kv_heads: int = 2, window: int | None = None, cap: float = 0.0
) -> LayerSpec:
    heads = group * kv_heads
    return LayerSpec(heads, kv_heads, head_dim, head_dim, head_dim**-0.5, window, cap or None)


def draw_case(
    spec: LayerSpec,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    block_size: int,
    seed: int = 0,
) -> Case:
    """A step over sequences of (context length, rows in this step)."""
    sequences = [
        (draw_tokens(spec, context, dtype, seed + i), context, rows)
        for i, (context, rows) in enumerate(shapes)
    ]
    return build(spec, sequences, block_size, seed)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Any variant, block size, window, softcap and batch, small enough for the CPU."""
    dtype, head_dim, group = draw(st.sampled_from(VARIANTS))
    block_size = draw(st.sampled_from([8, 16, 24, 32, 64, 128]))
    borders = [k * block_size + d for k in (1, 3) for d in (-1, 0, 1)]
    window = draw(st.sampled_from([None, None, 1, *borders]))
    cap = draw(st.sampled_from([0.0, 0.0, 20.0]))
    spec = spec_of(group, head_dim, draw(st.integers(1, 3)), window, cap)
    contexts = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    shapes = [(context, draw(st.integers(1, min(context, 9)))) for context in contexts]
    return draw_case(spec, shapes, dtype, block_size)


def check_attention(case: Case, backend: CudaAttention) -> torch.Tensor:
    """The output is the reference's to within rounding; the pool holds the step's tokens; nothing
    else was written, and nothing read that no row sees. Returns the output, on the CPU."""
    expected, _ = _wide(case).run(REFERENCE)
    dtype, layer = case.layer.keys.dtype, _forget(case)
    backend.check(layer.spec, case.block_size, dtype)
    guards = Guards(backend.device)
    plan = _plan(case, backend, guards)
    placed = LayerKv(layer.spec, guards.place(layer.keys), guards.place(layer.values))
    query, key, value = (guards.place(rows) for rows in (case.query, case.key, case.value))
    with guards:
        actual = backend.forward(placed, query, key, value, plan).cpu()
    guards.check()
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    rounding = torch.finfo(dtype).eps / 2 if dtype is not torch.float32 else 0.0
    torch.testing.assert_close(actual.float(), expected, rtol=rounding + 2e-5, atol=2e-5)
    blocks, slots = np.divmod(case.batch.slot_mapping, case.block_size)
    for pool, before, new in (
        (placed.keys, layer.keys, case.key),
        (placed.values, layer.values, case.value),
    ):
        before[torch.from_numpy(blocks), :, torch.from_numpy(slots)] = new
        assert torch.equal(pool.cpu().nan_to_num(7.0), before.nan_to_num(7.0))
    return actual


def _wide(case: Case) -> Case:
    """The same in float32: no rounding of the reference's hides one of ours."""
    layer = LayerKv(case.layer.spec, case.layer.keys.float(), case.layer.values.float())
    return Case(layer, case.batch, *(r.float() for r in (case.query, case.key, case.value)))


def _forget(case: Case) -> LayerKv:
    """The pool with NaN wherever the step's rows cannot look back to."""
    layer, batch = case.layer, case.batch
    keys, values = layer.keys.clone(), layer.values.clone()
    num_rows = np.diff(batch.query_starts)
    for table, context, rows in zip(batch.block_tables, batch.context_lens, num_rows, strict=True):
        window = layer.spec.sliding_window or int(context)
        for position in range(max(0, int(context) - int(rows) - window + 1)):
            block, slot = int(table[position // case.block_size]), position % case.block_size
            keys[block, :, slot] = values[block, :, slot] = float("nan")
    return LayerKv(layer.spec, keys, values)


def _plan(case: Case, backend: CudaAttention, guards: Guards) -> Any:
    """The backend's plan; the tables' padding is no block, and every column between guards."""
    tables = case.batch.block_tables.copy()
    for table, context in zip(tables, case.batch.context_lens, strict=True):
        table[-(-int(context) // case.block_size) :] = NO_BLOCK
    batch = dataclasses.replace(case.batch, block_tables=tables)
    plan = backend.plan(batch, case.block_size, backend.device)
    names = ("slot_mapping", "row_sequences", "row_lengths", "block_tables")
    return dataclasses.replace(plan, **{name: guards.place(getattr(plan, name)) for name in names})


def relocate(case: Case, num_blocks: int) -> Case:
    """The same with its blocks at the far end of a pool of `num_blocks`, the rest left as the
    system hands it out."""
    layer, batch = case.layer, case.batch
    shift = num_blocks - layer.keys.shape[0]
    pools = []
    for pool in (layer.keys, layer.values):
        large = torch.empty((num_blocks, *pool.shape[1:]), dtype=pool.dtype)
        large[shift:] = pool
        pools.append(large)
    moved = dataclasses.replace(
        batch,
        block_tables=batch.block_tables + np.int32(shift),
        slot_mapping=batch.slot_mapping + shift * case.block_size,
    )
    return Case(LayerKv(layer.spec, *pools), moved, case.query, case.key, case.value)


def check_large_offsets(backend: CudaAttention) -> None:
    """b47: block id times stride beyond 2^31, in bytes and in elements, in reads and in writes."""
    spec = spec_of(1, head_dim=256, kv_heads=1)
    case = draw_case(spec, [(300, 1), (129, 2)], torch.bfloat16, 128)
    expected, _ = _wide(case).run(REFERENCE)
    large = relocate(case, 2**31 // (128 * 256) + 16)
    device = backend.device
    backend.check(spec, 128, torch.bfloat16)
    layer = LayerKv(spec, large.layer.keys.to(device), large.layer.values.to(device))
    query, key, value = (rows.to(device) for rows in (case.query, case.key, case.value))
    plan = backend.plan(large.batch, 128, device)
    actual = backend.forward(layer, query, key, value, plan).cpu()
    torch.testing.assert_close(actual.float(), expected, rtol=2**-8 + 2e-5, atol=2e-5)


def check_copies(
    launcher: Launcher,
    shapes: Sequence[tuple[int, ...]],
    pairs: Sequence[tuple[int, int]],
    *,
    pinned: bool = False,
) -> None:
    """Copies within the pools, then to a second set of pools (host memory if `pinned`) and back.

    shapes: of each pool, [num_blocks, ...] of bfloat16.
    """
    device = torch.device(launcher.device_type)
    generator = torch.Generator().manual_seed(1)
    before = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    guards = Guards(device)
    pools = [guards.place(pool) for pool in before]
    sources, destinations = np.array(pairs, np.int32).reshape(-1, 2).T
    BlockCopier(launcher, pools, pools).copy(sources, destinations)
    for pool in before:
        pool[torch.from_numpy(destinations).long()] = pool[torch.from_numpy(sources).long()]
    _assert_pools(pools, before)

    others = [
        torch.empty_like(p, pin_memory=True) if pinned else guards.place(torch.zeros_like(p))
        for p in before
    ]
    everything = np.arange(shapes[0][0], dtype=np.int32)
    BlockCopier(launcher, pools, others).copy(everything, everything[::-1].copy())
    if pinned:
        torch.cuda.synchronize()
    _assert_pools(others, [pool.flip(0) for pool in before])
    BlockCopier(launcher, others, pools).copy(everything, everything)
    _assert_pools(pools, [pool.flip(0) for pool in before])
    guards.check()


def _assert_pools(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One of the cases that together go through every branch of the attention kernels."""

    group: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    sequences: tuple[tuple[int, int], ...]  # (context, rows in this step)
    window: int | None = None
    softcap: float = 0.0

    def draw(self) -> Case:
        spec = spec_of(self.group, self.head_dim, window=self.window, cap=self.softcap)
        return draw_case(spec, self.sequences, self.dtype, self.block_size)


SHAPES = {
    "plain": Shape(3, 64, torch.float32, 16, ((130, 1), (64, 1), (1, 1), (200, 3))),
    "window": Shape(3, 64, torch.float32, 16, ((300, 1), (65, 2), (400, 5)), window=70),
    "softcap": Shape(8, 80, torch.bfloat16, 8, ((200, 1), (33, 4)), softcap=30.0),
    "parts": Shape(9, 128, torch.float16, 128, ((129, 2), (63, 1))),
    "small tiles": Shape(1, 256, torch.float32, 24, ((333, 1), (97, 2)), window=100),
    "splits": Shape(4, 64, torch.bfloat16, 32, ((700, 1), (300, 1), (10, 1))),
}


def check_copy_shapes(launcher: Launcher, *, pinned: bool = False) -> None:
    """Pools of different sizes, blocks of one round and of several."""
    shapes = [(5, 2, 8, 80), (5, 1, 40, 96), (5, 8, 128, 64)]
    check_copies(launcher, shapes, [(0, 2), (3, 1), (0, 4)], pinned=pinned)
