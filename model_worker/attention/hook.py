"""Where transformers' models call Octavo's attention.

A model loaded with attn_implementation="octavo_paged" hands each layer's queries, keys and values
to `_attention` below. What it is to do with them (the step's batch, the KV pool) is not passed
through the model as a keyword but held here, per thread, for the time of one forward: not every
model forwards keywords it does not know down to its layers, and some reject them.

No mask function is registered under "octavo_paged", which is how transformers is told that an
implementation needs no masks: its models then build none and pass None.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

PAGED = "octavo_paged"
# The same, with the masks the model would like to have: what the checks at start look at.
PROBE = "octavo_probe"

# (layer, query, key, value, mask, keywords) -> attention's output. Tensors are
# [1, heads, T, head_dim] as transformers has them; the output is [1, T, heads, head_dim].
Attend = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Any, dict[str, Any]], torch.Tensor
]

_active = threading.local()


@contextlib.contextmanager
def attending(how: Attend, make_mask: Callable[..., Any] | None = None) -> Iterator[None]:
    """While this is open, forwards on this thread attend by calling `how`."""
    assert getattr(_active, "attend", None) is None, "a forward is already running on this thread"
    _active.attend, _active.make_mask = how, make_mask
    try:
        yield
    finally:
        _active.attend = _active.make_mask = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    keywords: dict[str, Any],
) -> torch.Tensor:
    """Attention as the forward that is running on this thread means it."""
    return _active.attend(module, query, key, value, mask, keywords)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    return attend(module, query, key, value, attention_mask, keywords), None


def _probe_mask(**arguments: Any) -> Any:
    return _active.make_mask(**arguments)


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
