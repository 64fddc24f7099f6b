"""What a planted bug is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """In the source of `module`, `old` becomes `new`; `old` must stand there exactly once."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A bug, in words, and the edits that make it."""

    name: str
    edits: tuple[Edit, ...]


def mutant(name: str, *edits: tuple[str, str, str]) -> Mutant:
    """Each edit as (module, old, new)."""
    return Mutant(name, tuple(Edit(*edit) for edit in edits))
