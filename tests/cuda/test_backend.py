"""The `cuda` backend without a device: what it refuses, how it splits, whole models emulated."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from model_worker.attention import LayerSpec, create_backend
from model_worker.attention.cuda import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    CudaAttention,
    choose_tiles_per_split,
)
from model_worker.attention.cuda_kernels import source_text
from model_worker.errors import UnsupportedModelError, WorkerError
from tests.cuda.checks import spec_of
from tests.cuda.host import HostLauncher
from tests.cuda.models import CONFIGS, check_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cupy_or_a_device_it_says_so_in_a_sentence() -> None:
    missing = "a CUDA device" if importlib.util.find_spec("cupy") else "CuPy"
    with pytest.raises(WorkerError, match=f"^--attention cuda needs {missing}[^\n]*$"):
        create_backend("cuda")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_generates_what_it_does_on_the_reference(name: str, tmp_path: Path) -> None:
    launcher = HostLauncher(num_resident=64)
    check_model(name, tmp_path / name, CudaAttention(launcher))
    assert "copy_blocks" in launcher.launched


@pytest.mark.parametrize(
    ("spec", "block_size", "dtype", "message"),
    [
        (spec_of(3, head_dim=72), 16, torch.float32, "no heads of 72"),
        (LayerSpec(4, 2, 128, 64, 0.1), 16, torch.float32, r"128 \(values 64\)"),
        (spec_of(3), 16, torch.float64, "float64"),
        (LayerSpec(5, 2, 64, 64, 0.1), 16, torch.float32, "5 query heads"),
        (spec_of(3), 7, torch.float32, r"7 tokens, only 8\.\.128"),
        (spec_of(3), 129, torch.float32, r"129 tokens, only 8\.\.128"),
    ],
)
def test_b48_what_it_cannot_compute_is_refused(
    spec: LayerSpec, block_size: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        CudaAttention(HostLauncher()).check(spec, block_size, dtype)


def test_splits_fill_the_device_and_no_more() -> None:
    # Enough rows: one split, of any length.
    assert choose_tiles_per_split(1000, 512, 396) == 1000
    # One row on a device that holds 396: at most MAX_SPLITS.
    assert -(-1000 // choose_tiles_per_split(1000, 1, 396)) <= MAX_SPLITS
    assert choose_tiles_per_split(1000, 1, 396) == 8
    # A short row is not cut into splits that are not worth it.
    assert choose_tiles_per_split(6, 1, 396) == MIN_TILES_PER_SPLIT
    assert choose_tiles_per_split(2, 1, 396) == 2
    for num_tiles in range(1, 200):
        for num_thread_blocks in (1, 3, 40, 396, 397):
            tiles = choose_tiles_per_split(num_tiles, num_thread_blocks, 396)
            assert 1 <= tiles <= num_tiles
            assert -(-num_tiles // tiles) * num_thread_blocks < 396 + num_thread_blocks


def test_sources_that_are_not_there_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("model_worker.attention.cuda_kernels.SOURCES", tmp_path)
    with pytest.raises(WorkerError, match="come with a checkout"):
        source_text("write_kv.cu")
