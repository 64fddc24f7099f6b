"""The sequence table: one row of numpy columns per live sequence.

A sequence id is generation << 32 | row. The generation of a row grows when its sequence
ends, so an id is never used twice, and a column of ids is looked up in one comparison.
Sequences that arrive finished are numbered in a row that no table has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.batch import Column, OpStatus, PoolGeometry
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.prefix_cache import Chain
from kvmem_svc.core.records import FinishedSequence, RequestRecord

Rows = npt.NDArray[np.intp]

ROW_MASK = 0xFFFFFFFF


class Status(IntEnum):
    """Where a sequence is in its life; numbered as on the wire."""

    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    SWAPPED = 4


# Comparing a column with a plain int takes a quarter of the time an enum's member takes.
RUNNING = int(Status.RUNNING)

# op -> {status before: status after}. What is not here is refused.
TRANSITIONS: Mapping[str, Mapping[Status, Status]] = {
    "admit": {Status.WAITING: Status.RUNNING},
    "commit": {
        Status.WAITING: Status.WAITING,
        Status.RUNNING: Status.RUNNING,
        Status.SWAPPED: Status.SWAPPED,
    },
    "reserve": {Status.RUNNING: Status.RUNNING},
    "append": {Status.RUNNING: Status.RUNNING},
    "fork": {Status.RUNNING: Status.RUNNING},
    "share from": {Status.RUNNING: Status.RUNNING},
    "preempt": {Status.RUNNING: Status.WAITING, Status.SWAPPED: Status.WAITING},
    "swap out": {Status.RUNNING: Status.SWAPPED},
    "swap in": {Status.SWAPPED: Status.RUNNING},
    "free": {
        Status.WAITING: Status.FINISHED,
        Status.RUNNING: Status.FINISHED,
        Status.SWAPPED: Status.FINISHED,
    },
}


def require(status: Status, op: str, sequence_id: int) -> Status:
    """The status after `op`. Raises OpMistake INVALID_STATE where the table has none."""
    after = TRANSITIONS[op].get(status)
    if after is None:
        allowed = " or ".join(before.name for before in TRANSITIONS[op])
        raise OpMistake(
            OpStatus.INVALID_STATE,
            f"{op}: sequence {sequence_id} is {status.name}, it must be {allowed}",
        )
    return after


@dataclass(frozen=True, slots=True)
class SwapMap:
    """Where the blocks of a swapped sequence's table are. host_blocks: int32, in its order.
    was_caching: its blocks are to be published again once it is back."""

    host_blocks: Column
    was_caching: bool


class SequenceTable:
    """Rows 0 .. max_sequences - 1. Matrices are zeros that the system backs when touched.

    length, num_computed, table_len, table_version, candidate, num_prompt_tokens, tenant (its
    number): int32[rows];
    status: uint8[rows], 0 for an empty row; may_share: bool[rows], False only when no block that
    the row may write to can have another holder or be published; is_caching: bool[rows], the
    row's blocks are published when they are full, as far as chained_len: int32[rows], in tokens,
    they were, or found; state_words: uint64[rows], has_word: bool[rows].
    tables: int32[rows, max_blocks_per_sequence]; tokens:
    int32[rows, max_model_len + 1], for the last token drawn never needs a slot.
    """

    def __init__(self, max_sequences: int, geometry: PoolGeometry) -> None:
        self.max_sequences = max_sequences
        self.live_ids = np.zeros(max_sequences, np.uint64)
        self.length = np.zeros(max_sequences, np.int32)
        self.num_computed = np.zeros(max_sequences, np.int32)
        self.table_len = np.zeros(max_sequences, np.int32)
        self.table_version = np.zeros(max_sequences, np.int32)
        self.candidate = np.zeros(max_sequences, np.int32)
        self.num_prompt_tokens = np.zeros(max_sequences, np.int32)
        self.tenant = np.zeros(max_sequences, np.int32)
        self.status = np.zeros(max_sequences, np.uint8)
        self.may_share = np.zeros(max_sequences, np.bool_)
        self.is_caching = np.zeros(max_sequences, np.bool_)
        self.chained_len = np.zeros(max_sequences, np.int32)
        # Of the rows that are caching: what the block at chained_len goes on from.
        self.chains: dict[int, Chain] = {}
        # Of the rows that are swapped.
        self.swap_maps: dict[int, SwapMap] = {}
        # A row's scheduler_state: its word where has_word, else what stands in long_states.
        self.state_words = np.zeros(max_sequences, np.uint64)
        self.has_word = np.zeros(max_sequences, np.bool_)
        self.long_states: dict[int, bytes] = {}
        self.records: list[RequestRecord | None] = [None] * max_sequences
        # Ids of sequences that ended and whose request is not confirmed yet.
        self.finished: dict[int, FinishedSequence] = {}
        self._num_given_finished = 0
        self._generation = [1] * max_sequences
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._stamps = np.zeros(max_sequences, np.intp)
        self._ordinals = np.arange(max_sequences, dtype=np.intp)
        self._forget_known()
        self.reshape(geometry)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def live_rows(self) -> Rows:
        """Rows of all live sequences, lowest first."""
        return np.flatnonzero(self.live_ids)

    def reshape(self, geometry: PoolGeometry) -> None:
        """Take on another pool's geometry: tokens stay, every table is emptied, all wait.

        Raises MemoryError, with nothing changed.
        """
        max_blocks = -(-geometry.max_model_len // geometry.block_size)
        tables = np.zeros((self.max_sequences, max_blocks), np.int32)
        tokens = np.zeros((self.max_sequences, geometry.max_model_len + 1), np.int32)
        for row in self.live_rows().tolist():
            length = self.length[row]
            tokens[row, :length] = self.tokens[row, :length]
            self.empty_table(row)
            self.status[row] = Status.WAITING
        self.swap_maps.clear()
        self.tables, self.tokens = tables, tokens
        self.block_size = geometry.block_size
        self.max_model_len = geometry.max_model_len

    # --- lookup ------------------------------------------------------------------------

    def is_live(self, sequence_id: int) -> bool:
        row = sequence_id & ROW_MASK
        return (
            sequence_id > 0 and row < self.max_sequences and int(self.live_ids[row]) == sequence_id
        )

    def _forget_known(self) -> None:
        self._known_ids = b""
        self._known_rows: Rows = np.zeros(0, np.intp)

    def row_of(self, sequence_id: int) -> int:
        """The row of a live sequence. Raises OpMistake for one that is finished or unknown."""
        if not self.is_live(sequence_id):
            raise self._not_live(sequence_id)
        return sequence_id & ROW_MASK

    def rows_of(self, sequence_ids: Column) -> Rows:
        """The rows of a uint64 column of distinct live sequences. Raises OpMistake.

        Steady decode names the same sequences op after op, so the last answer is kept until
        a sequence ends.
        """
        named = sequence_ids.tobytes()  # far quicker compared than arrays are
        if named == self._known_ids:
            return self._known_rows
        rows = self._look_up(sequence_ids)
        self._known_ids, self._known_rows = named, rows
        return rows

    def _look_up(self, sequence_ids: Column) -> Rows:
        rows = (sequence_ids & np.uint64(ROW_MASK)).astype(np.intp)
        live = (self.live_ids.take(rows, mode="clip") == sequence_ids) & (sequence_ids != 0)
        if not live.all():
            raise self._not_live(int(sequence_ids[int(live.argmin())]))
        if rows.size > self.max_sequences:
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"{rows.size} sequences are named, there are at most {self.max_sequences}",
            )
        # Each row is stamped with its position; a repeated row keeps the last stamp only.
        positions = self._ordinals[: rows.size]
        self._stamps[rows] = positions
        first_seen = self._stamps[rows] == positions
        if not first_seen.all():
            raise OpMistake(
                OpStatus.INVALID_ARGUMENT,
                f"sequence {int(sequence_ids[int(first_seen.argmin())])} is named twice",
            )
        return rows

    def distinct_rows(self, sequence_ids: list[int]) -> list[int]:
        """As `rows_of`, for a few ids. Raises OpMistake."""
        seen: set[int] = set()
        for sequence_id in sequence_ids:
            if sequence_id in seen:
                raise OpMistake(OpStatus.INVALID_ARGUMENT, f"sequence {sequence_id} is named twice")
            seen.add(sequence_id)
        return [self.row_of(sequence_id) for sequence_id in sequence_ids]

    def _not_live(self, sequence_id: int) -> OpMistake:
        if sequence_id in self.finished:
            return OpMistake(OpStatus.INVALID_STATE, f"sequence {sequence_id} is already finished")
        return OpMistake(OpStatus.UNKNOWN_SEQUENCE, f"there is no sequence {sequence_id}")

    def status_of(self, row: int) -> Status:
        return Status(int(self.status[row]))

    def id_of(self, row: int) -> int:
        return int(self.live_ids[row])

    def record_of(self, row: int) -> RequestRecord:
        record = self.records[row]
        assert record is not None, f"row {row} has no record"
        return record

    def table(self, row: int) -> Column:
        """A copy of the row's block table, int32[table_len]."""
        return self.tables[row, : self.table_len[row]].copy()

    def chain_of(self, row: int) -> Chain:
        """The chain of a row that is caching."""
        return self.chains[row]

    def begin_caching(self, row: int, chain: Chain, chained_len: int) -> None:
        """The row's blocks are to be published, after those of its first chained_len tokens."""
        self.is_caching[row] = True
        self.chained_len[row] = chained_len
        self.chains[row] = chain

    def end_caching(self, row: int) -> None:
        self.is_caching[row] = False
        self.chained_len[row] = 0
        self.chains.pop(row, None)

    def num_host_blocks(self, row: int) -> int:
        """Of the host tier; 0 unless the row is swapped."""
        swap_map = self.swap_maps.get(row)
        return 0 if swap_map is None else swap_map.host_blocks.size

    def holders(self) -> dict[int, int]:
        """Block -> the sequence that holds it, of several the one in the lowest row."""
        holders: dict[int, int] = {}
        for row in reversed(self.live_rows().tolist()):
            holders |= dict.fromkeys(self.table(row).tolist(), self.id_of(row))
        return holders

    # --- scheduler_state ---------------------------------------------------------------

    def scheduler_state(self, row: int) -> bytes:
        """The row's opaque state; empty when none was ever set."""
        if self.has_word[row]:
            return self.state_words[row].astype("<u8").tobytes()
        return self.long_states.get(row, b"")

    def set_state(self, row: int, state: bytes) -> None:
        """Bytes of any length, in place of what was there."""
        self.has_word[row] = False
        if state:
            self.long_states[row] = state
        else:
            self.long_states.pop(row, None)

    def set_words(self, rows: Rows, words: Column) -> None:
        """One word for each row, in place of what was there."""
        self.state_words[rows] = words
        self.has_word[rows] = True
        if self.long_states:
            for row in rows.tolist():
                self.long_states.pop(row, None)

    # --- life --------------------------------------------------------------------------

    def create(self, record: RequestRecord, candidate: int, token_ids: Column) -> int:
        """Fill an empty row with a WAITING sequence; returns the row. One must be free."""
        row = self._free_rows.pop()
        sequence_id = self._generation[row] << 32 | row
        self.live_ids[row] = sequence_id
        self.tokens[row, : token_ids.size] = token_ids
        self.length[row] = token_ids.size
        self.num_prompt_tokens[row] = record.num_prompt_tokens
        self.tenant[row] = record.tenant_number
        self.candidate[row] = candidate
        self.status[row] = Status.WAITING
        self.records[row] = record
        record.live[candidate] = sequence_id
        return row

    def finished_id(self) -> int:
        """An id for a sequence that was finished before it came here: it never has a row."""
        self._num_given_finished += 1
        return self._num_given_finished << 32 | ROW_MASK

    def empty_table(self, row: int) -> None:
        """Forget the row's blocks and what was computed in them."""
        if self.table_len[row]:
            self.table_version[row] += 1
        self.table_len[row] = 0
        self.num_computed[row] = 0
        self.may_share[row] = False
        self.end_caching(row)

    def swap_out(self, row: int, host_blocks: Column) -> None:
        """The row's blocks are those of the host tier now; what was computed in them stays so."""
        self.swap_maps[row] = SwapMap(host_blocks, bool(self.is_caching[row]))
        num_computed = self.num_computed[row]
        self.empty_table(row)
        self.num_computed[row] = num_computed
        self.status[row] = Status.SWAPPED

    def swap_in(self, row: int, blocks: Column) -> None:
        """The row's blocks are these, and it runs on. Its swap map goes."""
        del self.swap_maps[row]
        self.tables[row, : blocks.size] = blocks
        self.table_len[row] = blocks.size
        self.table_version[row] += 1
        self.status[row] = Status.RUNNING

    def remove(self, row: int) -> RequestRecord:
        """Clear a row whose blocks are gone; its id is never given again."""
        self._forget_known()
        record = self.record_of(row)
        del record.live[int(self.candidate[row])]
        for column in (
            self.live_ids,
            self.length,
            self.num_computed,
            self.table_len,
            self.table_version,
            self.candidate,
            self.num_prompt_tokens,
            self.tenant,
            self.status,
            self.may_share,
            self.is_caching,
            self.chained_len,
            self.state_words,
            self.has_word,
        ):
            column[row] = 0
        self.records[row] = None
        self.long_states.pop(row, None)
        self.chains.pop(row, None)
        self.swap_maps.pop(row, None)
        self._generation[row] += 1
        self._free_rows.append(row)
        return record
