"""From a folder to a memory and a journal to go on with: what a start of the service does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import structlog

from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import CORE_VERSION
from kvmem_svc.journal.errors import JournalDamaged, JournalDiverged, JournalError, OtherVersion
from kvmem_svc.journal.file_journal import FileJournal
from kvmem_svc.journal.folder import JournalFolder, machine_boot_id
from kvmem_svc.journal.load import Loaded, load
from kvmem_svc.journal.reader import machine_boot_ids
from kvmem_svc.journal.segment import Life
from kvmem_svc.journal.writer import SegmentLimits

log = structlog.get_logger()


class Outcome(StrEnum):
    """What became of the journal that was there. All but RECOVERED begin another life."""

    NEW = "new"
    RECOVERED = "recovered"
    # From before a reboot of the machine: the KV bytes are gone, the files were removed.
    VOID = "void"
    # Another version of the core, or a replay that differs: set aside.
    DIVERGED = "diverged"
    # Damaged, and set aside because that was asked for.
    DISCARDED = "discarded"


@dataclass(frozen=True)
class Report:
    """set_aside: where the former journal is now."""

    outcome: Outcome
    num_records: int = 0
    num_torn_bytes: int = 0
    duration_ms: int = 0
    set_aside: Path | None = None

    @property
    def recovered(self) -> bool:
        """The state of a former process goes on: same boot id."""
        return self.outcome is Outcome.RECOVERED


def recover(
    directory: Path,
    new_boot_id: Callable[[], str],
    *,
    max_sequences: int,
    limits: SegmentLimits | None = None,
    discard_damaged: bool = False,
) -> tuple[KvMemory, FileJournal, Report]:
    """The memory that the journal in `directory` leads to, and the journal to go on with.

    `new_boot_id` names a new life where the old one cannot go on. `max_sequences` is of a new
    life; one that is recovered keeps its own. Raises JournalError: JournalLocked while another
    process has the folder, JournalDamaged unless `discard_damaged`.
    """
    start = time.monotonic()
    folder = JournalFolder(directory)
    lock = folder.lock()
    try:
        with folder.fold_lock():
            loaded, report = _load(folder, discard_damaged)
        if loaded is None:
            memory = KvMemory(new_boot_id(), max_sequences=max_sequences)
            life = Life(CORE_VERSION, machine_boot_id(), memory.ledger.kvmem_boot_id, max_sequences)
            tail = None
        else:
            memory, life, tail = loaded.memory, loaded.life, loaded.tail
        journal = FileJournal(folder, lock, life, tail, limits or SegmentLimits())
    except OSError as error:
        os.close(lock)
        raise JournalError(f"cannot use the journal {folder.path}: {error}") from error
    except BaseException:
        os.close(lock)
        raise
    report = replace(report, duration_ms=round((time.monotonic() - start) * 1000))
    _tell(folder, report, life, max_sequences)
    return memory, journal, report


def _load(folder: JournalFolder, discard_damaged: bool) -> tuple[Loaded | None, Report]:
    """What the folder leads to. Without a Loaded the folder is ready for a new journal."""
    written_on = machine_boot_ids(folder)
    if written_on and machine_boot_id() not in written_on:
        folder.remove_journal()
        return None, Report(Outcome.VOID)
    try:
        loaded = load(folder)
    except (OtherVersion, JournalDiverged) as error:
        log.error("the journal cannot be gone on with and is set aside", error=str(error))
        return None, Report(Outcome.DIVERGED, set_aside=folder.set_aside("diverged"))
    except JournalDamaged as error:
        if not discard_damaged:
            raise _with_advice(folder, error) from error
        log.error("the journal is damaged and set aside", error=str(error))
        return None, Report(Outcome.DISCARDED, set_aside=folder.set_aside("damaged"))
    folder.remove_covered()
    if loaded is None:
        return None, Report(Outcome.NEW)
    return loaded, Report(Outcome.RECOVERED, loaded.num_replayed, loaded.num_torn_bytes)


def _with_advice(folder: JournalFolder, error: JournalDamaged) -> JournalDamaged:
    return JournalDamaged(
        error.file,
        error.offset,
        f"{error.what}. The journal {folder.path} is damaged: `octavo kvmem verify {folder.path}`"
        f" says what is whole, `octavo kvmem purge {folder.path}` deletes it, and"
        " --discard-damaged-journal sets it aside and starts with an empty memory",
    )


def _tell(folder: JournalFolder, report: Report, life: Life, max_sequences: int) -> None:
    log.info(
        "journal",
        folder=str(folder.path),
        outcome=report.outcome.value,
        kvmem_boot_id=life.kvmem_boot_id,
        num_records=report.num_records,
        duration_ms=report.duration_ms,
    )
    if report.outcome is Outcome.VOID:
        log.warning("the journal was from before a reboot: everything in it is gone")
    if report.num_torn_bytes:
        log.warning(
            "the end of the journal was torn and is cut off: it was never answered",
            num_bytes=report.num_torn_bytes,
        )
    if life.max_sequences != max_sequences:
        log.warning(
            "the recovered memory keeps the max_sequences it was begun with",
            max_sequences=life.max_sequences,
            asked_for=max_sequences,
        )
