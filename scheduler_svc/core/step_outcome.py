"""Reading a step's result: who took which token, who ended, what may be shown once committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import ops
from scheduler_svc.core.decoding import DecodingStrategy, ForkInto
from scheduler_svc.core.events import CandidateDelta
from scheduler_svc.core.planner import Row, StepPlan
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.stopping import FinishReason


@dataclass
class StepOutcome:
    """Collected over the rows of a step."""

    Forking = ForkInto

    commit: ops.Commit | None = None
    forks: list[ForkInto] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    _deltas: dict[int, tuple[SequenceGroup, list[CandidateDelta]]] = field(default_factory=dict)

    def extend(self, sequence: Sequence, token_id: int, logprob: float, now_s: float) -> None:
        """The sequence takes one token; it may end with it."""
        sequence.output_token_ids.append(token_id)
        sequence.cumulative_logprob += logprob
        group = sequence.group
        if group.first_token_at_s is None:
            group.first_token_at_s = now_s
        judgement = sequence.checker.judge(token_id)
        sequence.finish_reason = judgement.finish_reason
        if sequence.finished:
            self.ended.append(sequence)
        self._note(sequence, judgement.text, (token_id,), judgement.matched_stop)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence ends without a token."""
        sequence.finish_reason = reason
        self._note(sequence, sequence.checker.end(), (), None)

    def deltas_by_group(self) -> list[tuple[SequenceGroup, list[CandidateDelta]]]:
        return list(self._deltas.values())

    def _note(
        self,
        sequence: Sequence,
        text: str,
        token_ids: tuple[int, ...],
        matched_stop: str | int | None,
    ) -> None:
        delta = CandidateDelta(
            sequence.candidate,
            text,
            token_ids,
            sequence.cumulative_logprob,
            sequence.finish_reason,
            matched_stop,
        )
        group = sequence.group
        self._deltas.setdefault(id(group), (group, []))[1].append(delta)


def read_step(
    plan: StepPlan, result: ops.StepResult, decoding: DecodingStrategy, now_s: float
) -> StepOutcome:
    """Fold a step's tokens into the view. Rows of sequences that ended meanwhile are ignored."""
    outcome = StepOutcome()
    committed: list[tuple[Sequence, int, int]] = []
    at = 0
    for row in plan.rows:
        token_ids = tuple(map(int, result.sampled_token_ids[at : at + row.num_samples]))
        logprobs = tuple(map(float, result.logprobs[at : at + row.num_samples]))
        at += row.num_samples
        if not row.sequence.finished and row.sequence.group.status is GroupStatus.RUNNING:
            committed.append(_read_row(outcome, row, token_ids, logprobs, decoding, now_s))
    if committed:
        outcome.commit = _commit(committed)
    return outcome


def _read_row(
    outcome: StepOutcome,
    row: Row,
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    decoding: DecodingStrategy,
    now_s: float,
) -> tuple[Sequence, int, int]:
    """(sequence, tokens committed, the token or 0)."""
    sequence = row.sequence
    sequence.num_computed_tokens += row.num_input_tokens
    if not token_ids:
        return sequence, 0, 0
    decision = decoding.decide(sequence, token_ids, logprobs)
    if isinstance(decision, ForkInto):
        # The tokens ride in the Fork, with the children that take them.
        outcome.forks.append(decision)
        return sequence, 0, 0
    outcome.extend(sequence, decision.token_id, decision.logprob, now_s)
    return sequence, 1, decision.token_id


def _commit(committed: list[tuple[Sequence, int, int]]) -> ops.Commit:
    return ops.Commit(
        np.array([sequence.sequence_id for sequence, _, _ in committed], np.uint64),
        np.array([count for _, count, _ in committed], np.int32),
        np.array([token for _, count, token in committed if count], np.int32),
        np.array([sequence.num_computed_tokens for sequence, _, _ in committed], np.int32),
    )


def close_group(group: SequenceGroup) -> None:
    """Move the group to FINISHED once none of its candidates goes on."""
    if not group.live and group.status is not GroupStatus.FINISHED:
        group.move_to(GroupStatus.FINISHED)
