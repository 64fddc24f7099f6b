"""On a CUDA device: the checks the CPU has passed, through CuPy. `make gpu-check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from model_worker.attention.cuda import CudaAttention
from model_worker.attention.cuda_launcher import CupyLauncher
from model_worker.build import build_runner
from model_worker.errors import WorkerError
from model_worker.options import WorkerOptions
from tests.attention.cases import Case
from tests.cuda.checks import (
    SHAPES,
    VARIANTS,
    any_case,
    check_attention,
    check_copy_shapes,
    check_large_offsets,
    draw_case,
    spec_of,
)
from tests.cuda.models import CONFIGS, check_model
from tests.worker.tiny import Driver, random_prompt

pytestmark = pytest.mark.gpu

# As many splits as fill the device; splits of two tiles; one.
SPLITS = (None, 128, 2**20)
NUM_RUNS = 50


@pytest.fixture(scope="module")
def launcher() -> CupyLauncher:
    try:
        return CupyLauncher()
    except WorkerError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_b48_every_head_size_in_every_type(
    variant: tuple[torch.dtype, int, int], launcher: CupyLauncher
) -> None:
    dtype, head_dim, group = variant
    case = draw_case(spec_of(group, head_dim), [(150, 1), (20, 3), (700, 2)], dtype, 16)
    for split_tokens in SPLITS:
        check_attention(case, CudaAttention(launcher, split_tokens))


@settings(max_examples=200, deadline=None)
@given(case=any_case())
def test_b46_b48_equals_the_reference(case: Case, launcher: CupyLauncher) -> None:
    check_attention(case, CudaAttention(launcher))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_run_gives_the_same_bits(shape: str, launcher: CupyLauncher) -> None:
    """A result that moves between runs is a race."""
    case = SHAPES[shape].draw()
    for split_tokens in SPLITS:
        backend = CudaAttention(launcher, split_tokens)
        outputs = [check_attention(case, backend) for _ in range(NUM_RUNS)]
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_b47_offsets_beyond_2_to_the_31(launcher: CupyLauncher) -> None:
    check_large_offsets(CudaAttention(launcher))


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_and_swaps(pinned: bool, launcher: CupyLauncher) -> None:
    check_copy_shapes(launcher, pinned=pinned)


def test_it_runs_on_the_current_stream_and_in_a_graph(launcher: CupyLauncher) -> None:
    """What `check` has prepared compiles nothing later, so it can be captured."""
    case = SHAPES["splits"].draw()
    backend = CudaAttention(launcher)
    backend.check(case.layer.spec, case.block_size, case.layer.keys.dtype)
    device = backend.device
    layer = type(case.layer)(
        case.layer.spec, case.layer.keys.to(device), case.layer.values.to(device)
    )
    query, key, value = (rows.to(device) for rows in (case.query, case.key, case.value))
    plan = backend.plan(case.batch, case.block_size, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.forward(layer, query, key, value, plan)
    captured.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.cpu(), check_attention(case, backend))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_generates_what_it_does_on_the_reference(
    name: str, tmp_path: Path, launcher: CupyLauncher
) -> None:
    check_model(name, tmp_path / name, CudaAttention(launcher))


@pytest.mark.model
def test_the_worker_generates_what_it_does_on_the_cpu(launcher: CupyLauncher) -> None:
    """The demo model, as a worker builds it for each backend, float32."""
    generated = []
    for attention in ("cpu", "cuda"):
        options = WorkerOptions(attention=attention, num_blocks=256, max_model_len=1024)
        driver = Driver(build_runner(options))
        sequences = [driver.add(random_prompt(i, 40 * i + 3)) for i in range(4)]
        driver.step([(s, len(s.tokens), 1) for s in sequences])
        for _ in range(40):
            driver.step([(s, 1, 1) for s in sequences])
        generated.append([s.tokens for s in sequences])
    assert generated[0] == generated[1]
