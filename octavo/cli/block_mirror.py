"""A mirror of the block tables, folded from nothing but the memory service's event stream.

Pure: no clock, no I/O. `BlockMirror` follows every sequence; `RequestStory` keeps what a person
wants to know of one request: where its candidates shared blocks, which were copied when they
parted, which came later, and what was given back. (PagedAttention, section 4.4: parallel
sampling shares the prompt's blocks, and a block is copied when one of several users writes it.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from octavo import admin_types as kv


class How(StrEnum):
    """How a block came into a table."""

    SEEN = "seen"  # it was there when the watch began
    ADMITTED = "admitted"  # among the first blocks, for the prompt
    SHARED = "shared"  # taken over by reference, from the parent or a sibling
    COPIED = "copied"  # in place of a shared block that was about to be written
    ADDED = "added"  # at the end, for new tokens


@dataclass(frozen=True)
class Slot:
    """One entry of a block table. src_block_id: the block it replaced, when it was copied."""

    block_id: int
    how: How
    src_block_id: int | None = None


@dataclass(frozen=True)
class Placed:
    """A table entry that was set."""

    step_id: int
    sequence_id: int
    table_index: int
    slot: Slot


@dataclass(frozen=True)
class GivenBack:
    """A sequence let go of its table; block_ids: those that nobody else holds."""

    step_id: int
    sequence_id: int
    block_ids: tuple[int, ...]


Change = Placed | GivenBack


@dataclass
class _Sequence:
    request_id: str
    candidate: int
    slots: list[Slot] = field(default_factory=list)
    # Freed without a reason: its candidate number is free again.
    is_pruned: bool = False

    def take(self, step_id: int, sequence_id: int, slots: Iterable[Slot]) -> list[Change]:
        """Replace the whole table."""
        self.slots = list(slots)
        return [Placed(step_id, sequence_id, index, slot) for index, slot in enumerate(self.slots)]


class BlockMirror:
    """All sequences with their block tables, as of the last event applied.

    complete: False when the snapshot at the start left sequences out, in which case reference
    counts may be too low.
    """

    def __init__(self) -> None:
        self.complete = False
        self._sequences: dict[int, _Sequence] = {}

    def apply(self, event: kv.Event) -> list[Change]:
        """Fold in the next event; what it changed, in order."""
        if isinstance(event, kv.BlockTables):
            self._begin(event)
            return []
        changes: list[Change] = []
        for applied in event.ops:
            if applied.status is kv.OpStatus.OK:
                changes += self._apply_op(event.step_id, applied)
        return changes + self._apply_deltas(event)

    def table(self, sequence_id: int) -> tuple[Slot, ...]:
        """The sequence's table; empty once it was given back."""
        sequence = self._sequences.get(sequence_id)
        return () if sequence is None else tuple(sequence.slots)

    def sequences_of(self, request_id: str) -> dict[int, int]:
        """Sequence ids of a request by candidate."""
        return {
            sequence.candidate: sequence_id
            for sequence_id, sequence in self._sequences.items()
            if sequence.request_id == request_id
        }

    def ref_counts(self) -> Counter[int]:
        """How many tables hold each block."""
        return Counter(
            slot.block_id for sequence in self._sequences.values() for slot in sequence.slots
        )

    def _begin(self, snapshot: kv.BlockTables) -> None:
        self.complete = not snapshot.truncated
        self._sequences = {
            view.sequence_id: _Sequence(
                view.request_id,
                view.candidate,
                [Slot(block_id, How.SEEN) for block_id in view.block_ids],
            )
            for view in snapshot.sequences
        }

    def _apply_op(self, step_id: int, applied: kv.AppliedOp) -> list[Change]:
        match applied.op, applied.outcome:
            case kv.Arrive() as arrive, kv.Arrived() as arrived:
                self._arrive(arrive, arrived)
            case kv.Admit() as admit, kv.Admitted(tables):
                return self._admit(step_id, admit, tables)
            case kv.Fork(sequence_id), kv.Forked() as forked:
                return self._fork(step_id, sequence_id, forked)
            case kv.SwapIn(), kv.SwappedIn(tables):
                return self._swap_in(step_id, tables)
            case ((kv.Preempt(sequence_ids) | kv.SwapOut(sequence_ids)), _):
                return self._give_back(step_id, sequence_ids)
            case kv.Free(sequence_ids, finish_reason), _:
                for sequence_id in sequence_ids:
                    self._sequences[sequence_id].is_pruned = finish_reason is None
                return self._give_back(step_id, sequence_ids)
            case kv.Confirm(request_id), _:
                of_others = (i for i in self._sequences.items() if i[1].request_id != request_id)
                self._sequences = dict(of_others)
        return []

    def _arrive(self, arrive: kv.Arrive, arrived: kv.Arrived) -> None:
        """One candidate, or those that the request had in another life of the service."""
        candidates = arrive.candidate_indices or (0,)
        sequence_ids = arrived.candidate_sequence_ids or (arrived.sequence_id,)
        for candidate, sequence_id in zip(candidates, sequence_ids, strict=True):
            self._sequences[sequence_id] = _Sequence(arrive.request_id, candidate)

    def _swap_in(self, step_id: int, tables: tuple[kv.SequenceTable, ...]) -> list[Change]:
        """What several of them hold was shared before they were swapped out."""
        held = Counter(block_id for table in tables for block_id in table.block_ids)
        changes: list[Change] = []
        for table in tables:
            slots = [
                Slot(block_id, How.SHARED if held[block_id] > 1 else How.ADMITTED)
                for block_id in table.block_ids
            ]
            sequence = self._sequences[table.sequence_id]
            changes += sequence.take(step_id, table.sequence_id, slots)
        return changes

    def _admit(
        self, step_id: int, admit: kv.Admit, tables: tuple[kv.SequenceTable, ...]
    ) -> list[Change]:
        num_shared = {m.sequence_id: m.num_shared_blocks for m in admit.members if m.share_from}
        changes: list[Change] = []
        for table in tables:
            shared = num_shared.get(table.sequence_id, 0)
            slots = [
                Slot(block_id, How.SHARED if index < shared else How.ADMITTED)
                for index, block_id in enumerate(table.block_ids)
            ]
            sequence = self._sequences[table.sequence_id]
            changes += sequence.take(step_id, table.sequence_id, slots)
        return changes

    def _fork(self, step_id: int, sequence_id: int, forked: kv.Forked) -> list[Change]:
        request_id = self._sequences[sequence_id].request_id
        taken = {
            sequence.candidate
            for sequence in self._sequences.values()
            if sequence.request_id == request_id and not sequence.is_pruned
        }
        free = (candidate for candidate in count() if candidate not in taken)
        changes: list[Change] = []
        for candidate, child_id in zip(free, forked.child_sequence_ids, strict=False):
            child = self._sequences[child_id] = _Sequence(request_id, candidate)
            slots = [Slot(block_id, How.SHARED) for block_id in forked.block_ids]
            changes += child.take(step_id, child_id, slots)
        return changes

    def _give_back(self, step_id: int, sequence_ids: tuple[int, ...]) -> list[Change]:
        changes: list[Change] = []
        for sequence_id in sequence_ids:
            before = [slot.block_id for slot in self._sequences[sequence_id].slots]
            self._sequences[sequence_id].slots.clear()
            still_held = self.ref_counts()
            gone = tuple(block_id for block_id in before if not still_held[block_id])
            changes.append(GivenBack(step_id, sequence_id, gone))
        return changes

    def _apply_deltas(self, batch: kv.AppliedBatch) -> list[Change]:
        copied = {copy.dst_block_id for copy in batch.copies}
        changes: list[Change] = []
        for delta in batch.deltas:
            sequence = self._sequences.get(delta.sequence_id)
            if sequence is None or delta.table_index > len(sequence.slots):
                continue  # given back by a later op of the same batch
            slot = Slot(delta.block_id, How.ADDED)
            if delta.table_index == len(sequence.slots):
                sequence.slots.append(slot)
            else:
                if delta.block_id in copied:
                    replaced = sequence.slots[delta.table_index].block_id
                    slot = Slot(delta.block_id, How.COPIED, replaced)
                sequence.slots[delta.table_index] = slot
            changes.append(Placed(batch.step_id, delta.sequence_id, delta.table_index, slot))
        return changes


