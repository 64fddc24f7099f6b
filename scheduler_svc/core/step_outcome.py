"""Reading a step's result: who took which token, and who ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core import ops
from scheduler_svc.core.adoption import state_words
from scheduler_svc.core.decoding import DecodingStrategy, ForkInto
from scheduler_svc.core.planner import Row, StepPlan
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup


@dataclass
class StepOutcome:
    """Collected over the rows of a step. `committed`: sequences that `commit` is about."""

    commit: ops.Commit | None = None
    committed: list[Sequence] = field(default_factory=list)
    forks: list[ForkInto] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)

    def extend(self, sequence: Sequence, token_id: int, logprob: float, now_s: float) -> None:
        """The sequence takes one token; it may end with it."""
        if sequence.group.first_token_at_s is None:
            sequence.group.first_token_at_s = now_s
        sequence.take(token_id, logprob)
        if sequence.finished:
            self.ended.append(sequence)


def read_step(
    plan: StepPlan, result: ops.StepResult, decoding: DecodingStrategy, now_s: float
) -> StepOutcome:
    """Fold a step's tokens into the view. Rows of sequences that ended meanwhile are ignored."""
    outcome = StepOutcome()
    tokens: list[tuple[int, ...]] = []
    drawn = tuple(result.sampled_token_ids.tolist())
    drawn_logprobs = tuple(result.logprobs.tolist())
    at = 0
    for row in plan.rows:
        end = at + row.num_samples
        token_ids, logprobs = drawn[at:end], drawn_logprobs[at:end]
        at = end
        if not row.sequence.finished and row.sequence.group.status is GroupStatus.RUNNING:
            outcome.committed.append(row.sequence)
            tokens.append(_read_row(outcome, row, token_ids, logprobs, decoding, now_s))
    if outcome.committed:
        outcome.commit = _commit(outcome.committed, tokens)
    return outcome


def _read_row(
    outcome: StepOutcome,
    row: Row,
    token_ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    decoding: DecodingStrategy,
    now_s: float,
) -> tuple[int, ...]:
    """The tokens to commit with the row: none when they ride in a Fork, with the children that
    take them."""
    sequence = row.sequence
    sequence.num_computed_tokens += row.num_input_tokens
    sequence.num_inflight_tokens -= row.num_input_tokens
    sequence.num_inflight_draws -= bool(row.num_samples)
    if not token_ids:
        return ()
    decision = decoding.decide(sequence, token_ids, logprobs)
    if isinstance(decision, ForkInto):
        outcome.forks.append(decision)
        return ()
    outcome.extend(sequence, decision.token_id, decision.logprob, now_s)
    return (decision.token_id,)


def _commit(sequences: list[Sequence], tokens: list[tuple[int, ...]]) -> ops.Commit:
    return ops.Commit(
        np.array([sequence.sequence_id for sequence in sequences], np.uint64),
        np.array([len(token_ids) for token_ids in tokens], np.int32),
        np.array([token for token_ids in tokens for token in token_ids], np.int32),
        np.array([sequence.num_computed_tokens for sequence in sequences], np.int32),
        state_words([sequence.cumulative_logprob for sequence in sequences]),
    )


def close_group(group: SequenceGroup) -> None:
    """Move the group to FINISHED once none of its candidates goes on."""
    if not group.live and group.status is not GroupStatus.FINISHED:
        group.move_to(GroupStatus.FINISHED)
