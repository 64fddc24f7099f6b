"""Folds sealed segments into a snapshot: `python -m kvmem_svc.journal.fold DIR`.

A process of its own, at low priority, so that the service goes on meanwhile. The snapshot is
written beside, renamed into place, and only then do the files go that it covers: whenever this is
killed, either the old files are whole or the new one is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
import typer

from kvmem_svc.journal.errors import JournalError, JournalLocked
from kvmem_svc.journal.folder import SCRATCH_SUFFIX, JournalFolder, open_file
from kvmem_svc.journal.load import load, pack_state
from kvmem_svc.journal.segment import FileHeader, pack_snapshot
from octavo.service import logs

log = structlog.get_logger()

NICENESS = 10
PR_SET_PDEATHSIG = 1
BUSY_EXIT_CODE = 4
DAMAGED_EXIT_CODE = 3


@dataclass(frozen=True)
class Folded:
    """What one fold did."""

    segment: int
    num_records: int
    num_bytes: int


def fold(folder: JournalFolder, until_segment: int) -> Folded | None:
    """Make a snapshot of everything before `until_segment`; None when there is nothing new.

    Raises JournalLocked when somebody reads the journal, JournalDamaged, and OSError.
    """
    with folder.fold_lock(timeout_s=0):
        if not any(number < until_segment for number in folder.segment_numbers()):
            return None
        loaded = load(folder, until_segment)
        if loaded is None:
            return None
        header = FileHeader(loaded.life, loaded.next_record)
        content = pack_snapshot(header, pack_state(loaded.memory))
        scratch = folder.snapshot(until_segment).with_suffix(SCRATCH_SUFFIX)
        with open(open_file(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)
        scratch.rename(folder.snapshot(until_segment))
        folder.remove_covered()
        return Folded(until_segment, loaded.num_replayed, len(content))


def _end_with(parent_pid: int) -> None:
    """Die when the service does: whoever starts after it waits for us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def main(
    directory: Path,
    until: Annotated[
        int | None, typer.Option(help="The first segment that stays; else the newest.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(help="End when this process does.")] = None,
) -> None:
    """Fold the sealed segments of a journal into a snapshot."""
    if parent_pid is not None:
        _end_with(parent_pid)
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    logs.setup("octavo-kvmem-fold")
    start = time.monotonic()
    try:
        folder = JournalFolder(directory, create=False)
        done = fold(folder, until or max(folder.segment_numbers(), default=0))
    except JournalLocked:
        sys.exit(BUSY_EXIT_CODE)
    except (JournalError, OSError) as error:
        log.error("the journal cannot be folded", error=str(error))
        sys.exit(DAMAGED_EXIT_CODE)
    if done is not None:
        log.info(
            "journal folded",
            snapshot=done.segment,
            num_records=done.num_records,
            num_bytes=done.num_bytes,
            duration_ms=round((time.monotonic() - start) * 1000),
        )


if __name__ == "__main__":
    typer.run(main)
