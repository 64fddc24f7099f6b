"""The bytes of a journal segment and of a snapshot's frame: no files here, no core.

A segment is a header and records. A record is written with one call, so what a killed process
leaves at the end is a *prefix* of a record: fewer bytes than its header has, or a header that
is right and fewer bytes than it announces. That is a torn tail, and nothing of it was ever
answered. Everything else that does not check is damage: to tell the two apart, the header has
a checksum of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

from kvmem_svc.journal.errors import JournalDamaged, OtherVersion

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"OCTAVOKJ"
SNAPSHOT_MAGIC = b"OCTAVOKS"


class Field(NamedTuple):
    """One field of a fixed layout; `code` is its format in the `struct` module."""

    name: str
    code: str
    meaning: str


# Integers are little-endian. Magic, format version, and the checksum at the end of the first 128
# bytes stay where they are in every version, so that another version is told from damage.
# docs/journal.md shows these tables; a test compares them.
FILE_HEADER_FIELDS = (
    Field("magic", "8s", "`OCTAVOKJ` (segment) or `OCTAVOKS` (snapshot)"),
    Field("format_version", "H", "of this layout"),
    Field("core_version", "H", "of the memory core that wrote it"),
    Field("machine_boot_id", "36s", "of the machine when it was written"),
    Field("kvmem_boot_id", "64s", "the life of the state; padded with zeros"),
    Field("next_record", "Q", "number of the first record in it, or after the snapshot"),
    Field("max_sequences", "I", "rows of the sequence table"),
    Field("header_crc", "I", "CRC32C of the bytes before"),
)
RECORD_HEADER_FIELDS = (
    Field("payload_bytes", "I", "length of the payload that follows the header"),
    Field("core_version", "H", "of the memory core that carried it out"),
    Field("kind", "B", "what the payload is"),
    Field("reserved", "B", "0"),
    Field("number", "Q", "1, 2, 3, ... over the life of the state"),
    Field("unix_time_ms", "Q", "when it was written; for people, never read back"),
    Field("reply_digest", "I", "CRC32C of the reply's bytes"),
    Field("payload_crc", "I", "CRC32C of the payload"),
    Field("header_crc", "I", "CRC32C of the bytes before"),
)


def _layout(fields: tuple[Field, ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(field.code for field in fields))


_FILE_HEADER = _layout(FILE_HEADER_FIELDS)
_RECORD_HEADER = _layout(RECORD_HEADER_FIELDS)
_CRC = struct.Struct("<I")
_UNCHECKED_RECORD_HEADER = _layout(RECORD_HEADER_FIELDS[:-1])
FILE_HEADER_BYTES = _FILE_HEADER.size
RECORD_HEADER_BYTES = _RECORD_HEADER.size


@dataclass(frozen=True, slots=True)
class Life:
    """Which state a file belongs to, and what it takes to build that state again."""

    core_version: int
    machine_boot_id: str
    kvmem_boot_id: str
    max_sequences: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """How a segment or a snapshot begins."""

    life: Life
    next_record: int


@dataclass(frozen=True, slots=True)
class Record:
    """One mutation as it lies in a segment; `offset` in bytes from the segment's start."""

    offset: int
    core_version: int
    kind: int
    number: int
    unix_time_ms: int
    reply_digest: int
    payload: bytes

    @property
    def num_bytes(self) -> int:
        return RECORD_HEADER_BYTES + len(self.payload)


def crc32c(content: bytes) -> int:
    return google_crc32c.value(content)


# --- writing ---------------------------------------------------------------------------


def pack_file_header(magic: bytes, header: FileHeader) -> bytes:
    """FILE_HEADER_BYTES bytes. The ids must be ASCII that fits its fields."""
    life = header.life
    machine, kvmem = life.machine_boot_id.encode("ascii"), life.kvmem_boot_id.encode("ascii")
    assert len(machine) <= 36, f"machine_boot_id {machine!r} is too long"
    assert 0 < len(kvmem) <= 64, f"kvmem_boot_id {kvmem!r} does not fit"
    fields = (FORMAT_VERSION, life.core_version, machine, kvmem)
    packed = _FILE_HEADER.pack(magic, *fields, header.next_record, life.max_sequences, 0)
    unchecked = packed[: -_CRC.size]
    return unchecked + _CRC.pack(crc32c(unchecked))


