"""The disk of the memory service: what outlives its processes, and what becomes of it.

The records are the mutations themselves, with the reply that each was given. What files, checksums
and torn bytes do is tested beside the real journal; here it is whether carrying the mutations out
again leads to the same state, with the same replies, wherever a snapshot came in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

import msgpack
import numpy as np

from kvmem_svc.core import state
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Mutation, Reply
from simulator.worker import expect


@dataclass(frozen=True)
class Record:
    mutation: Mutation
    reply: Reply


class Disk:
    """One journal: a snapshot, and the records since. Empty: the next life is another one."""

    def __init__(self) -> None:
        self.num_states = 0
        self._snapshot: bytes | None = None
        self._records: list[Record] = []
        # Half of it was written when the process died.
        self._torn: Record | None = None

    def append(self, record: Record) -> None:
        self._records.append(record)

    def tear(self, record: Record) -> None:
        """The process dies while it writes the record."""
        self._torn = record

    def delete(self) -> None:
        """Somebody deletes the journal, or it does not survive."""
        self._snapshot = None
        self._records = []
        self._torn = None

    def begin(self, max_sequences: int) -> KvMemory:
        """A new life, whose journal begins here."""
        self.delete()
        self.num_states += 1
        memory = KvMemory(f"kvmem-{self.num_states}", max_sequences=max_sequences)
        self._snapshot = packed(memory)
        return memory

    def recover(self, former: KvMemory, draw: Random) -> KvMemory | None:
        """The state that the journal leads to; None when there is no journal.

        Raises Violation when that is not `former`, what the process had in memory when it died.
        """
        if self._snapshot is None:
            return None
        if draw.random() < 0.5:
            count = len(self._records)
            self._fold(draw.choice([count, draw.randint(0, count)]))
        memory = replayed(self._snapshot, self._records)
        content = packed(memory)
        torn, self._torn = self._torn, None
        if torn is not None:
            content = packed(replayed(content, [torn]))
        expect(
            content == packed(former),
            "the replayed state is the live one",
            f"{len(self._records)} records lead to another state of {former.ledger.kvmem_boot_id}",
        )
        return memory

    def _fold(self, count: int) -> None:
        """Make a snapshot of the first `count` records, as is done beside the running service."""
        assert self._snapshot is not None
        self._snapshot = packed(replayed(self._snapshot, self._records[:count]))
        del self._records[:count]


def packed(memory: KvMemory) -> bytes:
    """As a snapshot holds it; equal for equal states."""
    content = msgpack.packb(state.dump(memory))
    assert content is not None
    return content


def replayed(snapshot: bytes, records: Sequence[Record]) -> KvMemory:
    """The memory after the records. Raises Violation when a reply is another one this time."""
    memory = state.load(msgpack.unpackb(snapshot))
    for record in records:
        reply = memory.commit(record.mutation)
        expect(
            _plain(reply) == _plain(record.reply),
            "replies are replayed",
            f"{type(record.mutation).__name__} was replied to with {record.reply}, now {reply}",
        )
    return memory


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return [_plain(getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
