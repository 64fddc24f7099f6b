"""Tiny models, saved once a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.tiny import CONFIGS, save_model

# Models this small lose more to waking a second thread than it does for them.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each of CONFIGS, by its name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name).path for name, config in CONFIGS.items()}
