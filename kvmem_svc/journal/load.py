"""Builds the memory again from what a journal says, and notices when that comes out differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from kvmem_svc import convert
from kvmem_svc.core import state
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import CORE_VERSION
from kvmem_svc.journal.encoding import decode, packed
from kvmem_svc.journal.errors import JournalDiverged, OtherVersion
from kvmem_svc.journal.folder import JournalFolder
from kvmem_svc.journal.reader import JournalReader, Snapshot
from kvmem_svc.journal.segment import Life, Record
from kvmem_svc.journal.writer import Tail


@dataclass(frozen=True)
class Loaded:
    """A memory as of the record before `next_record`. tail None: no segment was read."""

    memory: KvMemory
    life: Life
    tail: Tail | None
    next_record: int
    num_replayed: int
    num_torn_bytes: int


def load(
    folder: JournalFolder,
    until_segment: int | None = None,
    on_record: Callable[[str, Record], None] = lambda _name, _record: None,
) -> Loaded | None:
    """Snapshot and records of a journal, carried out; None when there is none.

    `until_segment`: only the segments below it, all of them sealed. `on_record` is called with
    each record before it is carried out. Raises JournalDamaged, and of its kinds JournalDiverged
    and OtherVersion.
    """
    reader = JournalReader(folder, until_segment)
    life = reader.life
    if life is None:
        return None
    name = "the oldest file" if reader.snapshot is None else "the snapshot"
    _check_version(life.core_version, name, 0)
    memory = _first_state(life, reader.snapshot)
    next_record = reader.snapshot.header.next_record if reader.snapshot else 1
    num_replayed = 0
    for file_name, record in reader.records():
        on_record(file_name, record)
        replay(memory, record, file_name)
        num_replayed += 1
    return Loaded(
        memory,
        life,
        reader.tail,
        next_record + num_replayed,
        num_replayed,
        reader.num_torn_bytes,
    )


def _first_state(life: Life, snapshot: Snapshot | None) -> KvMemory:
    if snapshot is None:
        return KvMemory(life.kvmem_boot_id, max_sequences=life.max_sequences)
    try:
        return unpack_state(snapshot.state)
    except MemoryError:
        raise
    except Exception as error:
        raise JournalDiverged(
            f"{snapshot.segment:06}.snap", 0, f"the state in it makes no sense here: {error!r}"
        ) from error


def replay(memory: KvMemory, record: Record, file_name: str) -> None:
    """Carry a record out again. Raises JournalDiverged when it cannot be, or when its reply is
    not the one that was given; the memory is then not to be used."""
    _check_version(record.core_version, file_name, record.offset)
    try:
        mutation = decode(record.kind, record.payload, memory.ledger.fence)
        digest = convert.reply_digest(memory.commit(mutation))
    except MemoryError:
        raise
    except Exception as error:
        raise JournalDiverged(
            file_name,
            record.offset,
            f"record {record.number} cannot be carried out again: {error!r}",
        ) from error
    if digest != record.reply_digest:
        raise JournalDiverged(
            file_name,
            record.offset,
            f"record {record.number} is replied to with {digest:08x} and was with"
            f" {record.reply_digest:08x}",
        )


def _check_version(core_version: int, file_name: str, offset: int) -> None:
    if core_version != CORE_VERSION:
        raise OtherVersion(
            file_name,
            offset,
            f"written by version {core_version} of the memory core, this is {CORE_VERSION}",
        )


def pack_state(memory: KvMemory) -> bytes:
    """The bytes of a memory's state; equal for equal states."""
    return packed(state.dump(memory))


def unpack_state(packed: bytes) -> KvMemory:
    """What `pack_state` packed."""
    return state.load(msgpack.unpackb(packed))
