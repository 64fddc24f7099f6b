"""The kernels compile for a GPU, without one, and do not spill registers."""

from __future__ import annotations

import pytest
import torch

from model_worker.attention.cuda_kernels import ELEMENTS, HEAD_DIMS, Kernel, attention_kernels
from tools import cuda_kernels


@pytest.fixture(scope="module")
def compiled() -> dict[Kernel, dict[str, dict[str, cuda_kernels.Usage]]]:
    return cuda_kernels.compile_all(cuda_kernels.table_variants())


def test_every_type_head_size_and_group_is_among_them() -> None:
    drawn = [dict(kernel.defines) for kernel in cuda_kernels.table_variants() if kernel.defines]
    for name, wanted in (
        ("ELEMENT", set(ELEMENTS.values())),
        ("HEAD_DIM", set(map(str, HEAD_DIMS))),
        ("HEADS", {"1", "3", "4", "8"}),
    ):
        assert wanted <= {each[name] for each in drawn}
    assert len(cuda_kernels.all_variants()) == 2 + 3 * 8 * 8


def test_nothing_spills(
    compiled: dict[Kernel, dict[str, dict[str, cuda_kernels.Usage]]],
) -> None:
    assert cuda_kernels.spilling(compiled) == []


def test_enough_bytes_are_in_flight(
    compiled: dict[Kernel, dict[str, dict[str, cuda_kernels.Usage]]],
) -> None:
    """32 KiB a multiprocessor, in every variant of the table."""
    for kernel, by_architecture in compiled.items():
        for architecture, usage in by_architecture.items():
            if kernel.defines:
                in_flight = cuda_kernels.in_flight_bytes(kernel, architecture, usage[kernel.name])
                assert in_flight >= 32 * 1024, (kernel, architecture)


def test_shared_memory_fits_a_thread_block() -> None:
    """163 KiB is what a thread block gets at compute capability 8.0 (8.6 and 8.9: 99 KiB)."""
    assert all(kernel.shared_bytes <= 163 * 1024 for kernel in cuda_kernels.all_variants())


def test_the_table_is_what_the_kernels_compile_to(
    compiled: dict[Kernel, dict[str, dict[str, cuda_kernels.Usage]]],
) -> None:
    assert cuda_kernels.README.read_text() == cuda_kernels.updated_readme(compiled)


def test_a_spill_is_seen() -> None:
    """Eight thread blocks of 128 threads on a multiprocessor leave each thread 64 registers."""
    kernel = attention_kernels(torch.bfloat16, 128, 8).attention
    source = cuda_kernels.source_text(kernel.source)
    source = source.replace("__launch_bounds__(THREADS, 1)", "__launch_bounds__(THREADS, 8)")
    _, log = cuda_kernels.compile_source(source, kernel.source, kernel.options, "sm_90")
    assert cuda_kernels.parse_usage(log)["paged_attention"].spilled_bytes > 0


def test_a_wrong_size_of_shared_memory_does_not_compile() -> None:
    kernel = attention_kernels(torch.float16, 64, 1).attention
    source = cuda_kernels.source_text(kernel.source)
    options = [option.replace("SHARED_BYTES=", "SHARED_BYTES=16+") for option in kernel.options]
    with pytest.raises(cuda_kernels.CompileError, match="SHARED_BYTES"):
        cuda_kernels.compile_source(source, kernel.source, options, "sm_90")
