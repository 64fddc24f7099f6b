"""Checks at start that paged attention computes what a model means; refuses it otherwise.

The model is asked itself, by a forward over a few tokens in which each layer reports what it
passes to attention: head counts, scaling, sliding window, softcap, anything else. The mask the
model would use is compared, position by position, with what those keywords say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from model_worker.attention import LayerSpec
from model_worker.attention.hook import PAGED, PROBE, attending
from model_worker.errors import UnsupportedModelError

NUM_PROBE_TOKENS = 4

# Keywords that say nothing about what attention computes in a causal decoder at inference.
_HARMLESS_KEYWORDS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


class _Probe:
    """Collects what the layers pass to attention during one forward."""

    def __init__(self, num_layers: int, windows: set[int], max_model_len: int) -> None:
        self.specs: dict[int, LayerSpec] = {}
        self._num_layers = num_layers
        self._masks: list[torch.Tensor] = []
        edges = {edge for window in windows for edge in (window - 1, window, window + 1)}
        positions = {*range(8), *edges, max_model_len - 1}
        self._positions = torch.tensor(sorted(p for p in positions if 0 <= p < max_model_len))

    def make_mask(self, *, mask_function: Callable[..., Any], **_arguments: Any) -> torch.Tensor:
        """The model's mask at the probed positions, in place of the one for its tokens."""
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
        queries = self._positions[None, None, :, None]
        keys = self._positions[None, None, None, :]
        mask = mask_function(zero, zero, queries, keys)
        mask = torch.as_tensor(mask).expand(1, 1, queries.numel(), keys.numel())
        self._masks.append(mask)
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        layer: Any = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= layer < self._num_layers:
            raise UnsupportedModelError(f"{type(module).__name__} has no layer number: {layer}")
        if layer in self.specs:
            raise UnsupportedModelError(f"layer {layer} attends twice in one forward")
        if query.shape[0] != 1 or not (query.shape[2] == key.shape[2] == NUM_PROBE_TOKENS):
            raise UnsupportedModelError(f"layer {layer} attends over other tokens than its input's")
        spec = _spec_of(module, layer, query, key, value, keywords)
        self._check_mask(layer, spec, mask)
        self.specs[layer] = spec
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def _check_mask(self, layer: int, spec: LayerSpec, mask: Any) -> None:
        if not any(mask is made for made in self._masks):
            raise UnsupportedModelError(f"layer {layer} attends with a mask of its own making")
        queries, keys = self._positions[:, None], self._positions[None, :]
        expected = keys <= queries
        if spec.sliding_window is not None:
            expected &= keys > queries - spec.sliding_window
        if not torch.equal(mask[0, 0].bool(), expected):
            raise UnsupportedModelError(
                f"layer {layer} masks differently from causal attention"
                + (f" in a window of {spec.sliding_window}" if spec.sliding_window else "")
            )


def _spec_of(
    module: torch.nn.Module,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keywords: dict[str, Any],
) -> LayerSpec:
    """The LayerSpec that a call of attention implies. Raises UnsupportedModelError."""
    keywords = {name: value for name, value in keywords.items() if value is not None}
    scaling = keywords.pop("scaling", query.shape[3] ** -0.5)
    sliding_window = keywords.pop("sliding_window", None)
    softcap = keywords.pop("softcap", None)
    is_causal = keywords.pop("is_causal", getattr(module, "is_causal", True))
    if not is_causal:
        raise UnsupportedModelError(f"layer {layer} is not causal")
    unknown = sorted(keywords.keys() - _HARMLESS_KEYWORDS)
    if unknown:
        raise UnsupportedModelError(
            f"layer {layer} asks attention for {', '.join(unknown)}, which is not implemented"
        )
    return LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_head_dim=value.shape[3],
        scaling=float(scaling),
        sliding_window=None if sliding_window is None else int(sliding_window),
        softcap=None if softcap is None else float(softcap),
    )


def probe_layers(model: Any, max_model_len: int) -> list[LayerSpec]:
    """The LayerSpec of each of the model's layers. Leaves the model on paged attention.

    model: a causal LM of transformers. Raises UnsupportedModelError.
    """
    config = model.config.get_text_config()
    windows = {
        value
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(value := getattr(config, name, None), int)
    }
    probe = _Probe(config.num_hidden_layers, windows, max_model_len)
    device = next(model.parameters()).device
    tokens = torch.zeros((1, NUM_PROBE_TOKENS), dtype=torch.int64, device=device)
    positions = torch.arange(NUM_PROBE_TOKENS, device=device)[None]
    model.set_attn_implementation(PROBE)
    with torch.inference_mode(), attending(probe.attend, probe.make_mask):
        try:
            model(input_ids=tokens, position_ids=positions, use_cache=False)
        except UnsupportedModelError:
            raise
        except Exception as error:
            # Any of transformers' models may run here, and fail in ways of its own.
            raise UnsupportedModelError(
                f"its forward does not run on flattened tokens: {error!r}"
            ) from error
    model.set_attn_implementation(PAGED)
    missing = sorted(set(range(config.num_hidden_layers)) - probe.specs.keys())
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {config.num_hidden_layers} do not use the attention interface"
        )
    return [probe.specs[layer] for layer in range(config.num_hidden_layers)]