# ---------------------------------------------------------------- the story of one request


@dataclass(frozen=True)
class PicturedSlot:
    """A table entry with the number of tables that held its block at that moment."""

    slot: Slot
    ref_count: int


@dataclass(frozen=True)
class Picture:
    """The tables of a request's candidates, in the order of their index, at one moment."""

    tables: tuple[tuple[PicturedSlot, ...], ...]

    @property
    def num_logical_blocks(self) -> int:
        return sum(map(len, self.tables))

    @property
    def block_ids(self) -> frozenset[int]:
        return frozenset(entry.slot.block_id for table in self.tables for entry in table)

    @property
    def num_shared_blocks(self) -> int:
        """Physical blocks that more than one table held."""
        return len({e.slot.block_id for table in self.tables for e in table if e.ref_count > 1})


@dataclass(frozen=True)
class Copy:
    """A copy on write: candidate's table_index was src and became dst at step_id."""

    step_id: int
    candidate: int
    table_index: int
    src_block_id: int
    dst_block_id: int


class RequestStory:
    """What happened to the blocks of one request, from its arrival to its last block given back."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.copies: list[Copy] = []
        self.given_back: list[int] = []
        # The tables when all candidates that ever were held most blocks between them.
        self.widest = Picture(())
        self.lowest_levels: kv.PoolLevels | None = None
        self.last_levels: kv.PoolLevels | None = None
        # Blocks taken after that moment, by candidate.
        self.taken_later: list[tuple[int, int]] = []
        self.num_preemptions = 0
        self.confirmed = False
        self._mirror = BlockMirror()
        self._candidates: dict[int, int] = {}

    def apply(self, event: kv.Event) -> None:
        """Fold in the next event."""
        # A Confirm forgets the sequences: whose was whose must be known from before it.
        changes = self._mirror.apply(event)
        if isinstance(event, kv.BlockTables):
            return
        self._note_ops(event)
        self._candidates |= {
            sequence_id: candidate
            for candidate, sequence_id in self._mirror.sequences_of(self.request_id).items()
        }
        if self._candidates:
            self._note_changes(changes)
            self._note_picture()
            self._note_levels(event.levels)

    @property
    def blocks_used(self) -> frozenset[int]:
        """Every physical block that the request ever gave back or still holds."""
        return frozenset(self.given_back) | self._picture().block_ids

    def _note_ops(self, event: kv.AppliedBatch) -> None:
        for applied in event.ops:
            match applied.op:
                case kv.Arrive(self.request_id, prompt_token_ids):
                    self.num_prompt_tokens = len(prompt_token_ids)
                case kv.Preempt(sequence_ids) if self._candidates.keys() & set(sequence_ids):
                    self.num_preemptions += 1
                case kv.Confirm(self.request_id):
                    self.confirmed = True

    def _note_changes(self, changes: list[Change]) -> None:
        for change in changes:
            candidate = self._candidates.get(change.sequence_id)
            if candidate is None:
                continue
            if isinstance(change, GivenBack):
                self.given_back += change.block_ids
                continue
            self.taken_later.append((candidate, change.slot.block_id))
            if change.slot.src_block_id is not None:
                self.copies.append(
                    Copy(
                        change.step_id,
                        candidate,
                        change.table_index,
                        change.slot.src_block_id,
                        change.slot.block_id,
                    )
                )

    def _note_picture(self) -> None:
        now = self._picture()
        fewer_candidates = len(now.tables) < len(self.widest.tables)
        if not fewer_candidates and len(now.block_ids) >= len(self.widest.block_ids):
            self.widest = now
            self.taken_later.clear()

    def _note_levels(self, levels: kv.PoolLevels) -> None:
        lowest = self.lowest_levels
        if lowest is None or levels.num_unused_blocks < lowest.num_unused_blocks:
            self.lowest_levels = levels
        self.last_levels = levels

    def _picture(self) -> Picture:
        ref_counts = self._mirror.ref_counts()
        tables = (
            self._mirror.table(sequence_id)
            for _, sequence_id in sorted(self._mirror.sequences_of(self.request_id).items())
        )
        return Picture(
            tuple(
                tuple(PicturedSlot(slot, ref_counts[slot.block_id]) for slot in table)
                for table in tables
                if table
            )
        )
