"""The worker's mirror of the block tables, and the flattened batch made from it.

The tables belong to the memory service. The mirror follows them by version: a step names the
version each of its sequences must be at, and a step that does not fit is refused whole, before
anything of it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from model_worker.attention import AttentionBatch
from model_worker.errors import StepError
from model_worker.step import I32, U64, Sampling, SequenceStart, StepInput, TableDeltas

# As an input token: the one drawn last for the sequence.
DRAWN_LAST = -1


@dataclass(frozen=True)
class Limits:
    """What a step may contain.

    num_token_ids: ids the model has an embedding for. max_model_len: in tokens.
    """

    num_blocks: int
    block_size: int
    num_token_ids: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_host_blocks: int = 0


@dataclass(frozen=True)
class MirroredSequence:
    """block_ids: int32[B], the table at `table_version`."""

    block_ids: I32
    table_version: int
    sampling: Sampling


@dataclass(frozen=True)
class FlatBatch:
    """One step's rows laid end to end: N sequences, T tokens.

    input_ids, positions: int64[T]. `attention` says where their KV lies. logit_rows: int64[R],
    the last token of each row that samples; samplings, draw_positions, num_samples: of those R,
    a draw's position being that of the drawn token in its sequence.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    attention: AttentionBatch
    logit_rows: npt.NDArray[np.int64]
    samplings: list[Sampling]
    draw_positions: npt.NDArray[np.int64]
    num_samples: I32


