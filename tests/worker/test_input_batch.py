"""The mirror of the block tables: versions, refusals, and the layout of the flattened batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model_worker.errors import StepError
from model_worker.input_batch import DRAWN_LAST, InputBatch, Limits
from model_worker.step import Sampling, SequenceStart, StepInput, TableDeltas

LIMITS = Limits(
    num_blocks=20,
    block_size=4,
    num_token_ids=50,
    max_model_len=30,
    max_num_batched_tokens=16,
    max_num_seqs=3,
    num_host_blocks=4,
)


def start(sequence_id: int, blocks: list[int], version: int = 1, **sampling: Any) -> SequenceStart:
    return SequenceStart(sequence_id, np.array(blocks, np.int32), version, Sampling(**sampling))


def step(
    rows: list[tuple[int, int, int, list[int], int]],
    *,
    starts: list[SequenceStart] | None = None,
    deltas: list[tuple[int, int, int, int]] | None = None,
    dropped: list[int] | None = None,
    copies: tuple[list[int], list[int]] = ([], []),
) -> StepInput:
    """rows: (sequence_id, table_version, num_computed_tokens, input ids, num_samples)."""
    columns = [list(column) for column in zip(*(deltas or []), strict=True)] or [[]] * 4
    return StepInput(
        step_id=1,
        sequence_ids=np.array([r[0] for r in rows], np.uint64),
        table_versions=np.array([r[1] for r in rows], np.uint32),
        num_computed_tokens=np.array([r[2] for r in rows], np.int32),
        num_input_tokens=np.array([len(r[3]) for r in rows], np.int32),
        input_token_ids=np.array([t for r in rows for t in r[3]], np.int32),
        num_samples=np.array([r[4] for r in rows], np.int32),
        copy_src_block_ids=np.array(copies[0], np.int32),
        copy_dst_block_ids=np.array(copies[1], np.int32),
        starts=tuple(starts or ()),
        deltas=TableDeltas(
            np.array(columns[0], np.uint64),
            np.array(columns[1], np.int32),
            np.array(columns[2], np.int32),
            np.array(columns[3], np.uint32),
        ),
        dropped_sequence_ids=np.array(dropped or [], np.uint64),
    )


def swaps(
    ins: tuple[list[int], list[int]] = ([], []), outs: tuple[list[int], list[int]] = ([], [])
) -> StepInput:
    """Sources and destinations of each."""
    return replace(
        step([]),
        swap_in_host_block_ids=np.array(ins[0], np.int32),
        swap_in_block_ids=np.array(ins[1], np.int32),
        swap_out_block_ids=np.array(outs[0], np.int32),
        swap_out_host_block_ids=np.array(outs[1], np.int32),
    )


@pytest.fixture
def batch() -> InputBatch:
    """Knows sequence 7 (blocks 3, 1, version 1) and 8 (block 5, version 4)."""
    batch = InputBatch(LIMITS)
    batch.apply(step([], starts=[start(7, [3, 1]), start(8, [5], 4)]))
    return batch


def refused(batch: InputBatch, bad: StepInput) -> StepError:
    """The error `bad` is refused with, having seen that it left no trace."""
    before = dict(batch._sequences)
    with pytest.raises(StepError) as caught:
        batch.apply(bad)
    assert batch._sequences == before
    return caught.value


def test_the_flattened_layout(batch):
    flat = batch.apply(step([(7, 1, 3, [10, 11, 12], 1), (8, 4, 0, [20], 0)]))
    assert flat.input_ids.tolist() == [10, 11, 12, 20]
    assert flat.positions.tolist() == [3, 4, 5, 0]
    # Block 3 holds positions 0-3 of sequence 7, block 1 the next four.
    assert flat.attention.slot_mapping.tolist() == [3 * 4 + 3, 1 * 4 + 0, 1 * 4 + 1, 5 * 4]
    assert flat.attention.slot_mapping.dtype == np.int64
    assert flat.attention.query_starts.tolist() == [0, 3, 4]
    assert flat.attention.context_lens.tolist() == [6, 1]
    assert flat.attention.block_tables.tolist() == [[3, 1], [5, 0]]
    assert flat.logit_rows.tolist() == [2]
    assert flat.draw_positions.tolist() == [6]
    assert flat.num_samples.tolist() == [1]


def test_deltas_append_replace_and_raise_the_version(batch):
    # Two ops: one of two rows (a copy-on-write and a new block), then one more.
    deltas = [(7, 1, 9, 2), (7, 2, 10, 2), (7, 3, 11, 3)]
    flat = batch.apply(step([(7, 3, 15, [1], 1)], deltas=deltas))
    assert flat.attention.block_tables.tolist() == [[3, 9, 10, 11]]
    assert flat.attention.slot_mapping.tolist() == [11 * 4 + 3]


@pytest.mark.parametrize(
    "deltas",
    [
        [(7, 2, 9, 3)],  # version 2 was lost
        [(7, 2, 9, 1)],  # nothing new
        [(7, 2, 9, 2), (7, 3, 10, 4)],  # a gap inside
        [(7, 2, 9, 3), (7, 3, 10, 2)],  # backwards
        [(8, 1, 9, 4)],
    ],
)
def test_a_delta_that_does_not_follow_is_refused(batch, deltas):
    assert refused(batch, step([], deltas=deltas)).reason == "TABLE_VERSION_MISMATCH"


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_a_row_at_another_version_is_refused(batch, version):
    error = refused(batch, step([(7, version, 0, [1], 1)]))
    assert error.reason == "TABLE_VERSION_MISMATCH"
    assert f"version {version}" in error.message
    assert "worker's is 1" in error.message


def test_unknown_sequences_are_refused(batch):
    assert refused(batch, step([(9, 1, 0, [1], 1)])).reason == "UNKNOWN_SEQUENCE"
    assert refused(batch, step([], deltas=[(9, 0, 1, 1)])).reason == "UNKNOWN_SEQUENCE"
    batch.clear()
    assert refused(batch, step([(7, 1, 0, [1], 1)])).reason == "UNKNOWN_SEQUENCE"


def test_dropped_sequences_are_forgotten_unless_started_again(batch):
    assert refused(batch, step([(7, 1, 0, [1], 1)], dropped=[7])).reason == "UNKNOWN_SEQUENCE"
    again = step([(7, 6, 0, [1], 1)], dropped=[7, 99], starts=[start(7, [12], 6)])
    assert batch.apply(again).attention.block_tables.tolist() == [[12]]
    batch.apply(step([], dropped=[7, 8]))
    assert len(batch) == 0


@pytest.mark.parametrize("token_id", [-2, 50, 51, 2**31 - 1, -(2**31)])
def test_b34_ids_out_of_vocabulary_are_refused_before_the_forward(batch, token_id):
    for ids in ([token_id], [1, token_id, 2]):
        error = refused(batch, step([(7, 1, 0, ids, 1)]))
        assert error.reason == "TOKEN_OUT_OF_VOCABULARY"
        assert f"{token_id} is not within 0..49" in error.message
    masked = start(9, [2], masked_token_ids=(token_id,))
    assert refused(batch, step([], starts=[masked])).reason == "TOKEN_OUT_OF_VOCABULARY"


def drew(batch, computed, num_inputs, token_id, sequence_id=7):
    """The batch has run a row of the sequence that ended with this draw."""
    row = step([(sequence_id, 1, computed, [1] * num_inputs, 1)])
    batch.remember_draws(row, np.array([token_id], np.int32))


def test_a_step_goes_on_with_what_was_drawn_last(batch):
    drew(batch, 0, 3, 41)
    rows = [(7, 1, 3, [DRAWN_LAST], 1), (8, 4, 0, [4, 5], 1)]
    assert batch.apply(step(rows)).input_ids.tolist() == [41, 4, 5]
    assert batch.apply(step(rows[::-1])).input_ids.tolist() == [4, 5, 41]
    drew(batch, 3, 1, 42)
    assert batch.apply(step([(7, 1, 4, [DRAWN_LAST], 1)])).input_ids.tolist() == [42]


def test_only_the_draw_of_that_very_position_is_gone_on_with(batch):
    position_3 = step([(7, 1, 3, [DRAWN_LAST], 1)])
    assert refused(batch, position_3).reason == "INVALID_BATCH"
    drew(batch, 0, 2, 41)
    assert "position 3" in refused(batch, position_3).message
    drew(batch, 0, 3, 41)
    for row in ((7, 1, 2, [1, DRAWN_LAST], 1), (8, 4, 3, [DRAWN_LAST], 1)):
        assert refused(batch, step([row])).reason == "INVALID_BATCH"
    batch.apply(step([], dropped=[7], starts=[start(7, [1])]))
    assert refused(batch, position_3).reason == "INVALID_BATCH"
    drew(batch, 0, 3, 41)
    batch.clear()
    batch.apply(step([], starts=[start(7, [1])]))
    assert refused(batch, position_3).reason == "INVALID_BATCH"


def test_several_draws_of_a_row_are_nobody_s_last(batch):
    batch.remember_draws(step([(7, 1, 0, [1, 2, 3], 2)]), np.array([41, 42], np.int32))
    assert refused(batch, step([(7, 1, 3, [DRAWN_LAST], 1)])).reason == "INVALID_BATCH"


def test_b34_first_and_last_id_are_accepted(batch):
    assert batch.apply(step([(7, 1, 0, [0, 49], 1)])).input_ids.tolist() == [0, 49]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (step([], starts=[start(9, [20])]), "20 is not a block id"),
        (step([], starts=[start(9, [-1])]), "-1 is not a block id"),
        (step([], deltas=[(7, 2, 20, 2)]), "20 is not a block id"),
        (step([], deltas=[(7, 3, 9, 2)]), "table index 3"),
        (step([], deltas=[(7, -1, 9, 2)]), "table index -1"),
        (step([], deltas=[(7, 2**31 - 1, 9, 2)]), "table index 2147483647"),
        (step([], copies=([1], [20])), "20 is not a block id"),
        (step([], copies=([-1], [2])), "-1 is not a block id"),
        (step([], copies=([1, 2], [3, 3])), "two copy pairs have the same destination"),
        (step([], copies=([1, 2], [3])), "2 copy sources, 1 dest"),
        (swaps(ins=([4], [1])), "swap-in source 4 is not a block id, they are 0..3"),
        (swaps(ins=([3], [20])), "swap-in destination 20 is not"),
        (swaps(ins=([0, 1], [2, 2])), "two swap-in pairs"),
        (swaps(outs=([20], [1])), "swap-out source 20 is not"),
        (swaps(outs=([1], [4])), "swap-out destination 4 is not a block id, they are 0..3"),
        (swaps(outs=([1, 2], [3, 3])), "two swap-out pairs"),
        (swaps(outs=([1, 2], [3])), "2 swap-out sources, 1 dest"),
        (step([(7, 1, 0, [1], 1), (7, 1, 1, [1], 1)]), "two rows"),
        (step([(7, 1, 0, [], 1)]), "num_input_tokens >= 1"),
        (step([(7, 1, 0, [1], -1)]), "num_samples >= 0"),
        (step([(7, 1, -1, [1], 1)]), "not within 0..29"),
        (step([(7, 1, 30, [1], 1)]), "not within 0..29"),
        (step([(7, 1, 7, [1, 2], 1)]), "its 2 blocks hold 8"),
        (step([(7, 1, 0, [1] * 17, 1)]), "17 tokens, at most 16"),
        (step([(i, 1, 0, [1], 1) for i in range(4)]), "4 sequences, at most 3"),
        (step([(7, 1, 0, [1], 1), (9, 1, 0, [1], 1)], starts=[start(9, [3])]), "one slot"),
        (replace(step([(7, 1, 0, [1], 1)]), num_samples=np.zeros(2, np.int32)), "columns"),
        (replace(step([(7, 1, 0, [1], 1)]), input_token_ids=np.zeros(2, np.int32)), "2 ids came"),
    ],
)
def test_a_malformed_step_is_refused_whole(batch, bad, words):
    error = refused(batch, bad)
    assert error.reason == "INVALID_BATCH"
    assert words in error.message


def test_a_refused_step_takes_none_of_its_starts_and_deltas(batch):
    bad = step([(7, 9, 0, [1], 1)], starts=[start(9, [2])], deltas=[(7, 2, 9, 2)], dropped=[8])
    refused(batch, bad)
    assert batch.apply(step([(7, 1, 0, [1], 1), (8, 4, 0, [1], 1)])).input_ids.size == 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": t} for t in (NAN, INF, -INF, -1.0, -1e-9)),
        *({"temperature": 1.0, "top_p": p} for p in (NAN, INF, 0.0, -0.1, 1.0000001)),
        *({"temperature": 1.0, "min_p": p} for p in (NAN, INF, -0.1, 1.0000001)),
        *({"temperature": 1.0, "top_k": k} for k in (-2, -(2**31))),
    ],
)
def test_b39_sampling_out_of_range_is_refused(batch, sampling):
    bad = step([], starts=[start(9, [2], **sampling)])
    assert refused(batch, bad).reason == "INVALID_PARAMETER"


def test_sampling_at_its_bounds_is_accepted(batch):
    for sampling in (
        Sampling(temperature=1e300, top_p=1.0, min_p=0.0, top_k=-1),
        Sampling(temperature=1e-300, top_p=1e-300, min_p=1.0, top_k=2**31 - 1),
        Sampling(temperature=0.0, top_p=0.0),  # greedy: the rest is not read
    ):
        batch.apply(step([], starts=[replace(start(9, [2]), sampling=sampling)]))
