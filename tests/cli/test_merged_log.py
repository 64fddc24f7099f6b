"""Lines of services: readable on a console, whole in the file, harmless to a terminal."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest
from rich.console import Console

from octavo.cli import merged_log
from octavo.cli.merged_log import MergedLog, plain
from octavo.cli.text import printable

LINE = json.dumps(
    {"event": "pool attached", "num_blocks": 4, "why": "a b", "service": "x", "level": "info"}
)


def test_json_lines_are_read_and_others_left_alone() -> None:
    assert plain(LINE) == 'pool attached num_blocks=4 why="a b"'
    assert plain("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert plain("{not json") == "{not json"
    assert plain('["event"]') == '["event"]'
    assert plain("{}") == "{}"


def test_the_file_keeps_the_line_as_it_was_and_the_console_a_readable_one(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    log = MergedLog(tmp_path / "octavo.log", console)
    log.write("kvmem", LINE)
    log.write("scheduler", "[bold]not markup[/] " + "x" * 60)
    log.close()
    first, second = (tmp_path / "octavo.log").read_text().splitlines()
    assert first.endswith(f" kvmem     {LINE}")
    assert second.split(" ", 1)[1].startswith("scheduler [bold]not markup[/]")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        'kvmem     pool attached num_blocks=4 why="a b"',
        "scheduler [bold]not markup[/] " + "x" * 60,
    ]
    assert log.tail(1) == ["scheduler [bold]not markup[/] " + "x" * 60]


def test_the_log_is_its_owners_alone_and_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_log, "MAX_FILE_BYTES", 2000)
    log = MergedLog(tmp_path / "octavo.log")
    for number in range(200):
        log.write("a", f"{number} " + "x" * 100)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["octavo.log", "octavo.log.1"]
    assert all(file.stat().st_size <= 2000 for file in files)
    assert "199 " in files[0].read_text()
    assert stat.S_IMODE(files[1].stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain, ü, 日本, 🐙 \n\t", "plain, ü, 日本, 🐙 \n\t"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\rb\x07\x7f", "a␍b␇\N{REPLACEMENT CHARACTER}"),
        ("\x9b31m", "\N{REPLACEMENT CHARACTER}31m"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_no_control_character_reaches_a_terminal(text: str, safe: str) -> None:
    assert printable(text) == safe
