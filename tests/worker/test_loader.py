"""Which models are served, which are refused, and with what sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from model_worker.attention import create_backend
from model_worker.attention.reference import ReferenceAttention
from model_worker.errors import ModelError, UnsupportedModelError
from model_worker.forward import PagedForward
from model_worker.loader import load_model
from model_worker.self_check import check_against_eager
from model_worker.source import ModelSource, resolve_model
from tests.worker.tiny import COMMON, VOCAB_SIZE, Driver, load_tiny, make_runner, save_model

GQA = {**COMMON, "num_key_value_heads": 2}

SERVED = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=256
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GQA, head_dim=16, sliding_window=5),
    "mixtral": lambda: transformers.MixtralConfig(**GQA, num_local_experts=4),
    "cohere": lambda: transformers.CohereConfig(**GQA),
    "qwen2-windows-in-some-layers": lambda: transformers.Qwen2Config(
        **GQA, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    # Keys and values of different sizes.
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}

REFUSED = {
    "attention sinks": (
        lambda: transformers.GptOssConfig(
            **GQA, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
        ),
        "asks attention for s_aux",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(
            **GQA, head_dim=16, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=9
        ),
        "masks differently from causal",
    ),
    "not causal": (
        lambda: transformers.BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        ),
        "is not causal",
    ),
    "layers without attention": (
        lambda: transformers.Lfm2Config(**GQA, layer_types=["conv", "full_attention"]),
        r"layers \[0\] of 2 do not use the attention interface",
    ),
    "no attention interface": (
        lambda: transformers.BloomConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4
        ),
        "does not use transformers' attention interface",
    ),
    "rope of the longest sequence": (
        lambda: transformers.LlamaConfig(
            **GQA,
            rope_parameters={
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
            },
        ),
        "serve it with --max-model-len 128 or less",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_decoders_of_many_kinds_are_served(name, tmp_path):
    source = save_model(SERVED[name](), tmp_path / name)
    check_against_eager(PagedForward(load_tiny(source.path), create_backend("reference")), 4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_paged_attention_would_get_wrong_is_refused_with_the_reason(name, tmp_path):
    make_config, sentence = REFUSED[name]
    source = save_model(make_config(), tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=sentence):
        load_model(source, max_model_len=None if name != "no attention interface" else 64)


def test_batch_dependent_rope_is_served_where_it_does_not_depend(tmp_path):
    source = save_model(REFUSED["rope of the longest sequence"][0](), tmp_path / "m")
    assert load_model(source, max_model_len=128).max_model_len == 128


def test_encoder_decoders_are_refused(tmp_path):
    transformers.T5Config(vocab_size=97, d_model=64).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="only decoders"):
        load_model(ModelSource(tmp_path, "t5"))


def test_state_outside_attention_is_found_by_comparing_with_eager(model_folders):
    """A model that adds something of its own past to attention passes every other check."""
    loaded = load_tiny(model_folders["llama-gqa"])
    embed = loaded.model.model.embed_tokens
    embed.register_forward_hook(lambda _m, _i, out: out + 0.1 * out.cumsum(dim=1))
    with pytest.raises(UnsupportedModelError, match="its logits are off by"):
        check_against_eager(PagedForward(loaded, create_backend("reference")), 4)


def test_a_backend_that_computes_something_else_is_found(model_folders):
    class Louder(ReferenceAttention):
        def forward(self, layer, query, key, value, plan):
            return super().forward(layer, query, key, value, plan) * 1.05

    forward = PagedForward(load_tiny(model_folders["llama-gqa"]), Louder())
    with pytest.raises(UnsupportedModelError, match="its logits are off by"):
        check_against_eager(forward, 4)


def test_lengths_and_end_ids(model_folders, tmp_path):
    folder = model_folders["llama-gqa"]
    assert load_tiny(folder).max_model_len == 256
    assert load_tiny(folder).eos_token_ids == (2,)
    assert load_tiny(folder, max_model_len=100).max_model_len == 100
    for bad in (0, -1, 257):
        with pytest.raises(ModelError, match=r"within 1\.\.256"):
            load_tiny(folder, max_model_len=bad)
    source = save_model(transformers.LlamaConfig(**GQA), tmp_path / "eos")
    path = source.path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 5, 97]}))
    assert load_model(source).eos_token_ids == (2, 5)  # there is no token 97


def test_b34_a_head_padded_beyond_the_tokenizer(model_folders, tmp_path):
    from tokenizers import Tokenizer, models

    source = save_model(transformers.LlamaConfig(**GQA), tmp_path / "m")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, "w0")).save(
        str(source.path / "tokenizer.json")
    )
    loaded = load_model(source)
    assert (loaded.vocab_size, loaded.num_token_ids) == (97, 90)
    with torch.no_grad():  # make the padding the most probable by far
        loaded.model.lm_head.weight[90:] = loaded.model.lm_head.weight[:7] * 50
    driver = Driver(make_runner(loaded))
    sequence = driver.add([5, 6, 7])
    (drawn,) = driver.step([(sequence, 3, 40)])
    assert max(drawn) < 90


def test_a_model_whose_forward_does_not_slice_logits(model_folders, monkeypatch):
    folder = model_folders["llama-gqa"]
    plain, sliced = load_tiny(folder), load_tiny(folder)
    object.__setattr__(plain, "slices_logits", False)
    outputs = []
    for loaded in (plain, sliced):
        driver = Driver(make_runner(loaded))
        a, b = driver.add([5, 6, 7]), driver.add([8, 9])
        outputs.append(driver.execute([(a, 3, 1), (b, 2, 1)]))
    np.testing.assert_array_equal(outputs[0].sampled_token_ids, outputs[1].sampled_token_ids)
    np.testing.assert_allclose(outputs[0].logprobs, outputs[1].logprobs, rtol=1e-5)


def test_where_models_come_from(tmp_path, model_folders):
    folder = model_folders["qwen2"]
    assert resolve_model(str(folder)) == ModelSource(folder.resolve(), "qwen2")
    for bad, sentence in (
        (str(tmp_path), "has no config.json"),
        (str(tmp_path / "nowhere"), "There is no folder"),
        ("nowhere", "There is no folder"),
    ):
        with pytest.raises(ModelError, match=sentence):
            resolve_model(bad)


def run_prepare(cache: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "model_worker.prepare", *arguments],
        env={**os.environ, "OCTAVO_CACHE": str(cache), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_prepare_says_what_is_wrong_in_its_last_line(tmp_path):
    done = run_prepare(tmp_path, "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "There is no folder" in json.loads(done.stdout.splitlines()[-1])["error"]


def test_prepare_of_a_hub_model_without_a_network_is_a_sentence(tmp_path):
    done = run_prepare(tmp_path, "--model", "nobody/nothing", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "Cannot fetch nobody/nothing" in json.loads(done.stdout.splitlines()[-1])["error"]
