"""Marks that a scheduler's shell can see: in aborts, in results of batches, and in steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler_svc.core import events, ops
from scheduler_svc.core.sequence import GroupStatus, SequenceGroup
from simulator.marks import Marks


def count_reentered(
    marks: Marks, groups: Mapping[str, SequenceGroup], connected: events.Connected
) -> None:
    """`groups`: what the scheduler had before it was connected again."""
    known = {record.request.request_id for record in connected.adopted}
    begun = {name for name, group in groups.items() if group.sequences}
    marks.hit("re-entered by its scheduler", len(begun - known))


def count_retained(marks: Marks, first: ops.Batch | None) -> None:
    """`first`: what a session begins with. It has executed nothing itself yet."""
    if first is not None and any(isinstance(op, ops.Commit | ops.Fork) for op in first.ops):
        marks.hit("retained result used")


def count_abort(marks: Marks, group: SequenceGroup, steps: Iterable[ops.Step]) -> None:
    """`steps`: those at the worker."""
    if group.status is GroupStatus.ARRIVING:
        marks.hit("aborted before arrival")
    elif group.status is GroupStatus.WAITING:
        marks.hit("aborted while waiting")
    in_step = {sequence_id for step in steps for sequence_id in step.sequence_ids.tolist()}
    if any(sequence.sequence_id in in_step for sequence in group.live):
        marks.hit("aborted in flight")
    if len(group.live) > 1:
        marks.hit("aborted a group")


def count_batch(marks: Marks, batch: ops.Batch, result: ops.BatchResult) -> bool:
    """Counts what the batch's result shows; whether a reserve got no blocks."""
    starved = False
    for op, one in zip(batch.ops, result.results, strict=True):
        ok = one.status is ops.OpStatus.OK
        match op:
            case ops.Preempt():
                marks.hit("preempted", ok)
            case ops.SwapOut():
                marks.hit("swapped out", ok)
            case ops.SwapIn():
                marks.hit("swapped in", ok)
            case ops.Fork():
                marks.hit("forked", ok)
            case ops.Admit(members):
                marks.hit("admission refused", not ok)
                if ok and members[-1].num_shared_blocks:
                    marks.hit("group resumed with shared prefix")
            case ops.Reserve():
                starved = not ok
    return starved


def moments_of(batch: ops.Batch, result: ops.BatchResult) -> list[str]:
    """What a batch that was carried out may be called in a fault's `after`."""
    moments = []
    if result.copy_src.size:
        moments.append("batch with copies")
    if result.swap_outs or result.swap_ins:
        moments.append("batch with swaps")
    for op, one in zip(batch.ops, result.results, strict=True):
        if one.status is ops.OpStatus.OK:
            if isinstance(op, ops.Fork):
                moments.append("fork")
            elif isinstance(op, ops.Admit) and op.members[-1].num_shared_blocks:
                moments.append("shared admission")
    return moments


def count_step(marks: Marks, step: ops.Step, groups: Iterable[SequenceGroup]) -> None:
    if not step.num_samples.all():
        marks.hit("chunked prefill")
    in_step = set(step.sequence_ids.tolist())
    for group in groups:
        for sequence in group.live:
            source = sequence.prefix_source
            if (
                source is not None
                and sequence.sequence_id not in in_step
                and source.sequence_id in in_step
                and source.num_computed_tokens < sequence.prefix_source_tokens
            ):
                marks.hit("waited for a shared prefix")
