"""P2: a request's logits are the same bits alone, in any batch, chunked, preempted, recomputed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from model_worker.attention import create_backend
from model_worker.build import build_runner
from model_worker.errors import NativeBuildError, NotInvariantError, WorkerError
from model_worker.forward import PagedForward
from model_worker.linear import NativeLinear
from model_worker.loader import LoadedModel
from model_worker.native import load_library
from model_worker.native_modules import NativeRmsNorm, install
from model_worker.options import WorkerOptions
from model_worker.self_check import check_invariance
from tests.worker.invariance import Recorded, Scheduler, alone, differences
from tests.worker.tiny import COMMON, CONFIGS, load_tiny, random_prompt, save_model

LENGTHS = (41, 3, 20, 70)
SEQUENCES = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
DTYPES = (torch.float32, torch.bfloat16)

# One event of a schedule: rows of (sequence, number of tokens), or a sequence to preempt.
ROWS = st.lists(
    st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(1, 40)),
    min_size=1,
    max_size=len(LENGTHS),
    unique_by=lambda row: row[0],
)
EVENTS = st.lists(st.one_of(ROWS, ROWS, ROWS, st.integers(0, len(LENGTHS) - 1)), max_size=12)


@pytest.fixture(scope="module", params=["llama-gqa", "llama-mqa", "qwen2", "mistral-window"])
def folder(request: pytest.FixtureRequest, model_folders: dict[str, Path]) -> Path:
    return model_folders[request.param]


@cache
def installed(folder: Path, dtype: torch.dtype) -> tuple[LoadedModel, Recorded]:
    """The model on native modules, and what its sequences' logits are alone."""
    loaded = load_tiny(folder, dtype=dtype)
    install(loaded.model)
    return loaded, alone(loaded, SEQUENCES)


def run(scheduler: Scheduler, events: list[Any]) -> Recorded:
    for event in events:
        if isinstance(event, int):
            scheduler.preempt(event)
        else:
            scheduler.step(event)
    return scheduler.finish()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dtype=st.sampled_from(DTYPES),
    events=EVENTS,
    block_size=st.sampled_from([1, 3, 4, 16, 64]),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_b28_any_schedule_gives_the_bits_of_a_solo_run(
    folder: Path,
    dtype: torch.dtype,
    events: list[Any],
    block_size: int,
    num_threads: int,
    seed: int,
) -> None:
    loaded, expected = installed(folder, dtype)
    scheduler = Scheduler(loaded, SEQUENCES, block_size=block_size, seed=seed)
    torch.set_num_threads(num_threads)
    try:
        recorded = run(scheduler, events)
    finally:
        torch.set_num_threads(1)
    assert differences(recorded, expected) == []
    assert {(number, length - 1) for number, length in enumerate(LENGTHS)} <= recorded.keys()


def wide_model(folder: Path) -> LoadedModel:
    """One layer as wide as the demo model's: torch's products differ by the number of rows."""
    changes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1}
    config = LlamaConfig(**{**COMMON, **changes, "num_attention_heads": 9}, num_key_value_heads=3)
    return load_tiny(save_model(config, folder).path)


def test_b28_one_torch_linear_put_back_is_noticed(tmp_path: Path) -> None:
    """What these tests and the check at start look for is there in torch, and they see it."""
    loaded = wide_model(tmp_path / "wide")
    mlp = loaded.model.model.layers[0].mlp
    down = torch.nn.Linear(1536, 576, bias=False)
    down.weight = mlp.down_proj.weight
    install(loaded.model)
    check_invariance(PagedForward(loaded, create_backend("cpu")), 16)
    loaded.model.model.layers[0].mlp.down = down
    with pytest.raises(NotInvariantError, match="not batch-invariant: computed as"):
        check_invariance(PagedForward(loaded, create_backend("cpu")), 16)
    scheduler = Scheduler(loaded, SEQUENCES)
    assert differences(scheduler.finish(), alone(loaded, SEQUENCES))


def test_b28_the_reference_backend_is_not_invariant(tmp_path: Path) -> None:
    loaded = wide_model(tmp_path / "wide")
    install(loaded.model)
    with pytest.raises(NotInvariantError):
        check_invariance(PagedForward(loaded, create_backend("reference")), 16)


