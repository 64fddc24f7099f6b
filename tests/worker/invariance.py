"""Logits of fixed token sequences, recorded under whatever schedule computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model_worker.attention import create_backend
from model_worker.forward import PagedForward
from model_worker.input_batch import FlatBatch, InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel
from model_worker.runner import ModelRunner
from tests.worker.tiny import DrivenSequence, Driver

# By (number of the sequence, position): the bytes of the logits there.
Recorded = dict[tuple[int, int], bytes]


class RecordingForward(PagedForward):
    """Keeps the logits of the newest forward."""

    newest: np.ndarray

    def __call__(self, batch: FlatBatch, kv: KvTensors) -> torch.Tensor:
        logits = super().__call__(batch, kv)
        self.newest = logits.numpy().copy()
        return logits


class Scheduler:
    """Runs fixed sequences in any order, pieces and company, and records every row's logits."""

    def __init__(
        self,
        loaded: LoadedModel,
        sequences: Sequence[list[int]],
        *,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        """The pool is NaN all over and its blocks are handed out in an order drawn by `seed`."""
        num_blocks = sum(-(-len(tokens) // block_size) for tokens in sequences) + 3
        kv = KvTensors(loaded.layer_specs, num_blocks, block_size, loaded.dtype, loaded.device)
        for layer in kv.layers:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            num_token_ids=loaded.num_embeddings,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=4096,
            max_num_seqs=32,
        )
        self.forward = RecordingForward(loaded, create_backend("cpu"))
        self.driver = Driver(ModelRunner(self.forward, kv, InputBatch(limits)), seed)
        self.sequences = [self.driver.add(tokens) for tokens in sequences]
        self.recorded: Recorded = {}

    def step(self, rows: Sequence[tuple[int, int]]) -> None:
        """rows: (number of the sequence, number of tokens); what it has left bounds the latter."""
        driven: list[tuple[DrivenSequence, int, int]] = []
        for number, wanted in rows:
            sequence = self.sequences[number]
            count = min(wanted, len(sequence.tokens) - sequence.num_computed_tokens)
            if count:
                driven.append((sequence, count, 1))
        if not driven:
            return
        self.driver.execute(driven)
        for logits, (sequence, count, _) in zip(self.forward.newest, driven, strict=True):
            sequence.num_computed_tokens += count
            where = (self.sequences.index(sequence), sequence.num_computed_tokens - 1)
            self.record(where, logits.tobytes())

    def record(self, where: tuple[int, int], logits: bytes) -> None:
        """A position that was computed before, and is again, must have the same bits."""
        before = self.recorded.setdefault(where, logits)
        assert before == logits, f"recomputed, position {where[1]} has other logits"

    def preempt(self, number: int) -> None:
        """By recompute: the blocks go back, the tokens stay."""
        sequence = self.sequences[number]
        self.driver.free[:0] = sequence.block_ids
        sequence.block_ids, sequence.num_computed_tokens = [], 0
        sequence.is_known = False

    def finish(self) -> Recorded:
        """Run what is left, all together; everything recorded."""
        for _ in range(2):
            self.step([(number, 10_000) for number in range(len(self.sequences))])
        assert all(s.num_computed_tokens == len(s.tokens) for s in self.sequences)
        return self.recorded


def alone(loaded: LoadedModel, sequences: Sequence[list[int]]) -> Recorded:
    """Each sequence by itself, one token at a time: logits at every position."""
    recorded: Recorded = {}
    for number, tokens in enumerate(sequences):
        scheduler = Scheduler(loaded, [tokens])
        for _ in tokens:
            scheduler.step([(0, 1)])
        recorded.update(
            {(number, position): bits for (_, position), bits in scheduler.recorded.items()}
        )
    return recorded


def differences(recorded: Recorded, expected: Recorded) -> list[tuple[int, int]]:
    """Where they differ."""
    return [where for where, bits in recorded.items() if expected[where] != bits]
