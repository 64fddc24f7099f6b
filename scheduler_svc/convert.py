"""Between the wire and the scheduler's core."""

from __future__ import annotations

import numpy as np

from octavo.service.columns import F32, I32, U32, U64, pack, unpack
from octavo.v1 import inference_pb2, kvmem_pb2, types_pb2, worker_pb2
from scheduler_svc.core import events, ops
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.stopping import FinishReason


def params_of(message: types_pb2.SamplingParams) -> tuple[SamplingParams, int | None]:
    """The parameters as sent, unchecked, and max_tokens apart (None: not given)."""
    given = {
        name: getattr(message, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "n",
            "first_sample_index",
            "min_tokens",
            "ignore_eos",
        )
        if message.HasField(name)
    }
    params = SamplingParams(
        stop=tuple(message.stop), stop_token_ids=tuple(message.stop_token_ids), **given
    )
    return params, message.max_tokens if message.HasField("max_tokens") else None


def params_message(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        first_sample_index=params.first_sample_index,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


# ---- the memory service ----


def batch_message(
    batch: ops.Batch, fence: types_pb2.Fence, traceparent: str = ""
) -> kvmem_pb2.Batch:
    step = kvmem_pb2.StepOps(
        step_id=batch.step_id,
        acknowledged_step=batch.acknowledged_step,
        ops=[_op_message(op) for op in batch.ops],
    )
    return kvmem_pb2.Batch(
        fence=fence, batch_seq=batch.batch_seq, step=step, traceparent=traceparent
    )


def _op_message(op: ops.Op) -> kvmem_pb2.Op:
    match op:
        case ops.Commit():
            return kvmem_pb2.Op(
                commit=kvmem_pb2.Commit(
                    sequence_ids=pack(op.sequence_ids, U64),
                    num_tokens=pack(op.num_tokens, I32),
                    token_ids=pack(op.token_ids, I32),
                    num_computed_tokens=pack(op.num_computed_tokens, I32),
                    state_words=pack(op.state_words, U64),
                )
            )
        case ops.Reserve():
            return kvmem_pb2.Op(
                reserve=kvmem_pb2.Reserve(
                    sequence_ids=pack(op.sequence_ids, U64),
                    num_slots=pack(op.num_slots, I32),
                    group_sizes=pack(op.group_sizes, I32),
                )
            )
        case ops.Arrive():
            return kvmem_pb2.Op(arrive=_arrive_message(op))
        case ops.Admit(members):
            return kvmem_pb2.Op(
                admit=kvmem_pb2.Admit(
                    members=[
                        kvmem_pb2.AdmitMember(
                            sequence_id=member.sequence_id,
                            num_slots=member.num_slots,
                            share_from=member.share_from,
                            num_shared_blocks=member.num_shared_blocks,
                            use_prefix_cache=member.use_prefix_cache,
                        )
                        for member in members
                    ]
                )
            )
        case ops.Fork(sequence_id, token_ids, state_words):
            return kvmem_pb2.Op(
                fork=kvmem_pb2.Fork(
                    sequence_id=sequence_id,
                    num_children=len(token_ids) - 1,
                    token_ids=token_ids,
                    state_words=pack(state_words, U64),
                )
            )
        case ops.Preempt(sequence_ids):
            return kvmem_pb2.Op(preempt=kvmem_pb2.Preempt(sequence_ids=sequence_ids))
        case ops.SwapOut(sequence_ids):
            return kvmem_pb2.Op(swap_out=kvmem_pb2.SwapOut(sequence_ids=sequence_ids))
        case ops.SwapIn(members):
            return kvmem_pb2.Op(
                swap_in=kvmem_pb2.SwapIn(
                    members=[
                        kvmem_pb2.SwapInMember(
                            sequence_id=member.sequence_id, num_slots=member.num_slots
                        )
                        for member in members
                    ]
                )
            )
        case ops.Free(sequence_ids, reason):
            return kvmem_pb2.Op(
                free=kvmem_pb2.Free(sequence_ids=sequence_ids, finish_reason=_finish_reason(reason))
            )
        case ops.Confirm(request_id):
            return kvmem_pb2.Op(confirm=kvmem_pb2.Confirm(request_id=request_id))


def _arrive_message(op: ops.Arrive) -> kvmem_pb2.Arrive:
    request = op.request
    return kvmem_pb2.Arrive(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        num_candidates=request.params.n,
        tenant=request.tenant,
        request_spec=request.spec,
        request_digest=request.digest,
        traceparent=request.traceparent,
        cache_salt=request.cache_salt,
        candidates=[
            kvmem_pb2.ArrivingCandidate(
                candidate=candidate.candidate,
                output_token_ids=pack(candidate.output_token_ids, I32),
                finish_reason=_finish_reason(candidate.finish_reason),
                scheduler_state=pack([candidate.state_word], U64),
            )
            for candidate in op.candidates
        ],
    )


def _finish_reason(reason: FinishReason | None) -> str:
    return f"FINISH_REASON_{'UNSPECIFIED' if reason is None else reason.name}"


def result_of(message: kvmem_pb2.BatchResult) -> ops.BatchResult:
    copies = copies_of(message.copies)
    return ops.BatchResult(
        batch_seq=message.batch_seq,
        results=tuple(map(_op_result, message.results)),
        deltas=_deltas_of(message.deltas),
        copy_src=copies.src,
        copy_dst=copies.dst,
        levels=levels_of(message.levels),
        swap_ins=copies_of(message.swap_ins),
        swap_outs=copies_of(message.swap_outs),
    )


def _deltas_of(message: types_pb2.TableDeltas) -> ops.TableDeltas:
    if not message.ByteSize():  # as in most steps
        return ops.NO_DELTAS
    return ops.TableDeltas(
        unpack(message.sequence_ids, U64, "sequence_ids"),
        unpack(message.table_indices, I32, "table_indices"),
        unpack(message.block_ids, I32, "block_ids"),
        unpack(message.table_versions, U32, "table_versions"),
    )


def copies_of(message: types_pb2.BlockCopies) -> ops.BlockCopies:
    if not message.ByteSize():  # as in most steps
        return ops.NO_COPIES
    return ops.BlockCopies(
        unpack(message.src_block_ids, I32, "src_block_ids"),
        unpack(message.dst_block_ids, I32, "dst_block_ids"),
    )


def levels_of(message: types_pb2.PoolLevels) -> ops.PoolLevels:
    return ops.PoolLevels(
        message.num_free_blocks + message.num_cached_blocks,
        message.num_quarantined_blocks,
        message.num_free_sequences,
        message.num_free_host_blocks,
    )


def _op_result(message: kvmem_pb2.OpResult) -> ops.OpResult:
    kind = message.WhichOneof("result")
    if kind is None and message.status == ops.OpStatus.OK:
        return ops.OK
    status = ops.OpStatus(message.status)
    match kind:
        case "arrived":
            return ops.OpResult(
                status,
                message.message,
                sequence_id=message.arrived.sequence_id,
                arrival_number=message.arrived.arrival_number,
                candidate_sequence_ids=tuple(message.arrived.candidate_sequence_ids),
            )
        case "admitted" | "swapped_in" as kind:
            tables = tuple(
                ops.Table(
                    t.sequence_id,
                    unpack(t.block_ids, I32).tolist(),
                    t.table_version,
                    t.num_computed_tokens,
                )
                for t in getattr(message, kind).tables
            )
            return ops.OpResult(status, message.message, tables=tables)
        case "forked":
            forked = message.forked
            table = ops.Table(0, unpack(forked.block_ids, I32).tolist(), forked.table_version)
            return ops.OpResult(
                status,
                message.message,
                tables=(table,),
                child_sequence_ids=tuple(forked.child_sequence_ids),
            )
        case "reserved":
            failed = unpack(message.reserved.failed_groups, I32).tolist()
            over_quota = unpack(message.reserved.quota_groups, I32).tolist()
            return ops.OpResult(
                status,
                message.message,
                failed_groups=tuple(failed),
                quota_groups=tuple(over_quota),
            )
    return ops.OpResult(status, message.message)


# ---- the worker ----


def step_message(
    step: ops.Step, fence: types_pb2.Fence, traceparent: str = ""
) -> worker_pb2.ExecuteRequest:
    message = worker_pb2.ExecuteRequest(
        fence=fence,
        step_id=step.step_id,
        traceparent=traceparent,
        starts=[_start_message(start) for start in step.starts],
        dropped_sequence_ids=pack(step.dropped_sequence_ids, U64),
        sequence_ids=pack(step.sequence_ids, U64),
        table_versions=pack(step.table_versions, U32),
        num_input_tokens=pack(step.num_input_tokens, I32),
        num_computed_tokens=pack(step.num_computed_tokens, I32),
        input_token_ids=pack(step.input_token_ids, I32),
        num_samples=pack(step.num_samples, I32),
    )
    for copies, to in (
        (step.swap_ins, message.swap_ins),
        (ops.BlockCopies(step.copy_src, step.copy_dst), message.copies),
        (step.swap_outs, message.swap_outs),
    ):
        if copies:
            to.src_block_ids = pack(copies.src, I32)
            to.dst_block_ids = pack(copies.dst, I32)
    if len(step.deltas.sequence_ids):
        message.deltas.sequence_ids = pack(step.deltas.sequence_ids, U64)
        message.deltas.table_indices = pack(step.deltas.table_indices, I32)
        message.deltas.block_ids = pack(step.deltas.block_ids, I32)
        message.deltas.table_versions = pack(step.deltas.table_versions, U32)
    return message


def _start_message(start: ops.SequenceStart) -> worker_pb2.SequenceStart:
    params = start.params
    return worker_pb2.SequenceStart(
        sequence_id=start.sequence_id,
        block_ids=pack(start.block_ids, I32),
        table_version=start.table_version,
        sampling=worker_pb2.WorkerSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            sample_index=start.sample_index,
            masked_token_ids=start.masked_token_ids,
            masked_before_position=start.masked_before_position,
        ),
        traceparent=start.traceparent,
        request_id=start.request_id,
    )


def step_result_of(message: worker_pb2.ExecuteReply) -> ops.StepResult:
    timings = message.timings
    return ops.StepResult(
        message.step_id,
        unpack(message.sampled_token_ids, I32, "sampled_token_ids"),
        unpack(message.logprobs, F32, "logprobs").astype(np.float32, copy=False),
        ops.StepTimings(timings.idle_us, timings.prepare_us, timings.forward_us, timings.sample_us),
    )


# ---- the public service ----


def write_delta(message: inference_pb2.CandidateDelta, delta: events.CandidateDelta) -> None:
    """Fill an empty `message`. In place, and without what has not to be said, since this is done
    for every token: a third of what a constructor with keywords takes."""
    message.text = delta.text
    message.token_ids.extend(delta.token_ids)
    message.cumulative_logprob = delta.cumulative_logprob
    message.token_offset = delta.token_offset
    if delta.candidate:
        message.index = delta.candidate
    if delta.finish_reason is not None:
        message.finish_reason = int(delta.finish_reason)  # type: ignore[assignment]
        if isinstance(delta.matched_stop, str):
            message.stop_string = delta.matched_stop
        elif delta.matched_stop is not None:
            message.stop_token_id = delta.matched_stop
