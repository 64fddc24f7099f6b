"""Asking a memory service, for commands that show what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from octavo.admin import KvMemoryInspector
from octavo.cli.state import StateDir, default_state_dir
from octavo.errors import UnavailableError


def kvmem_address(address: str | None, state_dir: Path | None) -> str:
    """The one given, or that of the stack on the state folder. Raises StateError."""
    if address is not None:
        return address
    return StateDir(state_dir or default_state_dir()).running().addresses["kvmem"]


@contextlib.contextmanager
def inspecting(address: str) -> Iterator[KvMemoryInspector]:
    """Raises UnavailableError with a sentence for a person when nobody answers."""
    try:
        with KvMemoryInspector(address) as inspector:
            yield inspector
    except UnavailableError as error:
        raise UnavailableError(
            f"the memory service cannot be reached at {address} ({error.message.split(';')[0]})",
            reason=error.reason,
        ) from error
