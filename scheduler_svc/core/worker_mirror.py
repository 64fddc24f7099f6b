"""What the worker's mirror of the block tables knows, and the step that brings it up to date."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler_svc.core import adoption, ops
from scheduler_svc.core.planner import Row, StepPlan
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup


class WorkerMirror:
    """Sequences by id, and the table changes, copies and drops the worker has yet to hear of."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._deltas: list[tuple[int, int, int, int]] = []
        # (the sequence each is for, source, destination); None: whichever holds the destination.
        self._copies: list[tuple[int | None, int, int]] = []
        # (source, destination); all of them are to be made, whoever they were for.
        self._swap_ins: list[tuple[int, int]] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._dropped: list[int] = []

    def take_pending_copies(self, copies: tuple[ops.PendingCopy, ...]) -> None:
        """Copies that a former scheduler was told of and never sent on.

        Several sequences may hold a destination by now.
        """
        self._copies.extend((None, c.src_block_id, c.dst_block_id) for c in copies)

    @property
    def has_swaps(self) -> bool:
        """Whether the next step has something to do even without a row."""
        return bool(self._swap_ins or self._swap_outs)

    def take_swaps(self, swap_ins: ops.BlockCopies, swap_outs: ops.BlockCopies) -> None:
        """To be made in the next step."""
        self._swap_ins.extend(_pairs(swap_ins))
        self._swap_outs.extend(_pairs(swap_outs))

    def take_deltas(self, result: ops.BatchResult) -> None:
        """Apply the table changes of a batch to the view, and note what is to be moved."""
        self.take_swaps(result.swap_ins, result.swap_outs)
        deltas = result.deltas
        if not (len(deltas.sequence_ids) or len(result.copy_src)):
            return
        rows = list(
            zip(
                deltas.sequence_ids.tolist(),
                deltas.table_indices.tolist(),
                deltas.block_ids.tolist(),
                deltas.table_versions.tolist(),
                strict=True,
            )
        )
        for sequence_id, index, block_id, version in rows:
            sequence = self.sequences[sequence_id]
            table = sequence.block_table
            assert index <= len(table), (sequence_id, index, len(table))
            table[index : index + 1] = [block_id]
            sequence.table_version = version
        self._deltas.extend(row for row in rows if self.sequences[row[0]].on_worker)
        if len(result.copy_src):
            # Those of an Admit have no rows here: its whole tables come with its result.
            owner = {block_id: sequence_id for sequence_id, _, block_id, _ in rows}
            self._copies.extend(
                (owner.get(dst), src, dst)
                for src, dst in zip(result.copy_src.tolist(), result.copy_dst.tolist(), strict=True)
            )

    def take_tables(
        self, group: SequenceGroup, tables: tuple[ops.Table, ...], block_size: int
    ) -> None:
        """The group was admitted, or swapped in: whole tables, of which siblings share the first
        blocks, and the first ones of which may have come from the prefix cache."""
        num_shared_tokens = len(group.request.prompt_token_ids) // block_size * block_size
        for table in tables:
            sequence = self.sequences[table.sequence_id]
            sequence.block_table = list(table.block_ids)
            sequence.table_version = table.table_version
            is_first = sequence is group.live[0]
            sequence.num_computed_tokens = max(
                table.num_computed_tokens, 0 if is_first else num_shared_tokens
            )
            sequence.num_writable_slots = len(table.block_ids) * block_size
        adoption.find_prefix_sources(group.live, block_size)

    def add(self, sequence: Sequence) -> None:
        """One more candidate of its group, by the id it has got."""
        sequence.group.sequences.append(sequence)
        self.sequences[sequence.sequence_id] = sequence

    def drop(self, sequence: Sequence) -> None:
        """The worker may forget the sequence."""
        if sequence.on_worker:
            self._dropped.append(sequence.sequence_id)
            sequence.on_worker = False

    def forget(self, sequence: Sequence) -> None:
        """Nobody will ask for the sequence again."""
        self.drop(sequence)
        self.sequences.pop(sequence.sequence_id, None)

    @staticmethod
    def reserve(by_group: list[tuple[SequenceGroup, list[Row]]]) -> ops.Reserve:
        """Slots for the planned rows, each group all or nothing."""
        rows = [row for _, group_rows in by_group for row in group_rows]
        return ops.Reserve(
            np.array([row.sequence.sequence_id for row in rows], np.uint64),
            np.array([row.num_slots for row in rows], np.int32),
            np.array([len(group_rows) for _, group_rows in by_group], np.int32),
        )

    def build_step(
        self, step_id: int, plan: StepPlan, eos_token_ids: tuple[int, ...]
    ) -> tuple[ops.Step, list[Row]]:
        """The Execute for the rows of the plan that still run, and those rows.

        With no such row and no swap nothing is taken out: what is pending goes with the next step.
        """
        rows = [row for row in plan.rows if _runs(row.sequence)]
        self.forget_copies()
        copies = self._copies
        starting = self._starting(rows, {dst for _, _, dst in copies})
        step = ops.Step(
            step_id=step_id,
            starts=tuple(_start(sequence, eos_token_ids) for sequence in starting),
            deltas=self._known_deltas(),
            copy_src=ops.NO_INT32,
            copy_dst=ops.NO_INT32,
            dropped_sequence_ids=np.array(self._dropped, np.uint64),
            sequence_ids=np.array([row.sequence.sequence_id for row in rows], np.uint64),
            table_versions=np.array([row.sequence.table_version for row in rows], np.uint32),
            num_input_tokens=np.array([row.num_input_tokens for row in rows], np.int32),
            num_computed_tokens=np.array([row.start for row in rows], np.int32),
            input_token_ids=np.array([t for row in rows for t in _input(row)], np.int32),
            num_samples=np.array([row.num_samples for row in rows], np.int32),
        )
        if not rows and not self.has_swaps:
            return step, rows
        for sequence in starting:
            sequence.on_worker = True
        for row in rows:
            row.issue()
        step = replace(
            step,
            swap_ins=_columns(self._swap_ins),
            swap_outs=_columns(self._swap_outs),
            copy_src=np.array([src for _, src, _ in copies], np.int32),
            copy_dst=np.array([dst for _, _, dst in copies], np.int32),
        )
        self._deltas, self._copies, self._dropped = [], [], []
        self._swap_ins, self._swap_outs = [], []
        return step, rows

    def _starting(self, rows: list[Row], destinations: set[int]) -> list[Sequence]:
        """Sequences the worker is to be told in full: those with rows, and those whose blocks it
        is to copy into."""
        by_id = {row.sequence.sequence_id: row.sequence for row in rows}
        if destinations:
            for sequence in self.sequences.values():
                if _runs(sequence) and destinations.intersection(sequence.block_table):
                    by_id[sequence.sequence_id] = sequence
        return [sequence for sequence in by_id.values() if not sequence.on_worker]

    def forget_copies(self) -> bool:
        """Forget the copies whose owner lost its blocks meanwhile; whether others are left.

        To be called before a step counts as done: somebody else may be given the destination then.
        """
        self._copies = [c for c in self._copies if self._holds(c[0], c[2])]
        return bool(self._copies)

    def _holds(self, sequence_id: int | None, block_id: int) -> bool:
        if sequence_id is None:
            return any(_runs(s) and block_id in s.block_table for s in self.sequences.values())
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and _runs(sequence) and block_id in sequence.block_table

    def _known_deltas(self) -> ops.TableDeltas:
        rows = [
            row
            for row in self._deltas
            if (sequence := self.sequences.get(row[0])) is not None and sequence.on_worker
        ]
        if not rows:
            return ops.NO_DELTAS
        sequence_ids, indices, block_ids, versions = zip(*rows, strict=True)
        return ops.TableDeltas(
            np.array(sequence_ids, np.uint64),
            np.array(indices, np.int32),
            np.array(block_ids, np.int32),
            np.array(versions, np.uint32),
        )


