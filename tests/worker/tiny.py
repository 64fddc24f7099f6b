"""Tiny random models of several families, and a driver that runs steps on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from model_worker.attention import create_backend
from model_worker.forward import PagedForward
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel, load_model
from model_worker.runner import ModelRunner
from model_worker.source import ModelSource
from model_worker.step import Sampling, SequenceStart, StepInput, StepOutput, TableDeltas

VOCAB_SIZE = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far enough from zero for attention to matter
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-gqa": LlamaConfig(**COMMON, num_key_value_heads=2),
    "llama-mha": LlamaConfig(**COMMON, num_key_value_heads=4),
    "llama-mqa": LlamaConfig(**COMMON, num_key_value_heads=1),
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=7),
    # Windows in every other layer, softcaps in attention and at the end, scaling of its own.
    "gemma2": Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=11,
    ),
}


def save_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> ModelSource:
    """Write a randomly initialised model of `config` to `folder`."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelSource(folder, folder.name)


def eager_model(folder: Path) -> Any:
    """The same model with transformers' own attention: what the worker must agree with."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def eager_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """[len(token_ids), vocab_size], the sequence alone and whole."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def greedy_ids(model: Any, token_ids: list[int], count: int) -> list[int]:
    """What the model generates greedily on its own, never ending early.

    Without transformers' cache where windows slide: in one of 1 it attends to nothing.
    """
    prompt = torch.tensor([token_ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        use_cache=getattr(model.config, "sliding_window", None) is None,
        eos_token_id=None,
    )
    return out[0, len(token_ids) :].tolist()


def make_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 256,
    max_num_seqs: int = 16,
    num_host_blocks: int = 0,
) -> ModelRunner:
    """A runner with a pool that is NaN all over, so that whoever reads an unwritten slot shows."""
    kv = KvTensors(
        loaded.layer_specs,
        num_blocks,
        block_size,
        loaded.dtype,
        loaded.device,
        num_host_blocks=num_host_blocks,
    )
    for layer in kv.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    limits = Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        num_token_ids=loaded.num_embeddings,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        num_host_blocks=num_host_blocks,
    )
    return ModelRunner(PagedForward(loaded, create_backend("reference")), kv, InputBatch(limits))


def load_tiny(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelSource(folder, folder.name), **options)


@dataclass
class DrivenSequence:
    """A sequence as a scheduler would see it."""

    sequence_id: int
    tokens: list[int]
    sampling: Sampling
    block_ids: list[int] = field(default_factory=list)
    table_version: int = 1
    num_computed_tokens: int = 0
    is_known: bool = False


