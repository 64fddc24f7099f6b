"""The memory core as the scheduler's core sees it, without a wire between them.

For the one-process stack of the serving benchmark, and for tests that drive the scheduler
against the real memory core.
"""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as kv
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.mutations import PendingSwap, PoolConfirmed
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.views import AdoptedRequest
from scheduler_svc.core import ops
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason


def to_kvmem_op(op: ops.Op) -> kv.Op:
    """The scheduler's op as the memory core's."""
    match op:
        case ops.Commit():
            return kv.Commit(
                op.sequence_ids,
                op.token_ids,
                op.num_computed_tokens,
                op.num_tokens,
                state_words=op.state_words,
            )
        case ops.Reserve():
            return kv.Reserve(op.sequence_ids, op.num_slots, op.group_sizes)
        case ops.Arrive(request, candidates):
            return _arrive(request, candidates)
        case ops.Admit(members):
            return kv.Admit(
                [
                    kv.AdmitMember(
                        m.sequence_id,
                        m.num_slots,
                        m.share_from,
                        m.num_shared_blocks,
                        m.use_prefix_cache,
                    )
                    for m in members
                ]
            )
        case ops.Fork(sequence_id, token_ids, words):
            return kv.Fork(
                sequence_id,
                len(token_ids) - 1,
                np.array(token_ids, np.int32),
                np.array(words, np.uint64),
            )
        case ops.Free(sequence_ids, reason):
            return kv.Free(sequence_ids, kv.FinishReason(reason))
        case ops.Confirm(request_id):
            return kv.Confirm(request_id)
        case ops.Preempt() | ops.SwapOut() | ops.SwapIn():
            return _preemption_op(op)


def _preemption_op(op: ops.Preempt | ops.SwapOut | ops.SwapIn) -> kv.Op:
    match op:
        case ops.Preempt(sequence_ids):
            return kv.Preempt(sequence_ids)
        case ops.SwapOut(sequence_ids):
            return kv.SwapOut(sequence_ids)
        case ops.SwapIn(members):
            return kv.SwapIn([kv.SwapInMember(m.sequence_id, m.num_slots) for m in members])


def _arrive(request: Request, candidates: tuple[ops.ArrivingCandidate, ...]) -> kv.Arrive:
    return kv.Arrive(
        request.request_id,
        np.array(request.prompt_token_ids, np.int32),
        request.params.n,
        request.tenant,
        request.spec,
        request.digest,
        [_arriving_candidate(candidate) for candidate in candidates],
        request.cache_salt,
    )


def _arriving_candidate(candidate: ops.ArrivingCandidate) -> kv.ArrivingCandidate:
    return kv.ArrivingCandidate(
        candidate.candidate,
        np.array(candidate.output_token_ids, np.int32),
        kv.FinishReason(candidate.finish_reason or 0),
        candidate.state_word.to_bytes(8, "little"),
    )


def _op_result(result: kv.OpResult) -> ops.OpResult:
    status, message = ops.OpStatus(result.status), result.message
    match result.value:
        case kv.Arrived() as arrived:
            return ops.OpResult(
                status,
                message,
                sequence_id=arrived.sequence_id,
                arrival_number=arrived.arrival_number,
                candidate_sequence_ids=tuple(arrived.candidate_sequence_ids),
            )
        case kv.Admitted(tables) | kv.SwappedIn(tables):
            return ops.OpResult(
                status,
                message,
                tables=tuple(
                    ops.Table(
                        t.sequence_id,
                        t.block_ids.tolist(),
                        t.table_version,
                        t.num_computed_tokens,
                    )
                    for t in tables
                ),
            )
        case kv.Forked() as forked:
            table = ops.Table(0, forked.block_ids.tolist(), forked.table_version)
            return ops.OpResult(
                status,
                message,
                tables=(table,),
                child_sequence_ids=tuple(forked.child_sequence_ids),
            )
        case kv.Reserved(failed_groups, quota_groups):
            return ops.OpResult(
                status,
                message,
                failed_groups=tuple(failed_groups.tolist()),
                quota_groups=tuple(quota_groups.tolist()),
            )
    return ops.OpResult(status, message)


def levels_of(levels: kv.PoolLevels) -> ops.PoolLevels:
    return ops.PoolLevels(
        levels.num_free_blocks + levels.num_cached_blocks,
        levels.num_quarantined_blocks,
        levels.num_free_sequences,
        levels.num_free_host_blocks,
    )


def pending_copies_of(confirmed: PoolConfirmed) -> tuple[ops.PendingCopy, ...]:
    return tuple(
        ops.PendingCopy(copy.sequence_id, copy.src_block_id, copy.dst_block_id)
        for copy in confirmed.pending_copies
    )


def pending_swaps_of(confirmed: PoolConfirmed) -> tuple[ops.BlockCopies, ops.BlockCopies]:
    """Swap-ins and swap-outs that nobody made."""

    def columns(swaps: tuple[PendingSwap, ...]) -> ops.BlockCopies:
        pairs = np.array([(s.src_block_id, s.dst_block_id) for s in swaps], np.int32)
        pairs = pairs.reshape(-1, 2)
        return ops.BlockCopies(pairs[:, 0], pairs[:, 1])

    return columns(confirmed.pending_swap_ins), columns(confirmed.pending_swap_outs)


def _copies_of(copies: kv.BlockCopies) -> ops.BlockCopies:
    return ops.BlockCopies(
        copies.src_block_ids.astype(np.int32, copy=False),
        copies.dst_block_ids.astype(np.int32, copy=False),
    )


def adopted_of(record: AdoptedRequest, request: Request) -> ops.AdoptedRequest:
    """A record as the scheduler adopts it; `request` is what its spec stands for."""
    return ops.AdoptedRequest(
        request,
        record.arrival_number,
        tuple(
            ops.AdoptedSequence(
                sequence.sequence_id,
                sequence.candidate,
                running=sequence.status is Status.RUNNING,
                finish_reason=FinishReason(reason) if (reason := sequence.finish_reason) else None,
                pruned=sequence.status is Status.FINISHED and not sequence.finish_reason,
                output_token_ids=tuple(sequence.output_token_ids.tolist()),
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=tuple(sequence.block_ids.tolist()),
                table_version=sequence.table_version,
                state_word=int.from_bytes(sequence.scheduler_state[:8], "little"),
                swapped=sequence.status is Status.SWAPPED,
            )
            for sequence in record.sequences
        ),
    )


def apply_batch(
    gatekeeper: Gatekeeper, batch: ops.Batch, fence: kv.Fence, now_ms: int
) -> ops.BatchResult:
    """Carry a scheduler's batch out on a memory core."""
    result = gatekeeper.apply(
        kv.Batch(
            fence,
            batch.batch_seq,
            batch.step_id,
            batch.acknowledged_step,
            [to_kvmem_op(op) for op in batch.ops],
            digest=batch.batch_seq.to_bytes(8, "little"),
        ),
        now_ms,
    )
    return ops.BatchResult(
        result.batch_seq,
        tuple(map(_op_result, result.results)),
        ops.TableDeltas(
            result.deltas.sequence_ids.astype(np.uint64, copy=False),
            result.deltas.table_indices.astype(np.int32, copy=False),
            result.deltas.block_ids.astype(np.int32, copy=False),
            result.deltas.table_versions.astype(np.uint32, copy=False),
        ),
        result.copies.src_block_ids.astype(np.int32, copy=False),
        result.copies.dst_block_ids.astype(np.int32, copy=False),
        levels_of(result.levels),
        _copies_of(result.swap_ins),
        _copies_of(result.swap_outs),
    )