def _pairs(copies: ops.BlockCopies) -> list[tuple[int, int]]:
    return list(zip(copies.src.tolist(), copies.dst.tolist(), strict=True))


def _columns(pairs: list[tuple[int, int]]) -> ops.BlockCopies:
    columns = np.array(pairs, np.int32).reshape(-1, 2)
    return ops.BlockCopies(columns[:, 0], columns[:, 1])


def _runs(sequence: Sequence) -> bool:
    return not sequence.finished and sequence.group.status is GroupStatus.RUNNING


def _input(row: Row) -> list[int]:
    if row.start >= row.sequence.num_tokens:
        # It is being drawn, by a step before this one, and is at the worker already by then.
        return [ops.DRAWN_LAST]
    return row.sequence.tokens_between(row.start, row.start + row.num_input_tokens)


def _start(sequence: Sequence, eos_token_ids: tuple[int, ...]) -> ops.SequenceStart:
    request = sequence.group.request
    params = request.params
    masked: tuple[int, ...] = ()
    if params.min_tokens:
        eos = () if params.ignore_eos else eos_token_ids
        masked = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    return ops.SequenceStart(
        sequence_id=sequence.sequence_id,
        block_ids=tuple(sequence.block_table),
        table_version=sequence.table_version,
        params=params,
        sample_index=params.first_sample_index + sequence.candidate,
        masked_token_ids=masked,
        masked_before_position=len(request.prompt_token_ids) + params.min_tokens,
        request_id=request.request_id,
        traceparent=request.traceparent,
    )
