"""The model runner: executes steps. All state of the worker's data path is here."""

from __future__ import annotations

import time

import numpy as np

from model_worker import sampler
from model_worker.forward import PagedForward
from model_worker.gaps import Gaps
from model_worker.input_batch import FlatBatch, InputBatch
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel
from model_worker.rates import Rates
from model_worker.step import F32, I32, StepInput, StepOutput, StepTimings


class ModelRunner:
    """Executes one step after another, on one thread.

    Owns the KV tensors and the mirror of the block tables. Usable without any server: a
    benchmark in one process calls `execute` directly.
    """

    def __init__(
        self,
        forward: PagedForward,
        kv: KvTensors,
        input_batch: InputBatch,
        rates: Rates | None = None,
    ) -> None:
        """rates: what was measured; None: nothing."""
        self.kv = kv
        self.input_batch = input_batch
        self.rates = rates or Rates()
        self._forward = forward
        self._gaps = Gaps()

    def execute(self, step: StepInput) -> StepOutput:
        """Carry out `step`: tables, swap-ins, copies, swap-outs, forward, draws.

        Raises StepError, having changed nothing, when the step contradicts the contract.
        """
        started, started_unix_ns = time.perf_counter_ns(), time.time_ns()
        gap = self._gaps.begin(
            started if step.ready_ns is None else step.ready_ns,
            started,
            goes_on=self.input_batch.knows_any(step.sequence_ids),
        )
        batch = self.input_batch.apply(step)
        copying = time.perf_counter_ns()
        self._move_blocks(step)
        prepared = time.perf_counter_ns()
        logits = self._logits(batch)
        forwarded = time.perf_counter_ns()
        token_ids, logprobs = self._sample(batch, logits)
        self.input_batch.remember_draws(step, token_ids)
        ended = time.perf_counter_ns()
        self._gaps.end(ended)
        return StepOutput(
            step_id=step.step_id,
            started_unix_ns=started_unix_ns,
            sampled_token_ids=token_ids,
            logprobs=logprobs,
            timings=StepTimings(
                gap_us=gap.gap_ns // 1000,
                idle_us=gap.idle_ns // 1000,
                prepare_us=(prepared - started) // 1000,
                copy_us=(prepared - copying) // 1000,
                forward_us=(forwarded - prepared) // 1000,
                sample_us=(ended - forwarded) // 1000,
            ),
        )

    @property
    def loaded(self) -> LoadedModel:
        """The model that runs here."""
        return self._forward.loaded

    @property
    def attention_backend(self) -> str:
        """Name of the backend that attends."""
        return self._forward.backend.name

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits in any batch."""
        return self._forward.is_batch_invariant

    def forget_sequences(self) -> None:
        """Clear the mirror of the block tables; the KV bytes stay where they are."""
        self.input_batch.clear()

    def _move_blocks(self, step: StepInput) -> None:
        """In the order of the contract: a copy may read what is swapped in, and a swap-out what is
        copied; all before the step writes anything."""
        kv = self.kv
        kv.host.swap_in(step.swap_in_host_block_ids, step.swap_in_block_ids)
        kv.copy_blocks(step.copy_src_block_ids, step.copy_dst_block_ids)
        kv.host.swap_out(step.swap_out_block_ids, step.swap_out_host_block_ids)

    def _logits(self, batch: FlatBatch) -> F32:
        if not batch.input_ids.size:
            return np.empty((0, self.loaded.vocab_size), np.float32)
        return self._forward(batch, self.kv).numpy()

    def _sample(self, batch: FlatBatch, logits: F32) -> tuple[I32, F32]:
        return sampler.sample(
            logits,
            batch.samplings,
            batch.draw_positions,
            batch.num_samples,
            self.loaded.num_token_ids,
        )
