"""The journal's folder: what its files are called, who may work on it, what is moved out of it.

NNNNNN.log          segments; the one with the highest number is being written
NNNNNN.snap         a snapshot of the state before segment NNNNNN
<what>-<time>/      a journal that was set aside: damaged or diverged
lock                held by the service that writes, or by `purge`
fold.lock           held by who folds segments into a snapshot, or reads them all
*.tmp               a snapshot being written
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvmem_svc.journal.errors import JournalError, JournalLocked

SEGMENT_SUFFIX = ".log"
SNAPSHOT_SUFFIX = ".snap"
SCRATCH_SUFFIX = ".tmp"
# A set-aside journal holds prompts; only the newest ones are kept.
MAX_SET_ASIDE = 3
FOLD_LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02

_NUMBERED = re.compile(r"(\d{6,})\.(log|snap)")
_SET_ASIDE = re.compile(r"(damaged|diverged)-\d{8}T\d{6}(-\d+)?")
_BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


def machine_boot_id() -> str:
    """Changes when the machine starts; ASCII, at most 36 bytes."""
    try:
        return _BOOT_ID_PATH.read_text().strip()
    except OSError:  # not Linux
        return f"booted-at-{int(psutil.boot_time())}"


class JournalFolder:
    """A folder readable by its owner alone; its files as well. Raises JournalError."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path.absolute()
        try:
            if create:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if self.path.stat().st_mode & 0o077:
                    self.path.chmod(0o700)
            elif not self.path.is_dir():
                raise JournalError(f"there is no journal folder {self.path}")
        except OSError as error:
            raise JournalError(f"cannot use the journal folder {self.path}: {error}") from error

    # --- names -------------------------------------------------------------------------

    def segment(self, number: int) -> Path:
        return self.path / f"{number:06}{SEGMENT_SUFFIX}"

    def snapshot(self, number: int) -> Path:
        return self.path / f"{number:06}{SNAPSHOT_SUFFIX}"

    def segment_numbers(self) -> list[int]:
        """Lowest first."""
        return self._numbers(SEGMENT_SUFFIX)

    def snapshot_numbers(self) -> list[int]:
        """Lowest first."""
        return self._numbers(SNAPSHOT_SUFFIX)

    def _numbers(self, suffix: str) -> list[int]:
        found = (_NUMBERED.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(m[1]) for m in found if m is not None and f".{m[2]}" == suffix)

    def files(self) -> list[Path]:
        """Segments, snapshots and scratch files: a journal, as opposed to its locks."""
        return sorted(
            path
            for path in self.path.iterdir()
            if _NUMBERED.fullmatch(path.name) or path.suffix == SCRATCH_SUFFIX
        )

    def set_aside_folders(self) -> list[Path]:
        """Oldest first."""
        found = [p for p in self.path.iterdir() if p.is_dir() and _SET_ASIDE.fullmatch(p.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    # --- locks -------------------------------------------------------------------------

    def lock(self) -> int:
        """Hold the folder until the returned descriptor is closed. Raises JournalLocked."""
        descriptor = self._try_lock("lock")
        if descriptor is None:
            raise JournalLocked(
                f"another process works on the journal {self.path}: stop it first, or choose"
                " another folder with --journal"
            )
        return descriptor

    @contextlib.contextmanager
    def fold_lock(self, timeout_s: float = FOLD_LOCK_TIMEOUT_S) -> Iterator[None]:
        """Nobody folds meanwhile. A folding process ends with the service that started it, so
        waiting for it is short. Raises JournalLocked."""
        deadline = time.monotonic() + timeout_s
        while (descriptor := self._try_lock("fold.lock")) is None:
            if time.monotonic() >= deadline:
                raise JournalLocked(f"the journal {self.path} is being folded or read; try again")
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            os.close(descriptor)

    def _try_lock(self, name: str) -> int | None:
        try:
            descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"cannot use the journal folder {self.path}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    # --- taking away -------------------------------------------------------------------

    def set_aside(self, what: str) -> Path:
        """Move the journal into a folder `<what>-<time>`, and drop the oldest such folders."""
        stem = f"{what}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        target, suffix = self.path / stem, 1
        while target.exists():
            suffix += 1
            target = self.path / f"{stem}-{suffix}"
        target.mkdir(mode=0o700)
        for path in self.files():
            path.rename(target / path.name)
        for old in self.set_aside_folders()[:-MAX_SET_ASIDE]:
            shutil.rmtree(old)
        return target

    def remove_journal(self) -> int:
        """Delete segments, snapshots and scratch files; how many there were."""
        files = self.files()
        for path in files:
            path.unlink()
        return len(files)

    def remove_covered(self) -> None:
        """Delete what the newest snapshot makes superfluous, and what was never finished."""
        newest = max(self.snapshot_numbers(), default=0)
        for number in self.segment_numbers():
            if number < newest:
                self.segment(number).unlink()
        for number in self.snapshot_numbers():
            if number < newest:
                self.snapshot(number).unlink()
        for path in self.path.glob(f"*{SCRATCH_SUFFIX}"):
            path.unlink()

    def remove_set_aside(self) -> int:
        """Delete what was set aside; how many journals that were."""
        folders = self.set_aside_folders()
        for path in folders:
            shutil.rmtree(path)
        return len(folders)


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a file that its owner alone may read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
