"""The one log of all services: lines with a prefix on the console, and a file beside it."""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
from collections import deque
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from octavo.cli.text import printable

MAX_FILE_BYTES = 16 * 1024 * 1024
TAIL_LINES = 200
_COLOURS = ("cyan", "magenta", "green", "blue", "bright_yellow")
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
# Shown by the prefix, the time of the line, or its colour.
_SHOWN_OTHERWISE = frozenset({"event", "service", "level", "timestamp"})


class _OwnersFile(logging.handlers.RotatingFileHandler):
    """A rotating file that only its owner can read, after a rotation as well."""

    def _open(self) -> TextIOWrapper:
        file = open(  # noqa: SIM115 (the handler closes it)
            self.baseFilename,
            self.mode,
            encoding=self.encoding,
            errors=self.errors,
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )
        return cast(TextIOWrapper, file)


class MergedLog:
    """Takes lines of named services. `console` None: they go to the file alone.

    The file is rotated once, so it never takes more than twice MAX_FILE_BYTES.
    """

    def __init__(self, path: Path, console: Console | None = None) -> None:
        self.path = path
        self._console = console
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._styles: dict[str, str] = {}
        self._file = _OwnersFile(
            path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace"
        )

    def write(self, service: str, line: str) -> None:
        """Take one line as the service wrote it."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = f"{now} {service:<9} {line}"
        self._file.emit(logging.LogRecord(service, logging.INFO, "", 0, entry, None, None))
        self._tail.append(f"{service:<9} {plain(line)}")
        if self._console is not None:
            self._console.print(self._styled(service, line), soft_wrap=True)

    def tail(self, num_lines: int) -> list[str]:
        """The newest lines, oldest first, in the form a person reads."""
        return list(self._tail)[-num_lines:]

    def close(self) -> None:
        self._file.close()

    def _styled(self, service: str, line: str) -> Text:
        style = self._styles.setdefault(service, _COLOURS[len(self._styles) % len(_COLOURS)])
        level = str(_fields(line).get("level", ""))
        return Text.assemble((f"{service:<9} ", style), (plain(line), _LEVEL_STYLES.get(level, "")))


def plain(line: str) -> str:
    """A JSON log line as `event key=value ...`; any other line as it is, made printable."""
    fields = _fields(line)
    if "event" not in fields:
        return printable(line)
    rest = " ".join(
        f"{key}={_brief(value)}" for key, value in fields.items() if key not in _SHOWN_OTHERWISE
    )
    return printable(f"{fields['event']} {rest}".rstrip())


def _fields(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _brief(value: Any) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value)
