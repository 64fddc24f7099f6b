"""What can be wrong with a journal, as sentences for the person who runs the service.

JournalError             the service cannot start on this journal
├── JournalLocked        another process works on the folder
└── JournalDamaged       bytes before the end are not what was written
    └── JournalDiverged  the records are whole, but carrying them out again gives another reply
"""

from __future__ import annotations


class JournalError(Exception):
    """The journal cannot be used; one sentence for a person."""


class JournalLocked(JournalError):
    """Another process holds the folder."""


class JournalDamaged(JournalError):
    """What was written is not what is there. `file` and `offset` (bytes) say where."""

    def __init__(self, file: str, offset: int, what: str) -> None:
        super().__init__(f"{file}, byte {offset}: {what}")
        self.file = file
        self.offset = offset
        self.what = what


class JournalDiverged(JournalDamaged):
    """Carrying out a record again did not give the reply that was given then."""


class OtherVersion(JournalDamaged):
    """Written by another version of the format or of the memory core."""
