"""Batches and steps in a few words, for the history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsInt

from scheduler_svc.core import ops


def ids(sequence_ids: Iterable[SupportsInt]) -> str:
    return ",".join(name(int(i)) for i in sequence_ids)


def name(sequence_id: int) -> str:
    """A sequence id as row.generation: short, and still unique."""
    return f"s{sequence_id & 0xFFFFFFFF}.{sequence_id >> 32}"


def op_in_words(op: ops.Op) -> str:
    words = type(op).__name__.lower()
    match op:
        case ops.Arrive(request):
            words += f" {request.request_id}"
        case ops.Admit(members):
            words += f" {ids(m.sequence_id for m in members)}{_sharing(members[-1])}"
        case ops.Commit():
            words += f" {ids(op.sequence_ids)} tokens {op.token_ids.tolist()}"
        case ops.Reserve():
            words += f" {ids(op.sequence_ids)} slots {op.num_slots.tolist()}"
        case ops.Fork(sequence_id, token_ids):
            words += f" {name(sequence_id)} tokens {list(token_ids)}"
        case ops.Preempt(sequence_ids) | ops.SwapOut(sequence_ids):
            words += f" {ids(sequence_ids)}"
        case ops.SwapIn(members):
            words += f" {ids(m.sequence_id for m in members)}"
        case ops.Free(sequence_ids, reason):
            words += f" {ids(sequence_ids)} ({reason.name})"
        case ops.Confirm(request_id):
            words += f" {request_id}"
    return words


def _sharing(member: ops.AdmitMember) -> str:
    return f" sharing {member.num_shared_blocks} blocks" if member.share_from else ""


def batch_in_words(batch: ops.Batch) -> str:
    what = "; ".join(map(op_in_words, batch.ops)) or "nothing"
    step = f"for step {batch.step_id}, {batch.acknowledged_step} acknowledged"
    return f"batch {batch.batch_seq} {step}: {what}"


def result_in_words(batch: ops.Batch, result: ops.BatchResult) -> str:
    words = []
    for op, one in zip(batch.ops, result.results, strict=True):
        if one.status is not ops.OpStatus.OK:
            words.append(f"{type(op).__name__}: {one.status.name} {one.message}")
        if one.sequence_id:
            words.append(name(one.sequence_id))
        if one.child_sequence_ids:
            words.append(f"children {ids(one.child_sequence_ids)}")
        else:
            words.extend(f"{name(t.sequence_id)} has {t.block_ids}" for t in one.tables)
    deltas = result.deltas
    words.extend(
        f"{name(i)}[{at}]={block}"
        for i, at, block in zip(
            deltas.sequence_ids.tolist(),
            deltas.table_indices.tolist(),
            deltas.block_ids.tolist(),
            strict=True,
        )
    )
    words.extend(
        f"copy {src}->{dst}"
        for src, dst in zip(result.copy_src.tolist(), result.copy_dst.tolist(), strict=True)
    )
    words.extend(_moves("swap in", result.swap_ins))
    words.extend(_moves("swap out", result.swap_outs))
    levels = result.levels
    words.append(f"{levels.num_free_blocks} free, {levels.num_quarantined_blocks} in quarantine")
    return "; ".join(words)


def _moves(what: str, moves: ops.BlockCopies) -> list[str]:
    pairs = zip(moves.src.tolist(), moves.dst.tolist(), strict=True)
    return [f"{what} {src}->{dst}" for src, dst in pairs]


def step_in_words(step: ops.Step) -> str:
    rows = ", ".join(
        f"{name(i)} {computed}+{count}" + (f" draws {samples}" if samples != 1 else "")
        for i, computed, count, samples in zip(
            step.sequence_ids.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_input_tokens.tolist(),
            step.num_samples.tolist(),
            strict=True,
        )
    )
    copies = [
        f"{src}->{dst}"
        for src, dst in zip(step.copy_src.tolist(), step.copy_dst.tolist(), strict=True)
    ]
    swaps = [*_moves("swap in", step.swap_ins), *_moves("swap out", step.swap_outs)]
    moved = (f"; copies {copies}" if copies else "") + "".join(f"; {swap}" for swap in swaps)
    return f"begins step {step.step_id}: {rows}{moved}"
