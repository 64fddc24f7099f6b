"""The CPU's attention backends against attention written out naively, over NaN pools (b46)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.attention import BACKENDS, LayerSpec, create_backend
from model_worker.errors import UnsupportedModelError, WorkerError
from tests.worker.naive_attention import Case

# Fresh prompts, chunks in the middle, decodes, ends on, before and after a block's edge.
MIXED = [(0, 5), (3, 1), (0, 16), (15, 1), (16, 1), (17, 1), (20, 13), (31, 2), (40, 1), (0, 1)]


# The CUDA backend works on another device's tensors and has tests of its own.
@pytest.fixture(params=sorted(BACKENDS.keys() - {"cuda"}))
def backend(request: pytest.FixtureRequest):
    return create_backend(request.param)


def spec(**changes) -> LayerSpec:
    fields = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "value_head_dim": 64,
        "scaling": 0.125,
    }
    return LayerSpec(**(fields | changes))


def check(backend, case: Case, rtol: float = 1e-4) -> None:
    try:
        backend.check(case.spec, case.block_size, case.layer.keys.dtype)
    except UnsupportedModelError as error:
        pytest.skip(f"refused at start: {error}")
    out = case.run(backend)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, case.expected(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_grouped_queries(backend, num_kv_heads):
    check(backend, Case(spec(num_kv_heads=num_kv_heads), MIXED))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 256])
def test_b48_head_sizes(backend, head_dim):
    size = {"head_dim": head_dim, "value_head_dim": head_dim, "scaling": head_dim**-0.5}
    shape = spec(num_heads=2, num_kv_heads=1, **size)
    check(backend, Case(shape, [(0, 18), (15, 1), (33, 1)]))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 1000])
def test_b48_sliding_windows_around_a_block(backend, window):
    check(backend, Case(spec(sliding_window=window), MIXED))


@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
def test_block_sizes(backend, block_size):
    check(backend, Case(spec(), MIXED, block_size=block_size))


def test_softcap(backend):
    check(backend, Case(spec(softcap=1.5), MIXED))


def test_values_of_another_size_than_keys(backend):
    check(backend, Case(spec(value_head_dim=32), MIXED))


def test_bfloat16_accumulates_in_float32(backend):
    case = Case(spec(), [(0, 20), (400, 1), (300, 3)], dtype=torch.bfloat16)
    check(backend, case, rtol=0.01)


def test_only_decodes_and_only_prefills(backend):
    check(backend, Case(spec(), [(i, 1) for i in (0, 1, 15, 16, 50)]))
    check(backend, Case(spec(), [(0, 40), (7, 300)]))


def test_b46_nothing_is_read_beyond_the_context(backend):
    """Poison the rest of each last block *after* it was used, as a reused block would be."""
    case = Case(spec(), MIXED)
    for value in (torch.nan, torch.inf, -torch.inf):
        for i, length in enumerate(case.batch.context_lens):
            last = int(case.batch.block_tables[i, (length - 1) // 16])
            if length % 16:
                case.layer.keys[last, :, length % 16 :] = value
                case.layer.values[last, :, length % 16 :] = value
        check(backend, case)


def test_b47_block_offsets_beyond_32_bits(backend):
    shape = spec(num_heads=2, num_kv_heads=2, head_dim=64, value_head_dim=64)
    stride = 2 * 16 * 64  # elements a block
    first = 2**31 // stride + 1
    case = Case(shape, [(0, 20), (20, 1)], dtype=torch.bfloat16, first_block=first)
    assert case.layer.keys.stride(0) * first > 2**31
    check(backend, case, rtol=0.01)


def test_writes_land_in_their_slots_and_nowhere_else(backend):
    case = Case(spec(), MIXED)
    before = case.layer.keys.clone(), case.layer.values.clone()
    case.run(backend)
    slots = case.batch.slot_mapping
    for pool, old, new in zip(
        (case.layer.keys, case.layer.values), before, case.inputs[1:], strict=True
    ):
        blocks, offsets = torch.from_numpy(slots // 16), torch.from_numpy(slots % 16)
        assert torch.equal(pool[blocks, :, offsets], new)
        old[blocks, :, offsets] = new
        assert torch.equal(pool.nan_to_num(9e9), old.nan_to_num(9e9))


def test_what_cannot_be_grouped_or_is_unknown_is_refused(backend):
    with pytest.raises(UnsupportedModelError, match=r"6 query heads.*4"):
        backend.check(spec(num_kv_heads=4), 16, torch.float32)
    with pytest.raises(WorkerError, match=r"no such backend.*reference"):
        create_backend("flash")