class InputBatch:
    """Mirror of the tables of the sequences this worker knows."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sequences: dict[int, MirroredSequence] = {}
        # Of each sequence the position and id of the token drawn last in this session.
        self._drawn: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def knows_any(self, sequence_ids: U64) -> bool:
        """Whether one of these sequences is known from an earlier step."""
        return any(sequence_id in self._sequences for sequence_id in sequence_ids.tolist())

    def clear(self) -> None:
        """Forget every sequence: a new session starts from full tables."""
        self._sequences.clear()
        self._drawn.clear()

    def remember_draws(self, step: StepInput, token_ids: I32) -> None:
        """Keep what `step` has drawn, for the next step to go on with.

        token_ids: int32[sum of num_samples]; of a row that drew several, nobody goes on with one
        before the sequence has forked.
        """
        ends = np.cumsum(step.num_samples)
        one = np.flatnonzero(step.num_samples == 1)
        positions = (step.num_computed_tokens + step.num_input_tokens)[one].tolist()
        tokens = token_ids[ends[one] - 1].tolist()
        for sequence_id, position, token in zip(
            step.sequence_ids[one].tolist(), positions, tokens, strict=True
        ):
            self._drawn[sequence_id] = (position, token)

    def apply(self, step: StepInput) -> FlatBatch:
        """Take over the step's drops, starts and deltas, and lay out its rows.

        Raises StepError, with the mirror as it was, when the step does not fit it.
        """
        self._check_moves(step)
        staged = {start.sequence_id: self._started(start) for start in step.starts}
        dropped = set(step.dropped_sequence_ids.tolist())
        known = {
            sequence_id: sequence
            for sequence_id, sequence in self._sequences.items()
            if sequence_id not in dropped
        }
        known.update(staged)
        self._apply_deltas(known, step.deltas)
        flat = self._flatten(known, step)
        self._sequences = known
        for sequence_id in dropped:
            self._drawn.pop(sequence_id, None)
        return flat

    def _check_moves(self, step: StepInput) -> None:
        limits = self.limits
        for what, src, dst, num_src, num_dst in (
            (
                "swap-in",
                step.swap_in_host_block_ids,
                step.swap_in_block_ids,
                limits.num_host_blocks,
                limits.num_blocks,
            ),
            (
                "copy",
                step.copy_src_block_ids,
                step.copy_dst_block_ids,
                limits.num_blocks,
                limits.num_blocks,
            ),
            (
                "swap-out",
                step.swap_out_block_ids,
                step.swap_out_host_block_ids,
                limits.num_blocks,
                limits.num_host_blocks,
            ),
        ):
            if src.size != dst.size:
                raise StepError(
                    "INVALID_BATCH", f"{src.size} {what} sources, {dst.size} destinations"
                )
            if src.size:
                _check_ids(src, f"{what} source", num_src)
                _check_ids(dst, f"{what} destination", num_dst)
                if np.unique(dst).size != dst.size:
                    raise StepError(
                        "INVALID_BATCH", f"two {what} pairs have the same destination block"
                    )

    def _check_block_ids(self, block_ids: I32, what: str) -> None:
        _check_ids(block_ids, what, self.limits.num_blocks)

    def _started(self, start: SequenceStart) -> MirroredSequence:
        self._check_block_ids(start.block_ids, f"sequence {start.sequence_id}: block")
        check_sampling(start.sampling, self.limits.num_token_ids)
        return MirroredSequence(start.block_ids.copy(), start.table_version, start.sampling)

    def _apply_deltas(self, known: dict[int, MirroredSequence], deltas: TableDeltas) -> None:
        """Replace, in `known`, the sequences that `deltas` changes by changed copies."""
        columns = (
            deltas.sequence_ids,
            deltas.table_indices,
            deltas.block_ids,
            deltas.table_versions,
        )
        if len({column.size for column in columns}) != 1:
            raise StepError("INVALID_BATCH", "the columns of the table deltas differ in length")
        self._check_block_ids(deltas.block_ids, "table delta: block")
        changes: dict[int, list[tuple[int, int, int]]] = {}
        for sequence_id, *change in zip(*(column.tolist() for column in columns), strict=True):
            changes.setdefault(sequence_id, []).append(tuple(change))
        for sequence_id, rows in changes.items():
            sequence = known.get(sequence_id)
            if sequence is None:
                raise _unknown(sequence_id)
            known[sequence_id] = _changed(sequence_id, sequence, rows)

    def _flatten(self, known: Mapping[int, MirroredSequence], step: StepInput) -> FlatBatch:
        rows = self._rows(known, step)
        num_inputs = step.num_input_tokens.astype(np.int64)
        computed = step.num_computed_tokens.astype(np.int64)
        input_ids = self._input_ids(step)

        query_starts = np.zeros(num_inputs.size + 1, np.int64)
        np.cumsum(num_inputs, out=query_starts[1:])
        context_lens = computed + num_inputs
        row_of_token = np.repeat(np.arange(num_inputs.size), num_inputs)
        positions = np.arange(query_starts[-1]) + (computed - query_starts[:-1])[row_of_token]

        num_blocks = -(-context_lens // self.limits.block_size)
        tables = np.zeros((len(rows), int(num_blocks.max(initial=0))), np.int32)
        for i, sequence in enumerate(rows):
            tables[i, : num_blocks[i]] = sequence.block_ids[: num_blocks[i]]
        block_of_token = tables[row_of_token, positions // self.limits.block_size].astype(np.int64)
        slots = block_of_token * self.limits.block_size + positions % self.limits.block_size
        if np.unique(slots).size != slots.size:
            raise StepError("INVALID_BATCH", "two tokens of the step would be written to one slot")

        sampled = np.flatnonzero(step.num_samples)
        return FlatBatch(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=query_starts.astype(np.int32),
                context_lens=context_lens.astype(np.int32),
                block_tables=tables,
                slot_mapping=slots,
            ),
            logit_rows=query_starts[1:][sampled] - 1,
            samplings=[rows[i].sampling for i in sampled],
            draw_positions=context_lens[sampled],
            num_samples=step.num_samples[sampled],
        )

    def _rows(
        self, known: Mapping[int, MirroredSequence], step: StepInput
    ) -> list[MirroredSequence]:
        """The mirrored sequence of each row. Raises StepError when a row cannot be run."""
        self._check_shape(step)
        rows = []
        for sequence_id, version, num_inputs, computed in zip(
            step.sequence_ids.tolist(),
            step.table_versions.tolist(),
            step.num_input_tokens.tolist(),
            step.num_computed_tokens.tolist(),
            strict=True,
        ):
            sequence = known.get(sequence_id)
            if sequence is None:
                raise _unknown(sequence_id)
            if sequence.table_version != version:
                raise StepError(
                    "TABLE_VERSION_MISMATCH",
                    f"sequence {sequence_id}: the step expects table version {version},"
                    f" the worker's is {sequence.table_version}",
                )
            self._check_extent(sequence_id, sequence, num_inputs, computed)
            rows.append(sequence)
        return rows

    def _check_shape(self, step: StepInput) -> None:
        limits = self.limits
        num_rows = step.sequence_ids.size
        columns = (
            step.table_versions,
            step.num_input_tokens,
            step.num_computed_tokens,
            step.num_samples,
        )
        if any(column.size != num_rows for column in columns):
            raise StepError(
                "INVALID_BATCH",
                f"{num_rows} sequence ids, but columns of {[column.size for column in columns]}",
            )
        if num_rows > limits.max_num_seqs:
            raise StepError(
                "INVALID_BATCH", f"{num_rows} sequences, at most {limits.max_num_seqs} fit a step"
            )
        if np.unique(step.sequence_ids).size != num_rows:
            raise StepError("INVALID_BATCH", "a sequence has two rows in one step")
        if (step.num_input_tokens < 1).any() or (step.num_samples < 0).any():
            raise StepError(
                "INVALID_BATCH", "each row needs num_input_tokens >= 1 and num_samples >= 0"
            )
        num_tokens = int(step.num_input_tokens.sum())
        if num_tokens != step.input_token_ids.size:
            raise StepError(
                "INVALID_BATCH",
                f"num_input_tokens add up to {num_tokens}, {step.input_token_ids.size} ids came",
            )
        if num_tokens > limits.max_num_batched_tokens:
            raise StepError(
                "INVALID_BATCH",
                f"{num_tokens} tokens, at most {limits.max_num_batched_tokens} fit a step",
            )

    def _check_extent(
        self, sequence_id: int, sequence: MirroredSequence, num_inputs: int, computed: int
    ) -> None:
        end, limits = computed + num_inputs, self.limits
        if computed < 0 or end > limits.max_model_len:
            raise StepError(
                "INVALID_BATCH",
                f"sequence {sequence_id}: tokens {computed}..{end - 1} are not within"
                f" 0..{limits.max_model_len - 1}",
            )
        num_slots = sequence.block_ids.size * limits.block_size
        if end > num_slots:
            raise StepError(
                "INVALID_BATCH",
                f"sequence {sequence_id}: {end} tokens, its {sequence.block_ids.size} blocks"
                f" hold {num_slots}",
            )

    def _input_ids(self, step: StepInput) -> npt.NDArray[np.int64]:
        """The step's input tokens, with those filled in that this worker has drawn itself."""
        input_ids = step.input_token_ids.astype(np.int64)
        drawn = np.flatnonzero(step.input_token_ids == DRAWN_LAST)
        if drawn.size:
            starts = np.cumsum(step.num_input_tokens) - step.num_input_tokens
            for row in np.searchsorted(starts, drawn, side="right") - 1:
                input_ids[starts[row]] = self._drawn_last(
                    int(step.sequence_ids[row]),
                    int(step.num_computed_tokens[row]),
                    int(step.num_input_tokens[row]),
                )
        self._check_tokens(input_ids)
        return input_ids

    def _drawn_last(self, sequence_id: int, position: int, num_inputs: int) -> int:
        drawn = self._drawn.get(sequence_id)
        if num_inputs != 1 or drawn is None or drawn[0] != position:
            at = "none" if drawn is None else f"one at position {drawn[0]}"
            raise StepError(
                "INVALID_BATCH",
                f"sequence {sequence_id}: {num_inputs} input tokens from position {position} on are"
                f" to be what was drawn last, which is {at}",
            )
        return drawn[1]

    def _check_tokens(self, token_ids: npt.NDArray[np.int64]) -> None:
        bad = (token_ids < 0) | (token_ids >= self.limits.num_token_ids)
        if bad.any():
            raise StepError(
                "TOKEN_OUT_OF_VOCABULARY",
                f"token id {int(token_ids[bad][0])} is not within"
                f" 0..{self.limits.num_token_ids - 1}",
            )


