"""Loading a model: weights, limits and end-of-sequence ids, or a sentence that says why not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_worker.attention import LayerSpec
from model_worker.errors import ModelError, UnsupportedModelError
from model_worker.probe import probe_layers
from model_worker.source import ModelSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Rotary embeddings of these kinds are recomputed from the longest position *in the batch* once
# that passes the original length: a token would depend on its neighbours.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM on paged attention and what the worker needs to know of it.

    vocab_size: rows of the head. num_embeddings: ids it can read. num_token_ids: ids it may
    write, those the tokenizer has too.
    """

    model: Any
    source: ModelSource
    dtype: torch.dtype
    device: torch.device
    layer_specs: list[LayerSpec]
    max_model_len: int
    vocab_size: int
    num_embeddings: int
    num_token_ids: int
    eos_token_ids: tuple[int, ...]
    slices_logits: bool


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load the model in `source` and check that paged attention can serve it.

    max_model_len: in tokens; None is the model's own. Raises ModelError.
    """
    device = device or torch.device("cpu")
    config = _config(source)
    max_model_len = _max_model_len(config.get_text_config(), max_model_len)
    _check_rope(config.get_text_config(), max_model_len)
    model = _weights(source, dtype).eval().to(device)
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{source.name}: {type(model).__name__} takes no position_ids, so tokens of several"
            " sequences cannot share a batch"
        )
    try:
        layer_specs = probe_layers(model, max_model_len)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source.name} cannot be served: {error}") from error
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return LoadedModel(
        model=model,
        source=source,
        dtype=dtype,
        device=device,
        layer_specs=layer_specs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_embeddings=min(vocab_size, model.get_input_embeddings().weight.shape[0]),
        num_token_ids=_num_token_ids(source.path, vocab_size),
        eos_token_ids=_eos_token_ids(model, vocab_size),
        slices_logits="logits_to_keep" in parameters,
    )


def _config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(source.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"Cannot read the configuration of {source.name}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder ({config.model_type}); only decoders are served"
        )
    _check_architecture(source, config)
    return config


def _check_architecture(source: ModelSource, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{source.name} is of type {config.model_type}, which transformers has no decoder for"
        )
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{source.name}: {model_class.__name__} does not use transformers' attention interface"
        )


def _weights(source: ModelSource, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from model_worker.attention.hook import PAGED

    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            source.path, dtype=dtype, attn_implementation=PAGED
        )
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelError(f"Cannot load {source.name}: {error}") from error


def _max_model_len(config: Any, requested: int | None) -> int:
    own: int | None = getattr(config, "max_position_embeddings", None)
    if requested is None:
        if own is None:
            raise ModelError(
                "The model does not say how long its sequences may be: give --max-model-len"
            )
        return own
    if requested < 1 or (own is not None and requested > own):
        raise ModelError(f"--max-model-len {requested} is not within 1..{own}, the model's length")
    return requested


def _check_rope(config: Any, max_model_len: int) -> None:
    for name, parameters in _rope_parameters(config):
        rope_type = parameters.get("rope_type")
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
        if rope_type in BATCH_DEPENDENT_ROPE and max_model_len > original:
            raise UnsupportedModelError(
                f"{name} of type {rope_type} depends on the longest sequence in the batch beyond"
                f" {original} tokens: serve it with --max-model-len {original} or less"
            )


def _rope_parameters(config: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """The model's rotary parameters; some models have a set for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield "the rotary embedding", parameters
        return
    for kind, nested in parameters.items():
        if isinstance(nested, dict):
            yield f"the rotary embedding of {kind} layers", nested


def _num_token_ids(folder: Path, vocab_size: int) -> int:
    """Ids the tokenizer has, at most `vocab_size`; all of them for a folder without tokenizer."""
    from tokenizers import Tokenizer

    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        return vocab_size
    highest = max(Tokenizer.from_file(str(tokenizer_path)).get_vocab().values())
    return min(vocab_size, highest + 1)


def _eos_token_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """From the generation config, which may list several, else from the model's config."""
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            listed = eos if isinstance(eos, list | tuple) else [eos]
            return tuple(int(each) for each in listed if 0 <= each < vocab_size)
    return ()
