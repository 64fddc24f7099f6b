"""The same cores in one process: the scheduler's two ports without a wire."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.kvmem_adapter import apply_batch, levels_of
from kvmem_svc.core import batch as kv
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from model_worker import step as worker_step
from model_worker.build import build_runner
from model_worker.options import WorkerOptions
from scheduler_svc.core import ops
from scheduler_svc.ports import Holder, Installed, Opened, PoolAttached, WorkerDescription


class InProcessKvMemory:
    """The memory core behind the scheduler's port: a method call instead of a stream."""

    def __init__(self, max_sequences: int = 4096) -> None:
        self.memory = KvMemory("in-process", max_sequences=max_sequences)
        self._gatekeeper = Gatekeeper(self.memory)
        self._fence = kv.Fence("", 0, "")

    async def open(self, holder: Holder, worker: WorkerDescription) -> Opened:
        session = self._gatekeeper.open_session(holder.name, 0)
        self._fence = kv.Fence(session.session_id, session.epoch, "in-process", worker.boot_id)
        return Opened(next_batch_seq=1, last_step_id=0)

    async def attach(self, worker: WorkerDescription, last_executed_step: int) -> PoolAttached:
        geometry = kv.PoolGeometry(worker.num_blocks, worker.block_size, worker.max_model_len)
        self._gatekeeper.attach_pool(self._fence, worker.boot_id, geometry, 0, last_executed_step)
        return PoolAttached(levels_of(self.memory.levels()))

    async def adopt(self) -> tuple[ops.AdoptedRequest, ...]:
        """There was nobody before."""
        return ()

    async def apply(self, batch: ops.Batch, traceparent: str) -> ops.BatchResult:
        del traceparent
        return apply_batch(self._gatekeeper, batch, self._fence, 0)

    async def watch(self) -> None:
        """What lives in this process is never lost."""

    async def close(self) -> None:
        pass


class InProcessWorker:
    """The model runner behind the scheduler's port, on one thread of its own."""

    def __init__(self, options: WorkerOptions) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._runner = self._thread.submit(build_runner, options).result()

    async def describe(self) -> WorkerDescription:
        runner = self._runner
        loaded, limits = runner.loaded, runner.input_batch.limits
        return WorkerDescription(
            boot_id="in-process",
            model_name=loaded.source.name,
            model_path=str(loaded.source.path),
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            attention_backend=runner.attention_backend,
            num_blocks=runner.kv.num_blocks,
            block_size=runner.kv.block_size,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_inflight_steps=2,
        )

    async def install(self) -> Installed:
        """There was nobody before."""
        return Installed(last_step_id=0)

    async def execute(self, step: ops.Step, traceparent: str) -> ops.StepResult:
        del traceparent
        loop = asyncio.get_running_loop()
        output = await loop.run_in_executor(self._thread, self._runner.execute, step_input(step))
        timings = output.timings
        return ops.StepResult(
            output.step_id,
            output.sampled_token_ids,
            output.logprobs,
            ops.StepTimings(
                timings.idle_us, timings.prepare_us, timings.forward_us, timings.sample_us
            ),
        )

    async def watch(self) -> None:
        """What lives in this process is never lost."""

    async def close(self) -> None:
        self._thread.shutdown()


def step_input(step: ops.Step) -> worker_step.StepInput:
    """The scheduler's step as the worker's runner takes it."""
    return worker_step.StepInput(
        step_id=step.step_id,
        sequence_ids=step.sequence_ids,
        table_versions=step.table_versions,
        num_input_tokens=step.num_input_tokens,
        num_computed_tokens=step.num_computed_tokens,
        input_token_ids=step.input_token_ids,
        num_samples=step.num_samples,
        copy_src_block_ids=step.copy_src,
        copy_dst_block_ids=step.copy_dst,
        swap_in_host_block_ids=step.swap_ins.src,
        swap_in_block_ids=step.swap_ins.dst,
        swap_out_block_ids=step.swap_outs.src,
        swap_out_host_block_ids=step.swap_outs.dst,
        starts=tuple(map(_worker_start, step.starts)),
        deltas=worker_step.TableDeltas(
            step.deltas.sequence_ids,
            step.deltas.table_indices,
            step.deltas.block_ids,
            step.deltas.table_versions,
        ),
        dropped_sequence_ids=step.dropped_sequence_ids,
        ready_ns=time.perf_counter_ns(),
    )


def _worker_start(start: ops.SequenceStart) -> worker_step.SequenceStart:
    params = start.params
    return worker_step.SequenceStart(
        start.sequence_id,
        np.array(start.block_ids, np.int32),
        start.table_version,
        worker_step.Sampling(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed,
            start.sample_index,
            start.masked_token_ids,
            start.masked_before_position,
        ),
    )
