"""Whole models on the kernels, against the reference backend on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma2Config, LlamaConfig

from model_worker.attention import AttentionBackend, create_backend
from model_worker.forward import PagedForward
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel, load_model
from model_worker.runner import ModelRunner
from model_worker.self_check import check_against_eager
from model_worker.source import ModelSource
from tests.worker.tiny import COMMON, Driver, random_prompt, save_model

BLOCK_SIZE = 8
CONFIGS = {
    "llama": LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=64),
    # Windows in every other layer, softcaps.
    "gemma2": Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=80,
        sliding_window=11,
        attn_logit_softcapping=3.0,
        query_pre_attn_scalar=11,
    ),
}


def _runner(loaded: LoadedModel, backend: AttentionBackend) -> ModelRunner:
    limits = Limits(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        num_token_ids=loaded.num_embeddings,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        num_host_blocks=64,
    )
    kv = KvTensors(
        loaded.layer_specs,
        limits.num_blocks,
        BLOCK_SIZE,
        loaded.dtype,
        loaded.device,
        backend.block_copier,
        num_host_blocks=64,
    )
    for layer in kv.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    return ModelRunner(PagedForward(loaded, backend), kv, InputBatch(limits))


def _generate(runner: ModelRunner) -> list[list[int]]:
    """Chunked prefills beside decodes, a fork in the middle of a block with its copy, and a
    sequence that is swapped out and in again."""
    driver = Driver(runner)
    first, second = (driver.add(random_prompt(i, length)) for i, length in enumerate((29, 70)))
    driver.step([(first, 20, 0)])
    driver.step([(first, 9, 1), (second, 50, 0)])
    driver.step([(second, 20, 1), (first, 1, 1)])
    child = driver.fork(first)
    child.tokens[-1] = 5
    for _ in range(4):
        driver.step([(first, 1, 1), (child, 1, 1), (second, 1, 1)])
    driver.swap_out(second)
    for _ in range(3):
        driver.step([(first, 1, 1), (child, 1, 1)])
    driver.swap_in(second)
    for _ in range(4):
        driver.step([(first, 1, 1), (child, 1, 1), (second, 1, 1)])
    return [sequence.tokens for sequence in (first, second, child)]


def check_model(name: str, folder: Path, backend: AttentionBackend) -> None:
    """Greedy tokens are those of the reference backend, and logits those of eager attention."""
    torch.manual_seed(0)
    save_model(CONFIGS[name], folder)
    source = ModelSource(folder, name)
    loaded = load_model(source, device=backend.device)
    for spec in loaded.layer_specs:
        backend.check(spec, BLOCK_SIZE, loaded.dtype)
    check_against_eager(PagedForward(loaded, backend), BLOCK_SIZE)
    reference = _generate(_runner(load_model(source), create_backend("reference")))
    assert _generate(_runner(loaded, backend)) == reference
