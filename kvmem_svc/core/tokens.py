"""Commit: what a step produced enters the sequence table. Needs no blocks, so it cannot fail for
lack of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmem_svc.core.batch import Column, Commit, OpStatus
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.limits import MAX_SCHEDULER_STATE_BYTES
from kvmem_svc.core.sequences import Rows, SequenceTable
from kvmem_svc.core.slots import expand


@dataclass(slots=True)
class CommitPlan:
    """num_tokens None: one token each. states: (row, scheduler_state)."""

    rows: Rows
    length: Column
    num_tokens: Column | None
    new_length: Column
    states: Sequence[tuple[int, bytes]]


def plan_commit(sequences: SequenceTable, op: Commit) -> CommitPlan:
    """Check a Commit against the table. Raises OpMistake."""
    rows = sequences.rows_of(op.sequence_ids)
    num_tokens = op.num_tokens if op.num_tokens.size else None
    _check_columns(op, num_tokens)
    check_token_ids(op.token_ids)
    length = sequences.length[rows]
    new_length = length + (1 if num_tokens is None else num_tokens)
    _check_lengths(sequences, op, rows, new_length)
    return CommitPlan(rows, length, num_tokens, new_length, _plan_states(sequences, op))


def commit_tokens(sequences: SequenceTable, plan: CommitPlan, op: Commit) -> None:
    """Carry out a plan; cannot fail."""
    rows = plan.rows
    if plan.num_tokens is None:
        sequences.tokens[rows, plan.length] = op.token_ids
    else:
        owner, offset = expand(plan.num_tokens)
        sequences.tokens[rows[owner], plan.length[owner] + offset] = op.token_ids
    sequences.length[rows] = plan.new_length
    sequences.num_computed[rows] = op.num_computed_tokens
    if op.state_words.size:
        sequences.set_words(rows, op.state_words)
    for row, state in plan.states:
        sequences.set_state(row, state)


def check_token_ids(token_ids: Column) -> None:
    """Raises OpMistake for a negative token id."""
    if token_ids.size and token_ids.min() < 0:
        raise OpMistake(OpStatus.INVALID_ARGUMENT, f"token id {int(token_ids.min())} is negative")


def _check_columns(op: Commit, num_tokens: Column | None) -> None:
    num_sequences = op.sequence_ids.size
    if op.num_computed_tokens.size != num_sequences:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"commit: {op.num_computed_tokens.size} num_computed_tokens for"
            f" {num_sequences} sequences",
        )
    if op.state_words.size not in (0, num_sequences):
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"commit: {op.state_words.size} state_words for {num_sequences} sequences",
        )
    expected = num_sequences
    if num_tokens is not None:
        if num_tokens.size != num_sequences or num_tokens.min() < 0:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"commit: num_tokens must be {num_sequences} numbers from 0 on,"
                f" not {num_tokens.size} from {int(num_tokens.min())} on",
            )
        expected = int(num_tokens.sum(dtype=np.int64))
    if op.token_ids.size != expected:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"commit: {op.token_ids.size} token ids where {expected} are announced",
        )


def _check_lengths(sequences: SequenceTable, op: Commit, rows: Rows, new_length: Column) -> None:
    computed = op.num_computed_tokens
    capacity = sequences.table_len[rows] * sequences.block_size
    longest = sequences.max_model_len + 1
    has_room, not_negative = new_length <= longest, computed >= 0
    fits = has_room & (computed <= np.minimum(new_length, capacity)) & not_negative
    if fits.all():
        return
    # Results of a step that was in flight when a sequence was swapped out: its slots are in the
    # host tier.
    in_host = np.array([sequences.num_host_blocks(row) for row in rows.tolist()], np.int32)
    capacity = capacity + in_host * sequences.block_size
    fits = has_room & (computed <= np.minimum(new_length, capacity)) & not_negative
    if fits.all():
        return
    at = int(fits.argmin())
    who = f"commit: sequence {int(op.sequence_ids[at])}"
    if new_length[at] > longest:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"{who} would have {int(new_length[at])} tokens, at most {longest} are possible",
        )
    raise OpMistake(
        OpStatus.INVALID_ARGUMENT,
        f"{who}: num_computed_tokens {int(computed[at])} is not in 0 .. {int(new_length[at])}"
        f" (its tokens) and 0 .. {int(capacity[at])} (its slots)",
    )


def _plan_states(sequences: SequenceTable, op: Commit) -> list[tuple[int, bytes]]:
    planned = []
    for sequence_id, state in op.states:
        check_state(state, f"commit: scheduler_state of sequence {sequence_id}")
        planned.append((sequences.row_of(sequence_id), state))
    return planned


def check_state(state: bytes, what: str) -> None:
    """Raises OpMistake for a scheduler_state that is too long."""
    if len(state) > MAX_SCHEDULER_STATE_BYTES:
        raise OpMistake(
            OpStatus.INVALID_ARGUMENT,
            f"{what} has {len(state)} bytes, at most {MAX_SCHEDULER_STATE_BYTES} are possible",
        )
