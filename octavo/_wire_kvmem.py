"""Replies of the KV memory service, read into `octavo.admin_types`. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from octavo import admin_types as types
from octavo._fold import FINISH_REASONS
from octavo._wire import read_geometry
from octavo.service.columns import I32, U64, unpack
from octavo.v1 import kvmem_pb2, types_pb2


def read_levels(reply: types_pb2.PoolLevels) -> types.PoolLevels:
    return types.PoolLevels(
        reply.num_free_blocks,
        reply.num_cached_blocks,
        reply.num_in_use_blocks,
        reply.num_quarantined_blocks,
        reply.num_reserved_blocks,
        reply.num_free_sequences,
        reply.num_free_host_blocks,
    )


def read_stats(reply: kvmem_pb2.PoolStats) -> types.PoolStats:
    return types.PoolStats(
        read_geometry(reply.geometry) if reply.HasField("geometry") else None,
        read_levels(reply.levels),
        reply.num_requests,
        reply.num_sequences,
        reply.num_shared_blocks,
        reply.peak_in_use_blocks,
        reply.num_allocations,
        reply.num_copies_on_write,
        reply.num_preemptions,
        reply.num_batches,
        reply.kvmem_boot_id,
        reply.worker_boot_id,
        _read_session(reply),
        _read_prefix_cache(reply),
        reply.num_finished_sequences,
        reply.num_expired_requests,
        reply.num_tenants,
        reply.num_swapped_out_blocks,
        reply.num_swapped_in_blocks,
        reply.last_step_id,
        reply.num_recorded_tokens,
    )


def _read_session(reply: kvmem_pb2.PoolStats) -> types.SessionStats:
    return types.SessionStats(
        reply.holder,
        reply.holder_address,
        reply.epoch,
        reply.mutations_open,
        reply.orphaned_ms,
        reply.journal_healthy,
    )


def _read_prefix_cache(reply: kvmem_pb2.PoolStats) -> types.PrefixCacheStats:
    return types.PrefixCacheStats(
        reply.prefix_cache_enabled,
        reply.num_prefix_lookups,
        reply.num_prefix_hits,
        reply.num_prefix_lookup_tokens,
        reply.num_prefix_hit_tokens,
        reply.num_published,
        reply.num_evictions,
        reply.num_pins,
    )


def read_page(reply: kvmem_pb2.ListSequencesReply) -> types.SequencePage:
    return types.SequencePage(tuple(map(_read_summary, reply.sequences)), reply.truncated)


def _read_summary(summary: kvmem_pb2.SequenceSummary) -> types.SequenceSummary:
    return types.SequenceSummary(
        summary.sequence_id,
        summary.request_id,
        summary.arrival_number,
        summary.candidate,
        summary.tenant,
        _read_status(summary.status),
        summary.num_prompt_tokens,
        summary.num_tokens,
        summary.num_computed_tokens,
        summary.num_blocks,
        summary.num_shared_blocks,
        summary.num_host_blocks,
        FINISH_REASONS.get(summary.finish_reason),
    )


def _read_status(status: kvmem_pb2.SequenceStatus) -> types.SequenceStatus:
    name = kvmem_pb2.SequenceStatus.Name(status).removeprefix("SEQUENCE_STATUS_")
    return types.SequenceStatus(name.lower())


def read_tables(reply: kvmem_pb2.GetBlockTablesReply) -> types.BlockTables:
    return types.BlockTables(tuple(map(_read_sequence, reply.sequences)), reply.truncated)


def _read_sequence(view: kvmem_pb2.SequenceView) -> types.SequenceView:
    return types.SequenceView(
        view.sequence_id,
        view.request_id,
        view.candidate,
        _read_status(view.status),
        view.num_tokens,
        view.num_computed_tokens,
        view.num_prompt_tokens,
        view.table_version,
        tuple(view.block_ids),
        tuple(view.ref_counts),
        FINISH_REASONS.get(view.finish_reason),
    )


def read_event(event: kvmem_pb2.WatchEvent) -> types.Event:
    if event.WhichOneof("event") == "snapshot":
        return read_tables(event.snapshot)
    return read_applied(event.applied)


def read_applied(applied: kvmem_pb2.AppliedBatch) -> types.AppliedBatch:
    result = applied.result
    return types.AppliedBatch(
        applied.batch_seq,
        applied.step.step_id,
        applied.step.acknowledged_step,
        tuple(
            _read_op(op, outcome)
            for op, outcome in zip(applied.step.ops, result.results, strict=True)
        ),
        _read_deltas(result.deltas),
        _read_copies(result.copies),
        read_levels(result.levels),
    )


def _read_deltas(deltas: types_pb2.TableDeltas) -> tuple[types.TableDelta, ...]:
    columns = zip(
        _uint64s(deltas.sequence_ids),
        _int32s(deltas.table_indices),
        _int32s(deltas.block_ids),
        strict=True,
    )
    return tuple(types.TableDelta(*row) for row in columns)


def _read_copies(copies: types_pb2.BlockCopies) -> tuple[types.BlockCopy, ...]:
    columns = zip(_int32s(copies.src_block_ids), _int32s(copies.dst_block_ids), strict=True)
    return tuple(types.BlockCopy(*row) for row in columns)


# ---------------------------------------------------------------- ops


def _read_op(op: kvmem_pb2.Op, result: kvmem_pb2.OpResult) -> types.AppliedOp:
    kind, made = op.WhichOneof("op"), result.WhichOneof("result")
    if kind is None:
        raise ValueError("an op of a kind this client does not know")
    status = kvmem_pb2.OpStatus.Name(result.status).removeprefix("OP_STATUS_")
    return types.AppliedOp(
        _OPS[kind](getattr(op, kind)),
        types.OpStatus(status.lower()),
        None if made is None else _OUTCOMES[made](getattr(result, made)),
    )


def _read_arrive(op: kvmem_pb2.Arrive) -> types.Arrive:
    return types.Arrive(
        op.request_id,
        tuple(op.prompt_token_ids),
        op.num_candidates,
        tuple(candidate.candidate for candidate in op.candidates),
    )


def _read_admit(op: kvmem_pb2.Admit) -> types.Admit:
    return types.Admit(
        tuple(
            types.AdmitMember(m.sequence_id, m.num_slots, m.share_from, m.num_shared_blocks)
            for m in op.members
        )
    )


def _read_commit(op: kvmem_pb2.Commit) -> types.Commit:
    sequence_ids = _uint64s(op.sequence_ids)
    num_tokens = _int32s(op.num_tokens) or [1] * len(sequence_ids)
    token_ids = _int32s(op.token_ids)
    ends = accumulate(num_tokens, initial=0)
    parts = [tuple(token_ids[start:end]) for start, end in pairwise(ends)]
    columns = zip(sequence_ids, parts, _int32s(op.num_computed_tokens), strict=True)
    return types.Commit(tuple(types.CommitRow(*row) for row in columns))


def _read_reserve(op: kvmem_pb2.Reserve) -> types.Reserve:
    members = list(zip(_uint64s(op.sequence_ids), _int32s(op.num_slots), strict=True))
    sizes = _int32s(op.group_sizes) or [1] * len(members)
    ends = accumulate(sizes, initial=0)
    return types.Reserve(tuple(tuple(members[start:end]) for start, end in pairwise(ends)))


_OPS: dict[str, Callable[[Any], types.Op]] = {
    "arrive": _read_arrive,
    "admit": _read_admit,
    "commit": _read_commit,
    "reserve": _read_reserve,
    "append": lambda op: types.Append(op.sequence_id, tuple(op.token_ids)),
    "fork": lambda op: types.Fork(op.sequence_id, op.num_children, tuple(op.token_ids)),
    "preempt": lambda op: types.Preempt(tuple(op.sequence_ids)),
    "free": lambda op: types.Free(tuple(op.sequence_ids), FINISH_REASONS.get(op.finish_reason)),
    "confirm": lambda op: types.Confirm(op.request_id),
    "swap_out": lambda op: types.SwapOut(tuple(op.sequence_ids)),
    "swap_in": lambda op: types.SwapIn(tuple(member.sequence_id for member in op.members)),
}


# ---------------------------------------------------------------- outcomes


def _read_whole_tables(
    result: kvmem_pb2.Admitted | kvmem_pb2.SwappedIn,
) -> tuple[types.SequenceTable, ...]:
    return tuple(
        types.SequenceTable(table.sequence_id, tuple(_int32s(table.block_ids)))
        for table in result.tables
    )


_OUTCOMES: dict[str, Callable[[Any], types.Outcome]] = {
    "arrived": lambda result: types.Arrived(
        result.sequence_id, result.arrival_number, tuple(result.candidate_sequence_ids)
    ),
    "admitted": lambda result: types.Admitted(_read_whole_tables(result)),
    "swapped_in": lambda result: types.SwappedIn(_read_whole_tables(result)),
    "forked": lambda result: types.Forked(
        tuple(result.child_sequence_ids), tuple(_int32s(result.block_ids))
    ),
    "reserved": lambda result: types.Reserved(tuple(_int32s(result.failed_groups))),
}


def _int32s(column: bytes) -> list[int]:
    return unpack(column, I32).tolist()


def _uint64s(column: bytes) -> list[int]:
    return unpack(column, U64).tolist()
