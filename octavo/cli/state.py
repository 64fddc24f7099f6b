"""Where a running stack keeps what it is: lock, sockets, log, and `state.json`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import platformdirs
import psutil

from octavo.service.server import MAX_UNIX_PATH_BYTES

STATE_DIR_VARIABLE = "OCTAVO_STATE_DIR"
SERVICES = ("scheduler", "worker", "kvmem")


class StateError(Exception):
    """The state folder cannot be used, or nothing runs there; one sentence for a person."""


@dataclass(frozen=True)
class RunningStack:
    """What `state.json` says. created_at tells its process from a later one of the same pid."""

    pid: int
    created_at: float
    model: str
    addresses: Mapping[str, str]
    listen: str | None = None
    service_pids: Mapping[str, int] = field(default_factory=dict)

    @property
    def scheduler(self) -> str:
        return self.addresses["scheduler"]

    def is_alive(self) -> bool:
        try:
            return psutil.Process(self.pid).create_time() == self.created_at
        except psutil.NoSuchProcess:
            return False


def default_state_dir() -> Path:
    """$OCTAVO_STATE_DIR, else the user's own state folder."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    return Path(chosen) if chosen else Path(platformdirs.user_state_dir("octavo"))


def journal_path(state_dir: Path) -> Path:
    """Where the memory service of the stack in `state_dir` keeps its journal."""
    return state_dir.absolute() / "journal"


class StateDir:
    """One state folder, made readable by its owner alone: prompts pass through what is in it.

    Raises StateError when the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"cannot use the state folder {self.path}: {error}") from error
        self.log_path = self.path / "octavo.log"
        self.journal_path = journal_path(self.path)
        self._state_path = self.path / "state.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder. Raises StateError when another stack does."""
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                running = self._read()
                by = f" (pid {running.pid})" if running is not None else ""
                raise StateError(
                    f"an Octavo is already running on {self.path}{by}; stop it first, or choose"
                    " another folder with --state-dir"
                ) from None
            try:
                yield
            finally:
                self._state_path.unlink(missing_ok=True)

    def addresses(self) -> dict[str, str]:
        """A unix socket for each service; in a short folder when this one's path is too long.

        Raises StateError when there is no folder short enough.
        """
        folder = self.path
        if not _fits(folder):
            folder = _short_folder(self.path)
        return {service: f"unix:{folder / service}.sock" for service in SERVICES}

    def discard_short_folder(self) -> None:
        """Remove the folder that `addresses` made beside this one, once no socket is in it."""
        if not _fits(self.path):
            with contextlib.suppress(OSError):
                _short_folder(self.path).rmdir()

    def write(self, stack: RunningStack) -> None:
        scratch = self._state_path.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(stack), indent=2) + "\n")
        scratch.replace(self._state_path)

    def running(self) -> RunningStack:
        """The stack that runs here. Raises StateError when there is none."""
        stack = self._read()
        if stack is None or not stack.is_alive():
            raise StateError(
                f"no Octavo is running on {self.path}: start one with `octavo up`,"
                " or say where it is with --address"
            )
        return stack

    def _read(self) -> RunningStack | None:
        try:
            return RunningStack(**json.loads(self._state_path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def _fits(folder: Path) -> bool:
    longest = max(len(os.fsencode(folder / service)) for service in SERVICES)
    return longest + len(".sock") <= MAX_UNIX_PATH_BYTES


def _short_folder(state_path: Path) -> Path:
    """A folder for the sockets of the state folder `state_path`, always the same one."""
    digest = hashlib.sha256(os.fsencode(state_path)).hexdigest()[:12]
    base = Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"
    for folder in (base, base / digest):
        folder.mkdir(mode=0o700, exist_ok=True)
        # The folder for temporary files is everybody's: what stands there may be a trap.
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise StateError(f"{folder} is not a folder of yours alone; remove it, or set TMPDIR")
    if not _fits(base / digest):
        raise StateError(
            f"the path of the state folder, {state_path}, is too long for unix sockets (at most"
            f" {MAX_UNIX_PATH_BYTES} bytes), and so is {base / digest}: choose a shorter one with"
            " --state-dir"
        )
    return base / digest
