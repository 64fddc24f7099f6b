"""Between the wire's messages and the core's. The only module that knows both in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import google_crc32c
import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.errors import InvalidBatch
from kvmem_svc.core.memory import PoolStats
from kvmem_svc.core.mutations import PendingCopy, PendingSwap, Pin, PoolConfirmed, Reply
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.session import SessionLedger
from kvmem_svc.core.views import AdoptedRequest, AdoptedSequence, SequenceSummary, SequenceView
from octavo.service.columns import I32, U64, ColumnError, pack, unpack
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2

DIGEST_BYTES = 16
# The content of a batch up to this size is its own digest: what is kept of the last few batches
# is small, and a batch sent again is rare, so hashing every one costs more than it is good for.
MAX_VERBATIM_BYTES = 64 * 1024

# --- wire to core ----------------------------------------------------------------------


def fence_from_pb(fence: types_pb2.Fence) -> b.Fence:
    return b.Fence(fence.session_id, fence.epoch, fence.kvmem_boot_id, fence.worker_boot_id)


def geometry_from_pb(geometry: types_pb2.PoolGeometry) -> b.PoolGeometry:
    return b.PoolGeometry(
        geometry.num_blocks,
        geometry.block_size,
        geometry.max_model_len,
        geometry.kv_bytes_per_block,
        geometry.kv_dtype,
        geometry.num_host_blocks,
    )


def batch_from_pb(batch: pb.Batch) -> b.Batch:
    """Raises InvalidBatch for an empty op, an unknown one or a broken column."""
    encoded = batch.step.SerializeToString(deterministic=True)
    return _batch(fence_from_pb(batch.fence), batch.batch_seq, batch.step, encoded)


def batch_from_encoded(fence: b.Fence, batch_seq: int, encoded: bytes) -> b.Batch:
    """The batch whose `encoded` was kept. Raises InvalidBatch, and DecodeError for other bytes."""
    return _batch(fence, batch_seq, pb.StepOps.FromString(encoded), encoded)


def _batch(fence: b.Fence, batch_seq: int, step: pb.StepOps, encoded: bytes) -> b.Batch:
    try:
        ops = [_op_from_pb(op) for op in step.ops]
    except ColumnError as error:
        raise InvalidBatch(str(error)) from error
    digest = encoded
    if len(encoded) > MAX_VERBATIM_BYTES:
        digest = blake2b(encoded, digest_size=DIGEST_BYTES).digest()
    return b.Batch(fence, batch_seq, step.step_id, step.acknowledged_step, ops, digest, encoded)


def prefix_from_pb(request: pb.MatchPrefixRequest | pb.PinRequest) -> tuple[Domain, b.Column]:
    """Whose prefix, and its tokens. Raises InvalidBatch for a broken column."""
    try:
        tokens = unpack(request.token_ids, I32, "token_ids")
    except ColumnError as error:
        raise InvalidBatch(str(error)) from error
    return Domain(request.tenant, request.cache_salt), tokens


def pin_from_pb(request: pb.PinRequest) -> Pin:
    """Raises InvalidBatch for a broken column."""
    domain, tokens = prefix_from_pb(request)
    return Pin(domain, tokens, request.ttl_ms, request.is_public)


def _op_from_pb(op: pb.Op) -> b.Op:
    kind = op.WhichOneof("op")
    if kind is None:
        raise InvalidBatch("an op is empty or of a kind unknown here")
    return _OP_FROM_PB[kind](getattr(op, kind))


def _arrive(op: pb.Arrive) -> b.Arrive:
    return b.Arrive(
        op.request_id,
        np.array(op.prompt_token_ids, np.int32),
        op.num_candidates,
        op.tenant,
        op.request_spec,
        op.request_digest,
        [
            b.ArrivingCandidate(
                one.candidate,
                unpack(one.output_token_ids, I32, "arrive.candidates.output_token_ids"),
                one.finish_reason,
                one.scheduler_state,
            )
            for one in op.candidates
        ],
        op.cache_salt,
    )


def _admit(op: pb.Admit) -> b.Admit:
    return b.Admit(
        [
            b.AdmitMember(
                m.sequence_id,
                m.num_slots,
                m.share_from,
                m.num_shared_blocks,
                m.use_prefix_cache,
            )
            for m in op.members
        ]
    )


def _commit(op: pb.Commit) -> b.Commit:
    return b.Commit(
        unpack(op.sequence_ids, U64, "commit.sequence_ids"),
        unpack(op.token_ids, I32, "commit.token_ids"),
        unpack(op.num_computed_tokens, I32, "commit.num_computed_tokens"),
        unpack(op.num_tokens, I32, "commit.num_tokens"),
        [(s.sequence_id, s.scheduler_state) for s in op.states],
        unpack(op.state_words, U64, "commit.state_words"),
    )


def _reserve(op: pb.Reserve) -> b.Reserve:
    return b.Reserve(
        unpack(op.sequence_ids, U64, "reserve.sequence_ids"),
        unpack(op.num_slots, I32, "reserve.num_slots"),
        unpack(op.group_sizes, I32, "reserve.group_sizes"),
    )


def _append(op: pb.Append) -> b.Append:
    return b.Append(op.sequence_id, np.array(op.token_ids, np.int32))


def _fork(op: pb.Fork) -> b.Fork:
    return b.Fork(
        op.sequence_id,
        op.num_children,
        np.array(op.token_ids, np.int32),
        unpack(op.state_words, U64, "fork.state_words"),
    )


_OP_FROM_PB: Mapping[str, Callable[[Any], b.Op]] = {
    "arrive": _arrive,
    "admit": _admit,
    "commit": _commit,
    "reserve": _reserve,
    "append": _append,
    "fork": _fork,
    "preempt": lambda op: b.Preempt(list(op.sequence_ids)),
    "swap_out": lambda op: b.SwapOut(list(op.sequence_ids)),
    "swap_in": lambda op: b.SwapIn(
        [b.SwapInMember(m.sequence_id, m.num_slots) for m in op.members]
    ),
    "free": lambda op: b.Free(list(op.sequence_ids), op.finish_reason),
    "confirm": lambda op: b.Confirm(op.request_id),
}

# --- core to wire ----------------------------------------------------------------------


def fence_to_pb(fence: b.Fence) -> types_pb2.Fence:
    return types_pb2.Fence(
        session_id=fence.session_id,
        epoch=fence.epoch,
        kvmem_boot_id=fence.kvmem_boot_id,
        worker_boot_id=fence.worker_boot_id,
    )


def geometry_to_pb(geometry: b.PoolGeometry) -> types_pb2.PoolGeometry:
    return types_pb2.PoolGeometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        max_model_len=geometry.max_model_len,
        kv_bytes_per_block=geometry.kv_bytes_per_block,
        kv_dtype=geometry.kv_dtype,
        num_host_blocks=geometry.num_host_blocks,
    )


def levels_to_pb(levels: b.PoolLevels) -> types_pb2.PoolLevels:
    return types_pb2.PoolLevels(
        num_free_blocks=levels.num_free_blocks,
        num_cached_blocks=levels.num_cached_blocks,
        num_in_use_blocks=levels.num_in_use_blocks,
        num_quarantined_blocks=levels.num_quarantined_blocks,
        num_reserved_blocks=levels.num_reserved_blocks,
        num_free_sequences=levels.num_free_sequences,
        num_free_host_blocks=levels.num_free_host_blocks,
    )


def result_to_pb(result: b.BatchResult) -> pb.BatchResult:
    message = pb.BatchResult(
        batch_seq=result.batch_seq,
        # Most ops of a step have nothing to say.
        results=[_OK if one is b.OK else _op_result_to_pb(one) for one in result.results],
        levels=levels_to_pb(result.levels),
    )
    deltas = result.deltas
    if deltas.sequence_ids.size:
        message.deltas.sequence_ids = deltas.sequence_ids.tobytes()
        message.deltas.table_indices = deltas.table_indices.tobytes()
        message.deltas.block_ids = deltas.block_ids.tobytes()
        message.deltas.table_versions = deltas.table_versions.tobytes()
    for name in ("copies", "swap_ins", "swap_outs"):
        copies: b.BlockCopies = getattr(result, name)
        if copies.src_block_ids.size:
            to: types_pb2.BlockCopies = getattr(message, name)
            to.src_block_ids = copies.src_block_ids.tobytes()
            to.dst_block_ids = copies.dst_block_ids.tobytes()
    return message


def reply_digest(reply: Reply) -> int:
    """CRC32C of a reply: a replay that leads to another one has diverged."""
    if isinstance(reply, b.BatchResult):
        return encoded_digest(result_to_pb(reply))
    return google_crc32c.value(repr(reply).encode())


def encoded_digest(result: pb.BatchResult) -> int:
    """CRC32C of a BatchResult as it is sent."""
    return google_crc32c.value(result.SerializeToString(deterministic=True))


def _op_result_to_pb(result: b.OpResult) -> pb.OpResult:
    message = pb.OpResult(status=pb.OpStatus.Name(result.status), message=result.message)
    match result.value:
        case None:
            pass
        case b.Arrived(sequence_id, arrival_number, candidate_sequence_ids):
            message.arrived.sequence_id = sequence_id
            message.arrived.arrival_number = arrival_number
            message.arrived.candidate_sequence_ids.extend(candidate_sequence_ids)
        case b.Admitted(tables):
            message.admitted.SetInParent()
            message.admitted.tables.extend(map(_table_to_pb, tables))
        case b.SwappedIn(tables):
            message.swapped_in.SetInParent()
            message.swapped_in.tables.extend(map(_table_to_pb, tables))
        case b.Forked(child_sequence_ids, block_ids, table_version):
            message.forked.child_sequence_ids.extend(child_sequence_ids)
            message.forked.block_ids = block_ids.tobytes()
            message.forked.table_version = table_version
        case b.Reserved(failed_groups, quota_groups):
            message.reserved.failed_groups = failed_groups.tobytes()
            message.reserved.quota_groups = quota_groups.tobytes()
    return message


def _table_to_pb(table: b.BlockTable) -> pb.SequenceTable:
    return pb.SequenceTable(
        sequence_id=table.sequence_id,
        block_ids=table.block_ids.tobytes(),
        table_version=table.table_version,
        num_computed_tokens=table.num_computed_tokens,
    )


_OK = _op_result_to_pb(b.OK)


def pool_confirmed_to_pb(
    confirmed: PoolConfirmed, fence: b.Fence, levels: b.PoolLevels
) -> pb.AttachPoolReply:
    copies = confirmed.pending_copies
    return pb.AttachPoolReply(
        fence=fence_to_pb(fence),
        levels=levels_to_pb(levels),
        is_new_pool=confirmed.is_new_pool,
        pending_copies=_pairs_to_pb(copies),
        pending_copy_sequence_ids=pack([one.sequence_id for one in copies], U64),
        pending_swap_ins=_pairs_to_pb(confirmed.pending_swap_ins),
        pending_swap_outs=_pairs_to_pb(confirmed.pending_swap_outs),
    )


def _pairs_to_pb(pairs: Sequence[PendingCopy | PendingSwap]) -> types_pb2.BlockCopies:
    return types_pb2.BlockCopies(
        src_block_ids=pack([one.src_block_id for one in pairs], I32),
        dst_block_ids=pack([one.dst_block_id for one in pairs], I32),
    )


def adopted_to_pb(request: AdoptedRequest) -> pb.AdoptedRequest:
    return pb.AdoptedRequest(
        request_id=request.request_id,
        arrival_number=request.arrival_number,
        num_candidates=request.num_candidates,
        prompt_token_ids=pack(request.prompt_token_ids, I32),
        tenant=request.tenant,
        request_spec=request.request_spec,
        request_digest=request.request_digest,
        cache_salt=request.cache_salt,
        sequences=map(_adopted_sequence_to_pb, request.sequences),
    )


def _adopted_sequence_to_pb(sequence: AdoptedSequence) -> pb.AdoptedSequence:
    return pb.AdoptedSequence(
        sequence_id=sequence.sequence_id,
        candidate=sequence.candidate,
        status=pb.SequenceStatus.Name(sequence.status),
        output_token_ids=pack(sequence.output_token_ids, I32),
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=pack(sequence.block_ids, I32),
        table_version=sequence.table_version,
        finish_reason=types_pb2.FinishReason.Name(sequence.finish_reason),
        scheduler_state=sequence.scheduler_state,
    )


def view_to_pb(view: SequenceView) -> pb.SequenceView:
    return pb.SequenceView(
        sequence_id=view.sequence_id,
        request_id=view.request_id,
        candidate=view.candidate,
        status=pb.SequenceStatus.Name(view.status),
        num_tokens=view.num_tokens,
        num_computed_tokens=view.num_computed_tokens,
        num_prompt_tokens=view.num_prompt_tokens,
        table_version=view.table_version,
        block_ids=view.block_ids.tolist(),
        ref_counts=view.ref_counts.tolist(),
        finish_reason=types_pb2.FinishReason.Name(view.finish_reason),
    )


def summary_to_pb(summary: SequenceSummary) -> pb.SequenceSummary:
    return pb.SequenceSummary(
        sequence_id=summary.sequence_id,
        request_id=summary.request_id,
        arrival_number=summary.arrival_number,
        candidate=summary.candidate,
        tenant=summary.tenant,
        status=pb.SequenceStatus.Name(summary.status),
        num_prompt_tokens=summary.num_prompt_tokens,
        num_tokens=summary.num_tokens,
        num_computed_tokens=summary.num_computed_tokens,
        num_blocks=summary.num_blocks,
        num_shared_blocks=summary.num_shared_blocks,
        num_host_blocks=summary.num_host_blocks,
        finish_reason=types_pb2.FinishReason.Name(summary.finish_reason),
    )


def stats_to_pb(stats: PoolStats, ledger: SessionLedger) -> pb.PoolStats:
    session = ledger.session
    return pb.PoolStats(
        geometry=geometry_to_pb(stats.geometry) if stats.geometry else None,
        levels=levels_to_pb(stats.levels),
        num_requests=stats.num_requests,
        num_sequences=stats.num_sequences,
        num_shared_blocks=stats.num_shared_blocks,
        peak_in_use_blocks=stats.peak_in_use_blocks,
        num_allocations=stats.num_allocations,
        num_copies_on_write=stats.num_copies_on_write,
        num_preemptions=stats.num_preemptions,
        num_batches=stats.num_batches,
        kvmem_boot_id=ledger.kvmem_boot_id,
        worker_boot_id=ledger.worker_boot_id,
        holder=session.holder if session is not None else "",
        holder_address=session.holder_address if session is not None else "",
        epoch=ledger.epoch,
        num_finished_sequences=stats.num_finished_sequences,
        num_expired_requests=stats.num_expired_requests,
        num_pending_copies=stats.num_pending_copies,
        num_prefix_lookups=stats.num_prefix_lookups,
        num_prefix_hits=stats.num_prefix_hits,
        num_prefix_lookup_tokens=stats.num_prefix_lookup_tokens,
        num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
        num_published=stats.num_published,
        num_evictions=stats.num_evictions,
        num_pins=stats.num_pins,
        num_tenants=stats.num_tenants,
        num_swapped_out_blocks=stats.num_swapped_out_blocks,
        num_swapped_in_blocks=stats.num_swapped_in_blocks,
    )