def _check_ids(block_ids: I32, what: str, num_blocks: int) -> None:
    bad = (block_ids < 0) | (block_ids >= num_blocks)
    if bad.any():
        raise StepError(
            "INVALID_BATCH",
            f"{what} {int(block_ids[bad][0])} is not a block id, they are 0..{num_blocks - 1}",
        )


def check_sampling(sampling: Sampling, num_token_ids: int) -> None:
    """Raise StepError when a draw with `sampling` has no meaning."""
    bad_ids = [i for i in sampling.masked_token_ids if not 0 <= i < num_token_ids]
    if bad_ids:
        raise StepError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"masked token id {bad_ids[0]} is not within 0..{num_token_ids - 1}",
        )
    # A comparison with NaN is false, so NaN fails each of these too.
    if not 0.0 <= sampling.temperature < float("inf"):
        raise StepError(
            "INVALID_PARAMETER", f"temperature {sampling.temperature} is not within 0..inf"
        )
    if sampling.temperature == 0.0:
        return
    if sampling.top_k < -1:
        raise StepError("INVALID_PARAMETER", f"top_k {sampling.top_k} is below -1")
    if not 0.0 < sampling.top_p <= 1.0:
        raise StepError("INVALID_PARAMETER", f"top_p {sampling.top_p} is not within (0, 1]")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise StepError("INVALID_PARAMETER", f"min_p {sampling.min_p} is not within [0, 1]")


def _unknown(sequence_id: int) -> StepError:
    return StepError("UNKNOWN_SEQUENCE", f"this worker knows no sequence {sequence_id}")


def _changed(
    sequence_id: int, sequence: MirroredSequence, rows: list[tuple[int, int, int]]
) -> MirroredSequence:
    """`sequence` with `rows` of (table_index, block_id, table_version) applied in their order.

    Each op of the memory service that changes a table raises its version by one and has one row
    or more, so a version left out means that a change was lost.
    """
    table, version = sequence.block_ids.tolist(), sequence.table_version
    for number, (index, block_id, row_version) in enumerate(rows):
        if row_version != version + 1 and not (number and row_version == version):
            raise StepError(
                "TABLE_VERSION_MISMATCH",
                f"sequence {sequence_id}: a delta to version {row_version}, but the worker's"
                f" table is at {version}",
            )
        if not 0 <= index <= len(table):
            raise StepError(
                "INVALID_BATCH",
                f"sequence {sequence_id}: table index {index}, but its table has {len(table)}"
                " entries: a delta may replace one of them or add the next",
            )
        table[index : index + 1] = [block_id]
        version = row_version
    return replace(sequence, block_ids=np.array(table, np.int32), table_version=version)
