"""Between the messages of `octavo.v1` and the worker's own types."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from model_worker.errors import StepError
from model_worker.fencing import Fence
from model_worker.step import (
    RetainedStep,
    Sampling,
    SequenceStart,
    StepInput,
    StepOutput,
    TableDeltas,
)
from octavo.service.columns import F32, I32, U32, U64, ColumnError, pack, unpack
from octavo.v1 import types_pb2, worker_pb2

if TYPE_CHECKING:
    # It brings torch, and the server is to listen before that is loaded.
    from model_worker.runner import ModelRunner


def fence_from_pb(fence: types_pb2.Fence) -> Fence:
    """The fence of a request; absent fields are empty, which matches nothing."""
    return Fence(fence.session_id, fence.epoch, fence.kvmem_boot_id, fence.worker_boot_id)


def step_from_pb(request: worker_pb2.ExecuteRequest) -> StepInput:
    """The step a request asks for. Raises StepError for a column that is no whole column."""
    try:
        return StepInput(
            step_id=request.step_id,
            sequence_ids=unpack(request.sequence_ids, U64, "sequence_ids"),
            table_versions=unpack(request.table_versions, U32, "table_versions"),
            num_input_tokens=unpack(request.num_input_tokens, I32, "num_input_tokens"),
            num_computed_tokens=unpack(request.num_computed_tokens, I32, "num_computed_tokens"),
            input_token_ids=unpack(request.input_token_ids, I32, "input_token_ids"),
            num_samples=unpack(request.num_samples, I32, "num_samples"),
            starts=tuple(_start_from_pb(start) for start in request.starts),
            **_block_changes(request),
            dropped_sequence_ids=unpack(request.dropped_sequence_ids, U64, "dropped_sequence_ids"),
            traceparent=request.traceparent,
            ready_ns=time.perf_counter_ns(),
        )
    except ColumnError as error:
        raise StepError("INVALID_BATCH", str(error)) from error


def _block_changes(request: worker_pb2.ExecuteRequest) -> dict[str, Any]:
    """Columns of StepInput that most steps have nothing in."""
    changes: dict[str, Any] = {}
    for field, (source, destination) in _MOVES.items():
        if request.HasField(field):
            moves = getattr(request, field)
            changes[source] = unpack(moves.src_block_ids, I32, f"{field}.src_block_ids")
            changes[destination] = unpack(moves.dst_block_ids, I32, f"{field}.dst_block_ids")
    if request.HasField("deltas"):
        changes["deltas"] = _deltas_from_pb(request.deltas)
    return changes


# Fields of ExecuteRequest, and what their source and destination are in StepInput.
_MOVES: dict[Literal["copies", "swap_ins", "swap_outs"], tuple[str, str]] = {
    "copies": ("copy_src_block_ids", "copy_dst_block_ids"),
    "swap_ins": ("swap_in_host_block_ids", "swap_in_block_ids"),
    "swap_outs": ("swap_out_block_ids", "swap_out_host_block_ids"),
}


def _start_from_pb(start: worker_pb2.SequenceStart) -> SequenceStart:
    return SequenceStart(
        sequence_id=start.sequence_id,
        block_ids=unpack(start.block_ids, I32, "starts.block_ids"),
        table_version=start.table_version,
        sampling=_sampling_from_pb(start.sampling),
        traceparent=start.traceparent,
        request_id=start.request_id,
    )


def _sampling_from_pb(sampling: worker_pb2.WorkerSampling) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        sample_index=sampling.sample_index,
        masked_token_ids=tuple(sampling.masked_token_ids),
        masked_before_position=sampling.masked_before_position,
    )


def _deltas_from_pb(deltas: types_pb2.TableDeltas) -> TableDeltas:
    return TableDeltas(
        sequence_ids=unpack(deltas.sequence_ids, U64, "deltas.sequence_ids"),
        table_indices=unpack(deltas.table_indices, I32, "deltas.table_indices"),
        block_ids=unpack(deltas.block_ids, I32, "deltas.block_ids"),
        table_versions=unpack(deltas.table_versions, U32, "deltas.table_versions"),
    )


def reply_to_pb(output: StepOutput, worker_boot_id: str) -> worker_pb2.ExecuteReply:
    """The reply to a step."""
    timings = output.timings
    return worker_pb2.ExecuteReply(
        step_id=output.step_id,
        worker_boot_id=worker_boot_id,
        sampled_token_ids=pack(output.sampled_token_ids, I32),
        logprobs=pack(output.logprobs, F32),
        timings=worker_pb2.StepTimings(
            idle_us=min(timings.idle_us, 0xFFFFFFFF),
            prepare_us=timings.prepare_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
        ),
    )


def installed_to_pb(
    worker_boot_id: str, last_step_id: int, retained: Iterable[RetainedStep]
) -> worker_pb2.InstallReply:
    """What a session is told that has taken the worker over; `retained` is oldest first."""
    return worker_pb2.InstallReply(
        worker_boot_id=worker_boot_id,
        last_step_id=last_step_id,
        retained=[_retained_to_pb(step, worker_boot_id) for step in retained],
    )


def _retained_to_pb(step: RetainedStep, worker_boot_id: str) -> worker_pb2.RetainedStep:
    return worker_pb2.RetainedStep(
        reply=reply_to_pb(step.output, worker_boot_id),
        sequence_ids=pack(step.sequence_ids, U64),
        num_input_tokens=pack(step.num_input_tokens, I32),
        num_computed_tokens=pack(step.num_computed_tokens, I32),
        num_samples=pack(step.num_samples, I32),
    )


def info_to_pb(runner: ModelRunner, boot_id: str, max_inflight_steps: int) -> worker_pb2.WorkerInfo:
    """What GetInfo says of a worker that serves `runner`."""
    loaded, kv, limits = runner.loaded, runner.kv, runner.input_batch.limits
    return worker_pb2.WorkerInfo(
        boot_id=boot_id,
        geometry=types_pb2.PoolGeometry(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_model_len=loaded.max_model_len,
            kv_bytes_per_block=kv.bytes_per_block,
            kv_dtype=str(kv.dtype).removeprefix("torch."),
            num_host_blocks=kv.host.num_blocks,
        ),
        model_name=loaded.source.name,
        model_path=str(loaded.source.path),
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_inflight_steps=max_inflight_steps,
        attention_backend=runner.attention_backend,
        batch_invariant=runner.is_batch_invariant,
        device=str(loaded.device),
        max_num_batched_tokens=limits.max_num_batched_tokens,
        prefill_tokens_per_s=runner.rates.prefill_tokens_per_s,
        swap_bytes_per_s=runner.rates.swap_bytes_per_s,
    )