def test_a_norm_over_the_whole_batch_is_noticed(tmp_path: Path) -> None:
    loaded = wide_model(tmp_path / "wide")
    install(loaded.model)

    class Leaky(NativeRmsNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 1e-6 * x.mean())

    loaded.model.model.norm.__class__ = Leaky
    with pytest.raises(NotInvariantError):
        check_invariance(PagedForward(loaded, create_backend("cpu")), 16)


@pytest.mark.model
@pytest.mark.parametrize("dtype", DTYPES)
def test_b28_the_demo_model_in_mixed_batches_and_after_preemption(dtype: torch.dtype) -> None:
    options = WorkerOptions(dtype=str(dtype)[6:], num_blocks=8, max_model_len=128)
    runner = build_runner(options)
    assert runner.is_batch_invariant
    loaded = runner.loaded
    sequences = [
        [7 * i * (number + 3) % 40_000 for i in range(1, length)]
        for number, length in enumerate((12, 45, 20))
    ]
    scheduler = Scheduler(loaded, sequences, block_size=16)
    scheduler.step([(1, 18), (0, 5)])
    scheduler.step([(0, 1), (1, 1), (2, 17)])
    scheduler.preempt(0)
    scheduler.step([(1, 17), (2, 1)])
    scheduler.preempt(1)
    scheduler.step([(2, 1), (1, 40), (0, 11)])
    assert differences(scheduler.finish(), alone(loaded, sequences)) == []


@pytest.fixture
def options(model_folders: dict[str, Path]) -> WorkerOptions:
    return WorkerOptions(model=str(model_folders["llama-gqa"]), threads=1, num_blocks=16)


def with_changes(options: WorkerOptions, **changes: Any) -> WorkerOptions:
    return WorkerOptions(**{**vars(options), **changes})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """As on a machine without one, where nothing was built before."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.parametrize("name", CONFIGS)
def test_by_default_it_is_on(name: str, model_folders: dict[str, Path]) -> None:
    runner = build_runner(WorkerOptions(model=str(model_folders[name]), threads=1, num_blocks=16))
    assert (runner.attention_backend, runner.is_batch_invariant) == ("cpu", True)
    assert any(isinstance(module, NativeLinear) for module in runner.loaded.model.modules())


def test_off_leaves_the_model_to_torch(options: WorkerOptions) -> None:
    runner = build_runner(with_changes(options, batch_invariant="off"))
    assert (runner.attention_backend, runner.is_batch_invariant) == ("cpu", False)
    assert not any(isinstance(module, NativeLinear) for module in runner.loaded.model.modules())


def test_without_a_compiler_it_is_off_and_attention_is_plain_torch(
    options: WorkerOptions, no_compiler: Any
) -> None:
    runner = build_runner(options)
    assert (runner.attention_backend, runner.is_batch_invariant) == ("reference", False)


@pytest.mark.parametrize("changes", [{"batch_invariant": "on"}, {"attention": "cpu"}])
def test_asked_for_without_a_compiler_says_what_to_install(
    options: WorkerOptions, no_compiler: Any, changes: dict[str, str]
) -> None:
    with pytest.raises(NativeBuildError, match=r"no no-such-compiler .*apt-get install g\+\+"):
        build_runner(with_changes(options, **changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_invariant": "maybe"}, "there are only auto, on, off"),
        ({"batch_invariant": "on", "attention": "reference"}, "needs --attention cpu"),
        ({"batch_invariant": "on", "attention": "cuda"}, "needs --attention cpu"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(
    options: WorkerOptions, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(WorkerError, match=sentence):
        build_runner(with_changes(options, **changes))


def mixture(folder: Path) -> Path:
    from transformers import MixtralConfig

    config = MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4)
    return save_model(config, folder).path


def test_a_model_with_other_products_is_served_without_or_refused(
    options: WorkerOptions, tmp_path: Path
) -> None:
    options = with_changes(options, model=str(mixture(tmp_path / "mixture")))
    assert not build_runner(options).is_batch_invariant
    with pytest.raises(NotInvariantError, match=r"the first model\.layers\.0\.mlp"):
        build_runner(with_changes(options, batch_invariant="on"))


def test_heads_the_cpu_backend_does_not_have(options: WorkerOptions, tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=24)
    options = with_changes(options, model=str(save_model(config, tmp_path / "odd").path))
    runner = build_runner(options)
    assert (runner.attention_backend, runner.is_batch_invariant) == ("reference", False)
    with pytest.raises(WorkerError, match="no heads of 24"):
        build_runner(with_changes(options, batch_invariant="on"))
