"""The GPU benchmark's parts that need no GPU: contenders agree, figures are counted right."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import Figure, Problem, Shape, summary, write_csv
from model_worker.attention.cuda import CudaAttention
from tests.cuda.host import HostLauncher


@pytest.mark.parametrize("context", [48, 50])
def test_the_contenders_compute_the_same(context: int) -> None:
    problem = Problem(Shape("small", 9, 3, 64, 3, context), 2, torch.device("cpu"))
    paged = problem.paged(CudaAttention(HostLauncher()))()
    torch.testing.assert_close(problem.sdpa()(), paged, rtol=2e-2, atol=2e-3)


def test_bytes_and_operations_of_a_step() -> None:
    shape = Shape("Llama", 32, 8, 128, 16, 2048)
    assert shape.kv_bytes == 2 * 16 * 2048 * 8 * 128 * 2
    assert shape.flops / shape.kv_bytes == 4  # heads per KV head, for two bytes an element
    assert shape.num_layers * shape.kv_bytes >= 2**28


def test_what_is_written(tmp_path: Path) -> None:
    figures = [
        Figure("m", 1, 512, name, 10.0, rate, rate / 4000, 4.0)
        for name, rate in (("octavo", 3000.0), ("octavo", 2000.0), ("sdpa", 1000.0))
    ]
    write_csv(figures, tmp_path / "figures.csv")
    with (tmp_path / "figures.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], float(row["gb_per_s"])) for row in rows] == [
        ("octavo", 3000.0),
        ("octavo", 2000.0),
        ("sdpa", 1000.0),
    ]
    result = summary(figures, 4e12)
    assert result["octavo_share_of_copy"] == 0.625
    assert result["copy_gb_per_s"] == 4000.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--attention cuda needs" in done.stderr
