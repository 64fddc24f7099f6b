"""Parts of transformers' decoders in C++: norms, gated MLPs, rotations, attention's projections.

Each stands in for a module of the same meaning, found by what the module is made of and compared
with it before it takes its place. What none of these fits stays as transformers has it, except
for its linear layers. Every row is computed by itself, in an order of its own, so a token's bits
do not depend on the batch it comes in.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from model_worker.attention import hook
from model_worker.linear import DTYPES, NativeLinear
from model_worker.loader import BATCH_DEPENDENT_ROPE
from model_worker.native import load_library

# Attention modules that are four projections and a rotation of all dimensions, nothing else.
_PLAIN_ATTENTION = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention"})
# Largest difference to the module that is replaced, as a share of the largest output.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_NUM_TRIAL_ROWS = 3


class NativeRmsNorm(torch.nn.Module):
    """`weight * x / sqrt(mean(x^2) + epsilon)`, rounded like LlamaRMSNorm of transformers."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.epsilon = epsilon
        self._normalize = _library().octavo_rms_norm
        self._weight_at = self.weight.data_ptr()
        self._dtype, self._width = weight.dtype, weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width] of the weight's dtype."""
        assert x.dtype == self._dtype, x.dtype
        rows = x.reshape(-1, self._width)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=self._dtype)
        self._normalize(
            rows.data_ptr(),
            rows.stride(0),
            self._weight_at,
            self._dtype == torch.bfloat16,
            out.data_ptr(),
            rows.shape[0],
            self._width,
            self.epsilon,
            torch.get_num_threads(),
        )
        return out.view(x.shape)


class NativeGatedMlp(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(self, mlp: Any) -> None:
        """mlp: like LlamaMLP of transformers."""
        super().__init__()
        self.gate_up = NativeLinear(mlp.gate_proj, mlp.up_proj)
        self.down = NativeLinear(mlp.down_proj)
        self._width: int = mlp.down_proj.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]."""
        both: torch.Tensor = self.gate_up(x)
        width = self._width
        inner = torch.empty((*x.shape[:-1], width), dtype=both.dtype)
        _library().octavo_gate(
            both.data_ptr(),
            both.dtype == torch.bfloat16,
            inner.data_ptr(),
            both.numel() // (2 * width),
            width,
            torch.get_num_threads(),
        )
        return self.down(inner)


class NativeRotary(torch.nn.Module):
    """Cosines and sines of each position (Su et al., 2021), every one by itself."""

    frequencies: torch.Tensor

    def __init__(self, rotary: Any) -> None:
        """rotary: like LlamaRotaryEmbedding, with frequencies that do not change."""
        super().__init__()
        self.register_buffer(
            "frequencies", rotary.inv_freq.detach().float().contiguous(), persistent=False
        )
        self.scale = float(rotary.attention_scaling)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: int64[1, T]; returns two of [1, T, head_dim], of x's dtype."""
        half = self.frequencies.shape[0]
        positions = position_ids.contiguous()
        cosines, sines = (torch.empty((*positions.shape, 2 * half)) for _ in range(2))
        _library().octavo_rotations(
            positions.data_ptr(),
            positions.numel(),
            self.frequencies.data_ptr(),
            half,
            self.scale,
            cosines.data_ptr(),
            sines.data_ptr(),
        )
        return cosines.to(x.dtype), sines.to(x.dtype)


