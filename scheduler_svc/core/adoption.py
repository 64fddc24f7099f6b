"""Rebuilding the view: from the memory service's records, or from what is left of one.

Nothing the scheduler knows must survive it. Text, stop conditions and positions follow from the
token ids; the one thing that does not, the sum of log-probabilities, is kept with each sequence as
its 8 bytes of scheduler_state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from scheduler_svc.core import events, ops
from scheduler_svc.core.decoding import DecodingStrategy
from scheduler_svc.core.planner import Row, StepPlan
from scheduler_svc.core.sequence import (
    ArrivingCandidate,
    GroupStatus,
    Request,
    Sequence,
    SequenceGroup,
)
from scheduler_svc.core.stopping import StopChecker

MakeChecker = Callable[[Request], StopChecker]


def state_words(cumulative_logprobs: SequenceOf[float]) -> ops.UInt64s:
    """The scheduler_state of each sequence: float64 bits as uint64."""
    return np.array(cumulative_logprobs, np.float64).view(np.uint64)


def _logprob_of(state_word: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", state_word))[0]


def _word_of(cumulative_logprob: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", cumulative_logprob))[0]


# ---- from the memory service's records ----


def rebuild_group(
    record: ops.AdoptedRequest, make_checker: MakeChecker, block_size: int, now_s: float
) -> tuple[SequenceGroup, list[Sequence]]:
    """The group of a record, and those of its sequences which have ended without the memory
    service having been told: their tokens say so, and their blocks are to be freed."""
    group = SequenceGroup(record.request, now_s, arrival_number=record.arrival_number)
    unfreed = []
    for adopted in record.sequences:
        if adopted.pruned:
            continue
        sequence = _rebuild_sequence(adopted, group, make_checker(record.request))
        group.sequences.append(sequence)
        if sequence.finished and not sequence.end_committed:
            unfreed.append(sequence)
    group.sequences.sort(key=lambda sequence: sequence.candidate)
    group.status = _status_of(record)
    find_prefix_sources(group.live, block_size)
    for sequence in group.live:
        sequence.num_writable_slots = _num_writable_slots(sequence, group.live, block_size)
    return group, unfreed


def _rebuild_sequence(
    adopted: ops.AdoptedSequence, group: SequenceGroup, checker: StopChecker
) -> Sequence:
    sequence = Sequence(adopted.sequence_id, adopted.candidate, group, checker)
    _replay(sequence, adopted.output_token_ids, _logprob_of(adopted.state_word))
    if adopted.finish_reason is not None:
        if not sequence.finished:
            sequence.end(adopted.finish_reason)
        sequence.end_committed = True
    sequence.num_computed_tokens = adopted.num_computed_tokens
    sequence.block_table = list(adopted.block_ids)
    sequence.table_version = adopted.table_version
    return sequence


def _replay(sequence: Sequence, token_ids: Iterable[int], cumulative_logprob: float) -> None:
    """Take tokens that were committed before."""
    for token_id in token_ids:
        assert not sequence.finished, f"tokens after the end of sequence {sequence.sequence_id}"
        sequence.take(token_id, 0.0)
    sequence.cumulative_logprob = sequence.committed_logprob = cumulative_logprob
    sequence.num_committed_tokens = len(sequence.output_token_ids)


def _status_of(record: ops.AdoptedRequest) -> GroupStatus:
    live = [s for s in record.sequences if s.finish_reason is None and not s.pruned]
    if not live:
        return GroupStatus.FINISHED
    places = {(sequence.running, sequence.swapped) for sequence in live}
    assert len(places) == 1, f"{record.request.request_id}: half of the group has blocks"
    running, swapped = places.pop()
    if swapped:
        return GroupStatus.SWAPPED
    return GroupStatus.RUNNING if running else GroupStatus.WAITING


def find_prefix_sources(live: list[Sequence], block_size: int) -> None:
    """A candidate that counts blocks as computed which a sibling has yet to compute waits."""
    for sequence in live:
        for sibling in live:
            shared = _num_shared_blocks(sequence, sibling) * block_size
            needed = min(shared, sequence.num_computed_tokens)
            if sibling is not sequence and sibling.num_computed_tokens < needed:
                sequence.prefix_source, sequence.prefix_source_tokens = sibling, needed


def _num_writable_slots(sequence: Sequence, live: list[Sequence], block_size: int) -> int:
    """Slots that it may write without asking: up to the first block, from where it stands, that a
    sibling will write as well. One that siblings only wait for it to compute is its own."""
    end = len(sequence.block_table)
    for sibling in live:
        if sibling is not sequence:
            first = max(sequence.num_computed_tokens, sibling.num_computed_tokens) // block_size
            if first < _num_shared_blocks(sequence, sibling):
                end = min(end, first)
    return max(end * block_size, sequence.num_computed_tokens)


def _num_shared_blocks(one: Sequence, other: Sequence) -> int:
    count = 0
    for mine, theirs in zip(one.block_table, other.block_table, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


# ---- from what is left of a record that is gone ----


def remembered(group: SequenceGroup) -> tuple[ArrivingCandidate, ...]:
    """What the memory service had acknowledged of a group, to be entered once more."""
    candidates = tuple(
        ArrivingCandidate(
            sequence.candidate,
            tuple(sequence.output_token_ids[: sequence.num_committed_tokens]),
            _word_of(sequence.committed_logprob),
            sequence.finish_reason if sequence.end_committed else None,
        )
        for sequence in group.sequences
    )
    return candidates if _are_whole(group.request, candidates) else ()


def received_candidates(
    request: Request, received: Mapping[int, events.Received]
) -> tuple[ArrivingCandidate, ...]:
    """The same from what a caller has."""
    candidates = tuple(
        ArrivingCandidate(index, had.token_ids, _word_of(had.cumulative_logprob), had.finish_reason)
        for index, had in sorted(received.items())
    )
    return candidates if _are_whole(request, candidates) else ()


def _are_whole(request: Request, candidates: tuple[ArrivingCandidate, ...]) -> bool:
    """All candidates have begun. Before that there is nothing but the prompt to go on from."""
    return len(candidates) == request.params.n and all(
        candidate.output_token_ids or candidate.finish_reason for candidate in candidates
    )


def entering(
    group: SequenceGroup,
    candidates: tuple[ArrivingCandidate, ...],
    make_checker: MakeChecker,
) -> tuple[ops.Arrive, list[Sequence]]:
    """The op that enters the group's request, and its sequences, whose ids are yet to come.

    A candidate whose tokens end it arrives finished, whether or not that was known.
    """
    request = group.request
    sequences = []
    for candidate in candidates or (ArrivingCandidate(0, (), 0),):
        sequence = Sequence(0, candidate.candidate, group, make_checker(request))
        _replay(sequence, candidate.output_token_ids, _logprob_of(candidate.state_word))
        if candidate.finish_reason is not None and not sequence.finished:
            sequence.end(candidate.finish_reason)
        sequence.end_committed = sequence.finished
        sequences.append(sequence)
    judged = tuple(
        replace(candidate, finish_reason=sequence.finish_reason)
        for candidate, sequence in zip(candidates, sequences, strict=False)
    )
    return ops.Arrive(request, judged), sequences


# ---- results that the worker still has ----


def match_retained(
    retained: ops.RetainedStep, sequences: Mapping[int, Sequence], decoding: DecodingStrategy
) -> tuple[StepPlan, ops.StepResult]:
    """The rows of an executed step whose results were never committed, and those results.

    A row counts when its sequence runs and stands exactly where the row began.
    """
    rows: list[Row] = []
    kept: list[int] = []
    at = 0
    columns = zip(
        retained.sequence_ids.tolist(),
        retained.num_input_tokens.tolist(),
        retained.num_computed_tokens.tolist(),
        retained.num_samples.tolist(),
        strict=True,
    )
    for sequence_id, num_input_tokens, num_computed_tokens, num_samples in columns:
        sequence = sequences.get(sequence_id)
        draws = range(at, at + num_samples)
        at += num_samples
        if sequence is None or sequence.finished:
            continue
        if sequence.group.status is not GroupStatus.RUNNING:
            continue
        left = sequence.num_tokens - num_computed_tokens - num_input_tokens
        expected = decoding.num_samples(sequence) if left == 0 else 0
        if (
            sequence.num_computed_tokens == num_computed_tokens
            and left >= 0
            and num_samples == expected
        ):
            row = Row(sequence, num_computed_tokens, num_input_tokens, num_samples)
            row.issue()
            rows.append(row)
            kept.extend(draws)
    result = retained.result
    return StepPlan(rows), ops.StepResult(
        result.step_id, result.sampled_token_ids[kept], result.logprobs[kept], result.timings
    )
