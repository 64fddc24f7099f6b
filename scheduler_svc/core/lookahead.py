"""Slots reserved ahead, while there are plenty, so that no step waits for the memory service."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler_svc.core import ops
from scheduler_svc.core.outbox import Outbox, expect_room_or_none
from scheduler_svc.core.planner import Row
from scheduler_svc.core.sequence import Sequence, SequenceGroup

# How far ahead of a sequence its slots are reserved. Two steps are in flight, and one batch.
LOOKAHEAD_TOKENS = 4


class Lookahead:
    """Tops up the slots of running sequences with every batch that leaves anyway.

    Only of sequences that write in blocks of their own: then new blocks come at the end of their
    tables, and no step in flight or about to be issued is concerned.
    """

    def __init__(self, outbox: Outbox, block_size: int) -> None:
        self._outbox = outbox
        self._block_size = block_size

    def top_up(
        self, running: list[SequenceGroup], asking: Iterable[Row], num_free_blocks: int
    ) -> None:
        """Queue a Reserve for those that run short. `asking`: rows of the step that the batch
        prepares, which ask for themselves."""
        asked = {id(row.sequence) for row in asking}
        live = [sequence for group in running for sequence in group.live]
        needy = [s for s in live if id(s) not in asked and _runs_short(s)]
        if not needy or num_free_blocks < 2 * len(needy) + len(live):
            return
        slots = [
            min(sequence.num_scheduled_tokens + LOOKAHEAD_TOKENS, _num_slots_at_end(sequence))
            for sequence in needy
        ]
        self._outbox.add(
            ops.Reserve(
                np.array([sequence.sequence_id for sequence in needy], np.uint64),
                np.array(slots, np.int32),
                np.ones(len(needy), np.int32),
            ),
            lambda result: self._on_topped_up(needy, result),
        )

    def _on_topped_up(self, sequences: list[Sequence], result: ops.OpResult) -> None:
        expect_room_or_none(result)
        failed = set(result.failed_groups)
        for index, sequence in enumerate(sequences):
            if index not in failed:
                sequence.num_writable_slots = len(sequence.block_table) * self._block_size


def _runs_short(sequence: Sequence) -> bool:
    """Whether it writes in a block of its own that is nearly full, and will go on after it.

    Before it has forked, or has computed what its siblings wait for, there may be blocks ahead
    of it that it shares.
    """
    left = sequence.num_writable_slots - sequence.num_scheduled_tokens
    if not 0 < left < LOOKAHEAD_TOKENS:
        return False
    group = sequence.group
    num_prompt_tokens = len(group.request.prompt_token_ids)
    if not group.forked or sequence.num_computed_tokens < num_prompt_tokens:
        return False
    return sequence.num_writable_slots < _num_slots_at_end(sequence)


def _num_slots_at_end(sequence: Sequence) -> int:
    """Slots it can need; the model's length has room for them. The last token has none."""
    request = sequence.group.request
    return len(request.prompt_token_ids) + request.params.max_tokens - 1