class NativeAttention(torch.nn.Module):
    """Projections and rotation around paged attention; queries, keys and values as one product."""

    def __init__(self, attention: Any) -> None:
        """attention: one of _PLAIN_ATTENTION."""
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = NativeLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = NativeLinear(attention.o_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, hidden_size]; returns the same shape, and no weights."""
        cosines, sines = position_embeddings
        qkv = self.qkv(hidden_states)
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        assert cosines.dtype == sines.dtype == qkv.dtype
        _library().octavo_rotate(
            qkv.data_ptr(),
            qkv.shape[-1],
            qkv.dtype == torch.bfloat16,
            qkv.shape[1],
            self.num_heads + self.num_kv_heads,
            self.head_dim,
            cosines.data_ptr(),
            sines.data_ptr(),
            torch.get_num_threads(),
        )
        heads = qkv.view(*qkv.shape[:-1], -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        attended = hook.attend(self, query, key, value, attention_mask, keywords)
        return self.out(attended.reshape(*hidden_states.shape[:-1], -1)), None


def install(model: Any) -> None:
    """Replace what can be of `model`, a causal LM of transformers on the CPU, in place.

    Its attention must have been probed before. A plain weight is freed as soon as it is packed;
    one that an embedding shares stays for that.
    """
    head_dims = {
        2 * module.inv_freq.numel() for module in model.modules() if _is_fixed_rotary(module)
    }
    _replace(model, lambda module: _native(module, head_dims))


def unreplaced_products(model: Any) -> list[str]:
    """Names of the parameters of matrix products that `install` would leave to torch."""
    return [
        f"{name}.{parameter_name}" if name else parameter_name
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Embedding) and not _is_linear(module)
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    ]


def _replace(parent: torch.nn.Module, native: Any) -> None:
    """Depth first from the root: a module that is replaced takes its children with it."""
    for name, child in list(parent.named_children()):
        replacement = native(child)
        if replacement is None:
            _replace(child, native)
        else:
            setattr(parent, name, replacement)
            del child


def _native(module: Any, head_dims: set[int]) -> torch.nn.Module | None:
    """What is to stand in for `module`; None when it stays."""
    if _is_linear(module):
        return NativeLinear(module)
    if _is_gated_mlp(module):
        return NativeGatedMlp(module)
    if type(module).__name__ in _PLAIN_ATTENTION and head_dims == {module.head_dim}:
        return NativeAttention(module)
    if _is_rms_norm(module):
        norm = NativeRmsNorm(module.weight, module.variance_epsilon)
        return norm if _agree(norm, module, module.weight) else None
    if _is_fixed_rotary(module):
        rotary = NativeRotary(module)
        return rotary if _rotations_agree(rotary, module) else None
    return None


def _is_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear and module.weight.dtype in DTYPES


def _is_gated_mlp(module: Any) -> bool:
    children = dict(module.named_children())
    return (
        type(module).__name__.endswith("MLP")
        and children.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and all(_is_linear(children[name]) for name in ("gate_proj", "up_proj", "down_proj"))
        and type(children["act_fn"]) in (torch.nn.SiLU, _silu_of_transformers())
    )


def _silu_of_transformers() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


def _is_rms_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm")
        and hasattr(module, "variance_epsilon")
        and getattr(module, "weight", None) is not None
        and module.weight.ndim == 1
        and module.weight.dtype in DTYPES
    )


def _is_fixed_rotary(module: Any) -> bool:
    frequencies = getattr(module, "inv_freq", None)
    return (
        isinstance(frequencies, torch.Tensor)
        and frequencies.ndim == 1
        and isinstance(getattr(module, "attention_scaling", None), int | float)
        and getattr(module, "rope_type", None) not in (None, *BATCH_DEPENDENT_ROPE)
    )


def _agree(new: torch.nn.Module, old: torch.nn.Module, like: torch.Tensor) -> bool:
    """Whether both give the same on a few rows of `like`'s width and dtype, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, _NUM_TRIAL_ROWS, like.shape[-1]), generator=generator).to(like.dtype)
    with torch.inference_mode():
        expected, actual = old(x).float(), new(x).float()
    largest = float(expected.abs().max())
    return float((actual - expected).abs().max()) <= _TOLERANCE[like.dtype] * max(largest, 1e-6)


def _rotations_agree(new: NativeRotary, old: torch.nn.Module) -> bool:
    positions = torch.tensor([[0, 1, 7, 100, 1000]])
    x = torch.zeros((1, positions.shape[1], 1))
    with torch.inference_mode():
        return all(
            torch.allclose(a, b, rtol=0, atol=1e-5)
            for a, b in zip(new(x, positions), old(x, positions), strict=True)
        )


@cache
def _library() -> ctypes.CDLL:
    library = load_library()
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    real = ctypes.c_float
    signatures: dict[str, list[Any]] = {
        "octavo_rms_norm": [pointer, long, pointer, integer, pointer, long, long, real, integer],
        "octavo_gate": [pointer, integer, pointer, long, long, integer],
        "octavo_rotate": [
            *(pointer, long, integer, long, long, long),
            *(pointer, pointer, integer),
        ],
        "octavo_rotations": [pointer, long, pointer, long, real, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
