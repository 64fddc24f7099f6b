"""The journal that the service writes to: records in segments, folded in the background."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import structlog

from kvmem_svc.core.mutations import Mutation
from kvmem_svc.journal.encoding import encode
from kvmem_svc.journal.fold import BUSY_EXIT_CODE, NICENESS
from kvmem_svc.journal.folder import JournalFolder
from kvmem_svc.journal.segment import Life
from kvmem_svc.journal.writer import SegmentLimits, SegmentWriter, Tail

log = structlog.get_logger()

STOP_TIMEOUT_S = 5.0


class FileJournal:
    """A `kvmem_svc.ports.Journal` in a folder whose lock it holds."""

    def __init__(
        self,
        folder: JournalFolder,
        lock: int,
        life: Life,
        tail: Tail | None,
        limits: SegmentLimits,
    ) -> None:
        """`lock`: the descriptor that holds the folder, from here on this journal's to close.
        Raises OSError."""
        self._fold = BackgroundFold(folder)
        self._writer = SegmentWriter(folder, life, tail, limits, self._fold.start)
        self._lock = lock

    @property
    def healthy(self) -> bool:
        return self._writer.healthy

    @property
    def failure(self) -> str:
        """Why it is not healthy; else empty."""
        return self._writer.failure

    @property
    def num_records(self) -> int:
        """Over the life of the state, those not yet written included."""
        return self._writer.next_record - 1

    def append(self, mutation: Mutation, reply_digest: int) -> None:
        kind, payload = encode(mutation)
        self._writer.append(kind, payload, reply_digest)

    def flush_pending(self) -> bool:
        return self._writer.flush_pending()

    def close(self) -> None:
        """Stop folding, write what is pending if that is possible, and let the folder go."""
        self._fold.stop()
        self._writer.close()
        os.close(self._lock)


class BackgroundFold:
    """At most one folding process at a time. What is sealed while one runs is the next one's."""

    def __init__(self, folder: JournalFolder) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, until_segment: int) -> None:
        """Fold what is before `until_segment`. To be called from the main thread: the process
        ends with the thread that starts it."""
        if self._process is not None and self._process.poll() is None:
            return
        command = [
            *(sys.executable, "-m", "kvmem_svc.journal.fold", str(self._folder.path)),
            *("--until", str(until_segment), "--parent-pid", str(os.getpid())),
        ]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:  # it stays longer than it needs to, that is all
            log.error("the journal cannot be folded", error=str(error))
            return
        # From its first instruction on: starting takes longer than folding.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        self._process = process
        threading.Thread(target=_wait_for, args=(process,), daemon=True).start()

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    if status not in (0, BUSY_EXIT_CODE) and status > 0:
        log.error("folding the journal failed", exit_status=status)
