"""Copies that are to be made, and who still needs them."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core import ops
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.planner import Row, StepPlan
from scheduler_svc.core.sequence import GroupStatus, Request, Sequence, SequenceGroup
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.core.worker_mirror import WorkerMirror
from simulator.worker import EOS, Letters


def running(mirror: WorkerMirror, sequence_id: int, block_table: list[int]) -> Sequence:
    request = Request(f"r{sequence_id}", (1, 2, 3, 4, 5), SamplingParams(max_tokens=4))
    group = SequenceGroup(request, 0.0, GroupStatus.RUNNING)
    sequence = Sequence(sequence_id, 0, group, StopChecker(request.params, (EOS,), Letters()))
    sequence.block_table = block_table
    sequence.num_computed_tokens = 4
    group.sequences.append(sequence)
    mirror.sequences[sequence_id] = sequence
    return sequence


def reserved(sequence_id: int, index: int, src: int, dst: int) -> ops.BatchResult:
    """A batch in which one sequence got a copy of `src` in place of it."""
    deltas = ops.TableDeltas(
        np.array([sequence_id], np.uint64),
        np.array([index], np.int32),
        np.array([dst], np.int32),
        np.array([2], np.uint32),
    )
    sources, destinations = np.array([src], np.int32), np.array([dst], np.int32)
    return ops.BatchResult(1, (), deltas, sources, destinations, ops.PoolLevels())


def test_a_copy_is_forgotten_with_a_step_that_counts_as_done() -> None:
    """Its block comes free by that, and may be the next one's destination: as it is here."""
    for owner_is_known in (True, False):
        mirror = WorkerMirror()
        former = running(mirror, 1, [0, 1])
        if owner_is_known:
            mirror.take_deltas(reserved(1, 1, src=1, dst=6))
        else:
            former.block_table = [0, 6]
            mirror.take_pending_copies((ops.PendingCopy(1, 1, 6),))
        former.forget_blocks()
        former.group.move_to(GroupStatus.WAITING)
        _, rows = mirror.build_step(33, StepPlan([]), (EOS,))
        assert not rows
        assert not mirror.forget_copies()

        former.group.move_to(GroupStatus.RUNNING)
        former.block_table = [0, 6]
        other = running(mirror, 2, [0, 2])
        mirror.take_deltas(reserved(2, 1, src=2, dst=6))
        step, _ = mirror.build_step(34, StepPlan([Row(other, 4, 1, 1)]), (EOS,))
        assert (step.copy_src.tolist(), step.copy_dst.tolist()) == ([2], [6])


def test_a_copy_that_others_need_is_left() -> None:
    mirror = WorkerMirror()
    running(mirror, 1, [0, 6])
    mirror.take_pending_copies((ops.PendingCopy(1, 1, 6),))
    mirror.build_step(33, StepPlan([]), (EOS,))
    assert mirror.forget_copies()
