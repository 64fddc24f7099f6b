"""Appends records to the newest segment, and begins the next one when that is full.

A record is written whole or cut off again. While it cannot be written the journal is not
healthy: the record waits, in order, and nothing may be acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvmem_svc.journal.folder import JournalFolder, open_file
from kvmem_svc.journal.segment import (
    SEGMENT_MAGIC,
    FileHeader,
    Life,
    pack_file_header,
    pack_record,
)

log = structlog.get_logger()

# Whoever appends stops doing so when the journal is not healthy; a few may be under way.
MAX_WAITING_RECORDS = 64


@dataclass(frozen=True)
class SegmentLimits:
    """A segment is sealed when a record would take it beyond one of these, or when it was begun
    `max_age_ms` ago. Sealed segments are folded away: the number of records bounds how long a
    recovery takes (about 0.13 ms each), the age how long what is no longer needed stays."""

    max_bytes: int = 64 * 1024 * 1024
    max_records: int = 2048
    max_age_ms: int = 3_600_000


@dataclass(frozen=True)
class Tail:
    """Where to go on: the newest segment, its size in bytes, the number of its first record and
    the next one's."""

    segment: int
    num_bytes: int
    first_record: int
    next_record: int


def unix_time_ms() -> int:
    return time.time_ns() // 1_000_000


class SegmentWriter:
    """Writes records to segments. `on_sealed` is called with the number of the new segment."""

    def __init__(
        self,
        folder: JournalFolder,
        life: Life,
        tail: Tail | None,
        limits: SegmentLimits,
        on_sealed: Callable[[int], None],
    ) -> None:
        """Go on after `tail`, or begin a journal. Raises OSError."""
        self.next_record = 1 if tail is None else tail.next_record
        self._next_to_write = self.next_record
        self._folder = folder
        self._life = life
        self._limits = limits
        self._on_sealed = on_sealed
        self._begun_ms = unix_time_ms()
        self._waiting: deque[bytes] = deque()
        self._failure: OSError | None = None
        if tail is None:
            self._begin_segment(1)
        else:
            self._number, self._num_bytes = tail.segment, tail.num_bytes
            self._first_record = tail.first_record
            self._file = open_file(folder.segment(tail.segment), os.O_WRONLY)
            os.ftruncate(self._file, tail.num_bytes)

    @property
    def healthy(self) -> bool:
        """False: some records are not written yet."""
        return not self._waiting

    @property
    def failure(self) -> str:
        """Why the oldest waiting record could not be written; empty when healthy."""
        return "" if self._failure is None else str(self._failure)

    def append(self, kind: int, payload: bytes, reply_digest: int) -> None:
        """Write one record, or keep it until `flush_pending` can."""
        now_ms = unix_time_ms()
        record = pack_record(
            self._life.core_version, kind, self.next_record, now_ms, reply_digest, payload
        )
        self.next_record += 1
        if self._waiting:
            assert len(self._waiting) < MAX_WAITING_RECORDS, "appended on although not healthy"
            self._waiting.append(record)
            return
        try:
            self._write(record, now_ms)
        except OSError as error:
            self._waiting.append(record)
            self._failure = error
            log.error("the journal cannot be written, nothing is acknowledged", error=str(error))

    def flush_pending(self) -> bool:
        """Try again to write what waits; whether the journal is healthy now."""
        try:
            while self._waiting:
                self._write(self._waiting[0], unix_time_ms())
                self._waiting.popleft()
        except OSError as error:
            self._failure = error
            return False
        if self._failure is not None:
            self._failure = None
            log.info("the journal can be written again")
        return True

    def close(self) -> None:
        self.flush_pending()
        os.close(self._file)

    # --- files -------------------------------------------------------------------------

    def _write(self, record: bytes, now_ms: int) -> None:
        if self._is_full(len(record), now_ms):
            self._begin_segment(self._number + 1)
            self._begun_ms = now_ms
            self._on_sealed(self._number)
        try:
            _write_at(self._file, record, self._num_bytes)
        except OSError:
            with contextlib.suppress(OSError):  # the next try overwrites it
                os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += len(record)
        self._next_to_write += 1

    def _is_full(self, num_more_bytes: int, now_ms: int) -> bool:
        num_records = self._next_to_write - self._first_record
        if not num_records:
            return False
        limits = self._limits
        return (
            self._num_bytes + num_more_bytes > limits.max_bytes
            or num_records >= limits.max_records
            or now_ms - self._begun_ms > limits.max_age_ms
        )

    def _begin_segment(self, number: int) -> None:
        """Seal the segment, if there is one, and go on in another. Raises OSError, with
        nothing changed."""
        if number > 1:
            # Were a cut-off to have failed, the rest of a record would be sealed in.
            os.ftruncate(self._file, self._num_bytes)
        path = self._folder.segment(number)
        file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            header = pack_file_header(SEGMENT_MAGIC, FileHeader(self._life, self._next_to_write))
            _write_at(file, header, 0)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if number > 1:
            os.close(self._file)
        self._file, self._number, self._num_bytes = file, number, len(header)
        self._first_record = self._next_to_write


def _write_at(file: int, content: bytes, offset: int) -> None:
    """All of `content`, in one call unless the system takes it in pieces. Raises OSError."""
    num_written = os.pwrite(file, content, offset)
    while num_written < len(content):
        num_written += os.pwrite(file, content[num_written:], offset + num_written)
