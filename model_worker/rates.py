"""How fast this worker is, measured when it starts: what a scheduler weighs a preemption by.

A group that leaves the pool is either computed again, at the rate of prefill, or swapped out and
in again, at that of copies between the tiers (Kwon et al. 2023, §4.5 and §7.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from model_worker.forward import PagedForward
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.step import SequenceStart, StepInput

# A prefill of the first size comes first: if it takes longer than this, no larger one is tried.
# A worker that comes back is waited for.
PREFILL_SIZES = (32, 128)
MAX_PREFILL_S = 0.25
# After one that is not counted, since memory that was never touched is slow; of these the best one
# is, since others may be busy at that moment.
NUM_ROUNDS = 2
MAX_SWAPPED_BLOCKS = 16


@dataclass(frozen=True)
class Rates:
    """Tokens a second of a prefill; bytes a second of a copy between the tiers, one way. 0: not
    known."""

    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0


def measure_rates(forward: PagedForward, kv: KvTensors, limits: Limits) -> Rates:
    """Runs prefills and swaps in blocks that hold nothing yet."""
    return Rates(_prefill_tokens_per_s(forward, kv, limits), _swap_bytes_per_s(kv))


def _prefill_tokens_per_s(forward: PagedForward, kv: KvTensors, limits: Limits) -> float:
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    most = min(most, limits.num_blocks * limits.block_size)
    rate = 0.0
    for size in PREFILL_SIZES:
        num_tokens = min(size, most)
        prefill = partial(_prefill, forward, kv, limits, num_tokens)
        seconds = _best_s(prefill, kv.device)
        rate = num_tokens / seconds
        if num_tokens < size or seconds > MAX_PREFILL_S:
            break
    return rate


def _prefill(forward: PagedForward, kv: KvTensors, limits: Limits, num_tokens: int) -> None:
    num_blocks = -(-num_tokens // limits.block_size)
    batch = InputBatch(limits).apply(
        StepInput(
            step_id=1,
            sequence_ids=np.array([1], np.uint64),
            table_versions=np.array([1], np.uint32),
            num_input_tokens=np.array([num_tokens], np.int32),
            num_computed_tokens=np.zeros(1, np.int32),
            input_token_ids=np.arange(num_tokens, dtype=np.int32) % limits.num_token_ids,
            num_samples=np.ones(1, np.int32),
            starts=(SequenceStart(1, np.arange(num_blocks, dtype=np.int32), 1),),
        )
    )
    forward(batch, kv)


def _swap_bytes_per_s(kv: KvTensors) -> float:
    count = min(MAX_SWAPPED_BLOCKS, kv.host.num_blocks, kv.num_blocks)
    if not count:
        return 0.0
    blocks = np.arange(count, dtype=np.int32)

    def out_and_in() -> None:
        kv.host.swap_out(blocks, blocks)
        kv.host.swap_in(blocks, blocks)

    return 2 * count * kv.bytes_per_block / _best_s(out_and_in, kv.device)


def _best_s(work: Callable[[], None], device: torch.device) -> float:
    _seconds(work, device)
    return min(_seconds(work, device) for _ in range(NUM_ROUNDS))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    work()
    _wait_for(device)
    return max(time.perf_counter() - began, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
