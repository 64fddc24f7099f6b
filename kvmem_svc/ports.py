"""What the servicer needs of a journal."""

from __future__ import annotations

from typing import Protocol

from kvmem_svc.core.mutations import Mutation


class Journal(Protocol):
    """Keeps every mutation, in order, so that the state outlives the process."""

    @property
    def healthy(self) -> bool:
        """False: the newest mutations could not be written. Nothing may be acknowledged."""
        ...

    def append(self, mutation: Mutation, reply_digest: int) -> None:
        """Write a mutation that was carried out. Never raises for an I/O error: what could not
        be written stays pending, in order, and `healthy` is False until it is."""
        ...

    def flush_pending(self) -> bool:
        """Try to write what is pending; True when nothing is (any more)."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class NullJournal:
    """No journal: the state dies with the process."""

    healthy = True

    def append(self, mutation: Mutation, reply_digest: int) -> None:
        pass

    def flush_pending(self) -> bool:
        return True

    def close(self) -> None:
        pass