def pack_record(
    core_version: int,
    kind: int,
    number: int,
    unix_time_ms: int,
    reply_digest: int,
    payload: bytes,
) -> bytes:
    """A record's header and payload."""
    unchecked = _UNCHECKED_RECORD_HEADER.pack(
        len(payload), core_version, kind, 0, number, unix_time_ms, reply_digest, crc32c(payload)
    )
    return b"".join((unchecked, _CRC.pack(crc32c(unchecked)), payload))


# --- reading ---------------------------------------------------------------------------


def unpack_file_header(content: bytes, magic: bytes, name: str) -> FileHeader | None:
    """The header `content` starts with; None when there are fewer bytes than a header has.

    Raises JournalDamaged, or OtherVersion for a format that this code does not know. `name` is
    what messages call the file.
    """
    if len(content) < FILE_HEADER_BYTES:
        return None
    found, version, core, machine, kvmem, next_record, max_sequences, crc = (
        _FILE_HEADER.unpack_from(content)
    )
    if found != magic:
        raise JournalDamaged(name, 0, f"it begins with {found!r}, not with {magic!r}")
    if crc != crc32c(content[: FILE_HEADER_BYTES - _CRC.size]):
        raise JournalDamaged(name, 0, "the checksum of the file's header is wrong")
    if version != FORMAT_VERSION:
        raise OtherVersion(name, 8, f"format version {version}, this is version {FORMAT_VERSION}")
    life = Life(core, _text(machine), _text(kvmem), max_sequences)
    return FileHeader(life, next_record)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii")


class SegmentReader:
    """Iterates over the records of a segment's `content`.

    Afterwards `end` is where the last whole record ends and `num_torn_bytes` what follows it.
    Raises JournalDamaged at the first byte that is neither.
    """

    def __init__(self, content: bytes, name: str, next_record: int) -> None:
        self.end = FILE_HEADER_BYTES
        self.next_record = next_record
        self._content = content
        self._name = name

    @property
    def num_torn_bytes(self) -> int:
        return len(self._content) - self.end

    def __iter__(self) -> Iterator[Record]:
        while (record := self._read()) is not None:
            self.end += record.num_bytes
            self.next_record += 1
            yield record

    def _read(self) -> Record | None:
        """The record at `end`; None when what is there is none, or the beginning of one."""
        content, offset = self._content, self.end
        start = offset + RECORD_HEADER_BYTES
        if start > len(content):
            return None
        header = _RECORD_HEADER.unpack_from(content, offset)
        payload_bytes, core, kind, _, number, unix_time_ms, reply_digest, crc, header_crc = header
        if header_crc != crc32c(content[offset : start - _CRC.size]):
            raise self._damaged("the checksum of a record's header is wrong")
        if number != self.next_record:
            raise self._damaged(f"record {number} where {self.next_record} is due")
        if start + payload_bytes > len(content):
            return None
        payload = content[start : start + payload_bytes]
        if crc != crc32c(payload):
            raise self._damaged(f"the checksum of record {number} is wrong")
        return Record(offset, core, kind, number, unix_time_ms, reply_digest, payload)

    def _damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(self._name, self.end, what)


# --- snapshots -------------------------------------------------------------------------


def pack_snapshot(header: FileHeader, state: bytes) -> bytes:
    """A snapshot's file: its header, the state's checksum, the state."""
    return pack_file_header(SNAPSHOT_MAGIC, header) + _CRC.pack(crc32c(state)) + state


def unpack_snapshot(content: bytes, name: str) -> tuple[FileHeader, bytes]:
    """Header and state of a snapshot's file. Raises JournalDamaged, OtherVersion."""
    header = unpack_file_header(content, SNAPSHOT_MAGIC, name)
    start = FILE_HEADER_BYTES + _CRC.size
    if header is None or len(content) < start:
        raise JournalDamaged(name, 0, f"it has {len(content)} bytes, a snapshot has more")
    (crc,) = _CRC.unpack_from(content, FILE_HEADER_BYTES)
    state = content[start:]
    if crc != crc32c(state):
        raise JournalDamaged(name, start, "the checksum of the snapshot's state is wrong")
    return header, state


def layout_table(fields: tuple[Field, ...]) -> list[tuple[int, int, str, str]]:
    """(offset, bytes, name, meaning) of each field, for the docs."""
    rows, offset = [], 0
    for field in fields:
        size = struct.calcsize("<" + field.code)
        rows.append((offset, size, field.name, field.meaning))
        offset += size
    return rows
