"""Tiny models, saved once a run."""

from __future__ import annotations

import os

# Before torch is loaded, whose threads would spin on cores that other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.worker.stage import Stage, run_on_stage
from tests.worker.tiny import CONFIGS, save_model

# Models this small lose more to waking a second thread than it does for them.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each of CONFIGS, by its name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name).path for name, config in CONFIGS.items()}


@pytest.fixture
def on_stage(
    model_folders: dict[str, Path],
) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    """Runs a coroutine function with a Stage."""
    return partial(run_on_stage, model_folders["llama-gqa"])
