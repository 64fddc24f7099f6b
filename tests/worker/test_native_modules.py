"""Norm, gated MLP, rotation and attention's projections in C++ against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from model_worker.linear import NativeLinear
from model_worker.native_modules import (
    NativeAttention,
    NativeGatedMlp,
    NativeRmsNorm,
    NativeRotary,
    install,
    unreplaced_products,
)
from tests.worker.tiny import COMMON, CONFIGS, load_tiny

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Rows enough for threads to share them out, and a width that is no multiple of a vector.
ROWS = (1, 5, 700)


def llama(hidden_size: int = 72, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(**{**COMMON, "hidden_size": hidden_size, "head_dim": 16, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.normal_(module.weight, mean=1.0)
    return model


def assert_same(native: torch.nn.Module, module: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        expected, actual = module(x), native(x)
        alone = torch.cat([native(x[:, i : i + 1]) for i in range(min(x.shape[1], 20))], dim=1)
    assert actual.dtype == expected.dtype
    # Sums of terms that large are rounded like their terms.
    largest = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[x.dtype] * largest)
    assert torch.equal(actual[:, : alone.shape[1]], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_b28_norm_and_gated_mlp_equal_transformers_and_rows_are_their_own(
    dtype: torch.dtype, num_rows: int
) -> None:
    layer = llama().to(dtype).model.layers[0]
    norm = layer.input_layernorm
    native_norm = NativeRmsNorm(norm.weight, norm.variance_epsilon)
    x = (torch.randn(1, num_rows, 72) * 3).to(dtype)
    assert_same(native_norm, norm, x)
    assert_same(NativeGatedMlp(layer.mlp), layer.mlp, x)


def test_a_gate_far_from_zero_is_zero_or_the_value() -> None:
    mlp = llama().model.layers[0].mlp
    native = NativeGatedMlp(mlp)
    for scale in (1e3, 1e6):
        x = torch.randn(1, 4, 72) * scale
        with torch.inference_mode():
            torch.testing.assert_close(native(x), mlp(x), rtol=1e-4, atol=1e-4 * scale**2)
            assert native(x).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_equal_transformers(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 2, 255, 4096, 100_000]])
    x = torch.zeros(1, 1, 1, dtype=dtype)
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    choices: list[dict[str, Any]] = [{}, {"rope_parameters": scaled}]
    for changes in choices:
        rotary = llama(**changes).model.rotary_emb
        for actual, expected in zip(
            NativeRotary(rotary)(x, positions), rotary(x, positions), strict=True
        ):
            assert actual.dtype == dtype
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 4e-3
            )


def test_what_is_replaced_and_what_is_left() -> None:
    def kinds(model: Any) -> set[str]:
        install(model)
        return {type(module).__name__ for module in model.modules()}

    plain = kinds(llama())
    assert plain >= {"NativeAttention", "NativeGatedMlp", "NativeRmsNorm", "NativeRotary"}
    assert "Linear" not in plain
    assert "LlamaRMSNorm" not in plain
    # Its norm has weights around zero, its MLP another gate: only the linear layers are replaced.
    gemma = kinds(AutoModelForCausalLM.from_config(CONFIGS["gemma2"]))
    assert gemma >= {"Gemma2RMSNorm", "Gemma2MLP", "Gemma2Attention", "NativeLinear"}
    assert "Linear" not in gemma
    gelu = kinds(llama(hidden_act="gelu"))
    assert "NativeGatedMlp" not in gelu
    assert "NativeAttention" in gelu


def test_a_norm_that_only_looks_alike_stays() -> None:
    model = llama()

    class ShiftedRMSNorm(type(model.model.norm)):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    model.model.norm.__class__ = ShiftedRMSNorm
    install(model)
    assert type(model.model.norm) is ShiftedRMSNorm


def test_products_that_are_no_linear_layers_are_named() -> None:
    assert unreplaced_products(llama()) == []
    assert unreplaced_products(AutoModelForCausalLM.from_config(CONFIGS["gemma2"])) == []
    mixtral = MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4)
    names = unreplaced_products(AutoModelForCausalLM.from_config(mixtral))
    assert any("experts" in name for name in names)


def test_plain_weights_are_gone_but_for_the_tied_embedding(model_folders: dict[str, Path]) -> None:
    model = load_tiny(model_folders["qwen2"]).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    install(model)
    assert isinstance(model.lm_head, NativeLinear)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    assert matrices == ["model.embed_tokens.weight"]
    assert any(isinstance(module, NativeAttention) for module in model.modules())
