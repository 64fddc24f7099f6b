"""The kernels' own source, run on the CPU by cuda/host/emulator.h, against the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.attention import LayerSpec
from model_worker.attention.cuda import CudaAttention
from model_worker.attention.cuda_kernels import (
    COPY_BLOCKS,
    WRITE_KV,
    Kernel,
    attention_kernels,
)
from tests.attention.cases import Case
from tests.cuda.checks import (
    SHAPES,
    VARIANTS,
    any_case,
    check_attention,
    check_copies,
    check_copy_shapes,
    check_large_offsets,
    draw_case,
    spec_of,
)
from tests.cuda.host import EmulationError, HostLauncher


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All variants, two at a time."""
    kernels: list[Kernel] = [attention_kernels(*variant).attention for variant in VARIANTS]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(HostLauncher().prepare, [WRITE_KV, COPY_BLOCKS, *kernels]))


@settings(max_examples=80, deadline=None)
@given(case=any_case(), seed=st.integers(0, 9), num_resident=st.sampled_from([1, 16, 64, 1000]))
def test_b46_b48_equals_the_reference(case: Case, seed: int, num_resident: int) -> None:
    check_attention(case, CudaAttention(HostLauncher(seed, num_resident)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_b48_every_head_size_in_every_type(variant: tuple[torch.dtype, int, int]) -> None:
    dtype, head_dim, group = variant
    case = draw_case(spec_of(group, head_dim), [(150, 1), (20, 3)], dtype, 16)
    check_attention(case, CudaAttention(HostLauncher()))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_lengths_around_every_border(length: int) -> None:
    for head_dim, num_resident in ((64, 1), (256, 1000)):
        case = draw_case(spec_of(1, head_dim), [(length, min(length, 3))], torch.float32, 16)
        check_attention(case, CudaAttention(HostLauncher(num_resident=num_resident)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_threads_changes_no_bit(shape: str) -> None:
    outputs = [
        check_attention(SHAPES[shape].draw(), CudaAttention(HostLauncher(seed, num_resident=64)))
        for seed in range(6)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_splits_are_made_and_merged_only_where_there_are_several() -> None:
    case = SHAPES["splits"].draw()
    for num_resident, num_launches in ((1, 2), (1000, 3)):
        launcher = HostLauncher(num_resident=num_resident)
        check_attention(case, CudaAttention(launcher))
        assert len(launcher.launched) == num_launches


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b28_with_fixed_splits_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, window: int | None
) -> None:
    """Alone, in a batch, in a chunk, in blocks of another size, on a device of another size."""
    group, head_dim = (4, 96) if dtype is torch.bfloat16 else (3, 64)
    spec = spec_of(group, head_dim, window=window)

    def bits(
        shapes: list[tuple[int, int]], block_size: int, num_resident: int, row: int
    ) -> torch.Tensor:
        backend = CudaAttention(HostLauncher(num_resident=num_resident), split_tokens=128)
        return check_attention(draw_case(spec, shapes, dtype, block_size), backend)[row]

    for length in (1, 64, 129, 390):
        alone = bits([(length, 1)], 16, 1, 0)
        assert torch.equal(bits([(length, 1), (77, 2)], 128, 1000, 0), alone)
        rows = min(length, 5)
        assert torch.equal(bits([(length, rows), (300, 1)], 8, 64, rows - 1), alone)


def test_scores_far_apart_do_not_overflow() -> None:
    case = draw_case(LayerSpec(3, 1, 64, 64, 30.0), [(300, 3)], torch.float32, 16)
    check_attention(case, CudaAttention(HostLauncher()))


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_and_misaligned_rows(offset: int) -> None:
    """Heads first in memory, as transformers lays them out; rows that begin anywhere."""
    case = draw_case(spec_of(3), [(40, 12)], torch.float32, 16)
    parts = []
    for rows in (case.query, case.key, case.value):
        space = torch.empty(rows.numel() + offset)[offset:]
        strided = space.view(rows.shape[1], rows.shape[0], rows.shape[2]).transpose(0, 1)
        parts.append(strided.copy_(rows))
    backend = CudaAttention(HostLauncher())
    backend.check(case.layer.spec, 16, torch.float32)
    expected, layer = case.run(backend)
    actual, strided_layer = Case(case.layer, case.batch, *parts).run(backend)
    assert torch.equal(actual, expected)
    assert torch.equal(layer.keys.nan_to_num(7.0), strided_layer.keys.nan_to_num(7.0))


def test_b47_offsets_beyond_2_to_the_31() -> None:
    check_large_offsets(CudaAttention(HostLauncher()))


def test_copies_of_all_pools_in_one_launch() -> None:
    for seed in range(3):
        check_copy_shapes(HostLauncher(seed))
    launcher = HostLauncher()
    check_copies(launcher, [(4, 2, 16, 64)] * 6, [(0, 3), (1, 2)])
    assert len(launcher.launched) == 3  # within the pools, out of them, back in


def test_copies_that_depend_on_their_order_are_refused() -> None:
    for pairs in ([(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 4)], [(-1, 2)]):
        with pytest.raises(AssertionError):
            check_copies(HostLauncher(), [(4, 8)], pairs)


def test_the_emulator_refuses_what_a_launch_gets_wrong() -> None:
    launcher = HostLauncher()
    launcher.prepare(COPY_BLOCKS)
    with pytest.raises(EmulationError, match="wrong number of arguments"):
        launcher.launch(COPY_BLOCKS, (1, 1, 1), (0, 0, 0, 0))
    kernel = Kernel("write_kv.cu", "write_kv")
    launcher.prepare(kernel)
    with pytest.raises(EmulationError, match="another size"):
        launcher.launch(kernel, (1, 1, 1), (0,) * 14)