class Driver:
    """Plays kvmem and scheduler for a runner: scattered blocks, versions, one step at a time."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(np.random.default_rng(seed).permutation(runner.kv.num_blocks))
        self.step_id = 0
        self.num_sequences = 0
        self.copies: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.swap_outs: list[tuple[int, int]] = []

    def add(self, tokens: list[int], sampling: Sampling | None = None) -> DrivenSequence:
        self.num_sequences += 1
        return DrivenSequence(self.num_sequences, list(tokens), sampling or Sampling())

    def fork(self, parent: DrivenSequence, sampling: Sampling | None = None) -> DrivenSequence:
        """A child that shares the parent's full blocks and has a copy of its last, partial one."""
        child = self.add(parent.tokens, sampling or parent.sampling)
        child.block_ids = list(parent.block_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        if parent.num_computed_tokens % self.runner.kv.block_size:
            child.block_ids[-1] = self.free.pop()
            self.copies.append((parent.block_ids[-1], child.block_ids[-1]))
        return child

    def swap_out(self, sequence: DrivenSequence) -> None:
        """In the next step, whose rows may be given its blocks at once. Host blocks are numbered
        as the blocks are."""
        self.swap_outs += [(block, block) for block in sequence.block_ids]
        self.free += sequence.block_ids

    def swap_in(self, sequence: DrivenSequence) -> None:
        """In the next step, to other blocks."""
        blocks = [int(self.free.pop(0)) for _ in sequence.block_ids]
        self.swap_ins += list(zip(sequence.block_ids, blocks, strict=True))
        sequence.block_ids, sequence.is_known = blocks, False
        sequence.table_version += 1

    def step(self, rows: list[tuple[DrivenSequence, int, int]]) -> list[list[int]]:
        """Run rows of (sequence, num_input_tokens, num_samples); the drawn ids of each row.

        A single drawn token is appended to its sequence.
        """
        output = self.execute(rows)
        drawn, at = [], 0
        for sequence, num_inputs, num_samples in rows:
            ids = output.sampled_token_ids[at : at + num_samples].tolist()
            at += num_samples
            sequence.num_computed_tokens += num_inputs
            if num_samples == 1:
                sequence.tokens.extend(ids)
            drawn.append(ids)
        return drawn

    def execute(self, rows: list[tuple[DrivenSequence, int, int]]) -> StepOutput:
        self.step_id += 1
        starts, deltas = [], []
        for sequence, num_inputs, _ in rows:
            self._provide(sequence, num_inputs, starts, deltas)
        columns = list(zip(*deltas, strict=True)) or [(), (), (), ()]
        copies, swap_ins, swap_outs = map(columns_of, (self.copies, self.swap_ins, self.swap_outs))
        self.copies, self.swap_ins, self.swap_outs = [], [], []
        return self.runner.execute(
            StepInput(
                step_id=self.step_id,
                sequence_ids=np.array([s.sequence_id for s, _, _ in rows], np.uint64),
                table_versions=np.array([s.table_version for s, _, _ in rows], np.uint32),
                num_input_tokens=np.array([n for _, n, _ in rows], np.int32),
                num_computed_tokens=np.array([s.num_computed_tokens for s, _, _ in rows], np.int32),
                input_token_ids=np.array(
                    [
                        token
                        for s, n, _ in rows
                        for token in s.tokens[s.num_computed_tokens : s.num_computed_tokens + n]
                    ],
                    np.int32,
                ),
                num_samples=np.array([k for _, _, k in rows], np.int32),
                copy_src_block_ids=copies[0],
                copy_dst_block_ids=copies[1],
                swap_in_host_block_ids=swap_ins[0],
                swap_in_block_ids=swap_ins[1],
                swap_out_block_ids=swap_outs[0],
                swap_out_host_block_ids=swap_outs[1],
                starts=tuple(starts),
                deltas=TableDeltas(
                    np.array(columns[0], np.uint64),
                    np.array(columns[1], np.int32),
                    np.array(columns[2], np.int32),
                    np.array(columns[3], np.uint32),
                ),
            )
        )

    def _provide(
        self,
        sequence: DrivenSequence,
        num_inputs: int,
        starts: list[SequenceStart],
        deltas: list[tuple[int, int, int, int]],
    ) -> None:
        """Give the sequence the blocks it needs, and tell the worker as kvmem would."""
        num_slots = sequence.num_computed_tokens + num_inputs
        needed = -(-num_slots // self.runner.kv.block_size)
        new = [int(self.free.pop()) for _ in range(needed - len(sequence.block_ids))]
        first = len(sequence.block_ids)
        sequence.block_ids.extend(new)
        if not sequence.is_known:
            starts.append(
                SequenceStart(
                    sequence.sequence_id,
                    np.array(sequence.block_ids, np.int32),
                    sequence.table_version,
                    sequence.sampling,
                )
            )
            sequence.is_known = True
        elif new:
            sequence.table_version += 1
            deltas.extend(
                (sequence.sequence_id, first + i, block_id, sequence.table_version)
                for i, block_id in enumerate(new)
            )


def columns_of(pairs: list[tuple[int, int]]) -> np.ndarray:
    """Sources and destinations, int32[2, pairs]."""
    return np.array(pairs, np.int32).reshape(-1, 2).T


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
