"""Reads a journal's folder: which files count, whether they fit together, what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmem_svc.journal.errors import JournalDamaged
from kvmem_svc.journal.folder import SNAPSHOT_SUFFIX, JournalFolder
from kvmem_svc.journal.segment import (
    FILE_HEADER_BYTES,
    SEGMENT_MAGIC,
    SNAPSHOT_MAGIC,
    FileHeader,
    Life,
    Record,
    SegmentReader,
    unpack_file_header,
    unpack_snapshot,
)
from kvmem_svc.journal.writer import Tail


@dataclass(frozen=True)
class Snapshot:
    """A state, and the number of the segment whose records come after it."""

    header: FileHeader
    segment: int
    state: bytes


class JournalReader:
    """One pass over a journal: first `snapshot`, then `records`, then `tail`.

    Raises JournalDamaged (or OtherVersion) as soon as something does not fit.
    """

    def __init__(self, folder: JournalFolder, until_segment: int | None = None) -> None:
        """`until_segment`: leave it and the ones above out; all below are then sealed."""
        self.num_torn_bytes = 0
        self._folder = folder
        self._has_newest = until_segment is None
        self._tail: Tail | None = None
        self.snapshot = self._read_snapshot()
        self._segments = self._segments_to_read(until_segment)
        self._drop_unbegun_segment()
        # The life is known before a record is read: from whatever comes first.
        first = self.snapshot.header if self.snapshot else self._first_header()
        self._life = first.life if first else None
        self._next_record = first.next_record if first else 1

    @property
    def life(self) -> Life | None:
        """None: there is no journal yet."""
        return self._life

    @property
    def tail(self) -> Tail | None:
        """Where to go on, once `records` is exhausted; None: begin anew."""
        return self._tail

    def records(self) -> Iterator[tuple[str, Record]]:
        """(file name, record), oldest first."""
        for number in self._segments:
            yield from self._records_of(number)

    # --- what counts -------------------------------------------------------------------

    def _read_snapshot(self) -> Snapshot | None:
        numbers = self._folder.snapshot_numbers()
        if not numbers:
            return None
        path = self._folder.snapshot(numbers[-1])
        header, state = unpack_snapshot(_read(path), path.name)
        return Snapshot(header, numbers[-1], state)

    def _segments_to_read(self, until_segment: int | None) -> list[int]:
        """From the snapshot on, without a gap. Raises JournalDamaged."""
        first = self.snapshot.segment if self.snapshot else 1
        found = [number for number in self._folder.segment_numbers() if number >= first]
        if until_segment is not None:
            found = [number for number in found if number < until_segment]
        expected = list(range(first, first + len(found)))
        if found != expected:
            missing = next(number for number in expected if number not in found)
            raise JournalDamaged(self._path(missing).name, 0, "the segment is missing")
        if not found and self.snapshot is not None and self._has_newest:
            raise JournalDamaged(self._path(first).name, 0, "the segment is missing")
        return found

    def _drop_unbegun_segment(self) -> None:
        """The newest segment, when it was created and its header not written: there is nothing
        in it, and the journal ends with the one before."""
        if not self._has_newest or not self._segments:
            return
        size = self._path(self._segments[-1]).stat().st_size
        is_needed = self.snapshot is not None and len(self._segments) == 1
        if size < FILE_HEADER_BYTES and not is_needed:
            self._segments.pop()
            self.num_torn_bytes = size

    def _first_header(self) -> FileHeader | None:
        if not self._segments:
            return None
        path = self._path(self._segments[0])
        with path.open("rb") as file:
            header = _header(file.read(FILE_HEADER_BYTES), path.name)
        if header.next_record != 1:
            raise JournalDamaged(
                path.name, 0, f"the oldest segment begins with record {header.next_record}, not 1"
            )
        return header

    def _path(self, number: int) -> Path:
        return self._folder.segment(number)

    # --- segments ----------------------------------------------------------------------

    def _records_of(self, number: int) -> Iterator[tuple[str, Record]]:
        name, content = self._path(number).name, _read(self._path(number))
        header = _header(content, name)
        if header.life != self._life:
            raise JournalDamaged(name, 0, f"it belongs to {header.life}, not to {self._life}")
        if header.next_record != self._next_record:
            raise JournalDamaged(
                name,
                0,
                f"it begins with record {header.next_record} where {self._next_record} is due",
            )
        reader = SegmentReader(content, name, header.next_record)
        for record in reader:
            yield name, record
        is_newest = self._has_newest and number == self._segments[-1]
        if reader.num_torn_bytes and not is_newest:
            raise JournalDamaged(name, reader.end, "the segment ends within a record")
        self._next_record = reader.next_record
        self.num_torn_bytes += reader.num_torn_bytes
        self._tail = Tail(number, reader.end, header.next_record, reader.next_record)


def machine_boot_ids(folder: JournalFolder) -> set[str]:
    """Of all files whose header is whole: they tell a journal from before a reboot, whatever
    else may be wrong with it."""
    found = set()
    for path in folder.files():
        magic = SNAPSHOT_MAGIC if path.suffix == SNAPSHOT_SUFFIX else SEGMENT_MAGIC
        with contextlib.suppress(JournalDamaged), path.open("rb") as file:
            header = unpack_file_header(file.read(FILE_HEADER_BYTES), magic, path.name)
            if header is not None:
                found.add(header.life.machine_boot_id)
    return found


def _header(content: bytes, name: str) -> FileHeader:
    header = unpack_file_header(content, SEGMENT_MAGIC, name)
    if header is None:
        raise JournalDamaged(name, 0, f"it has {len(content)} bytes, a segment has more")
    return header


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise JournalDamaged(path.name, 0, "the file is missing") from None
