"""docs/journal.md shows the layout that the code has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kvmem_svc.journal.encoding import KINDS
from kvmem_svc.journal.segment import FILE_HEADER_FIELDS, RECORD_HEADER_FIELDS, layout_table
from kvmem_svc.journal.writer import SegmentLimits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "journal.md"


def rows(table: Iterable[Iterable[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in table)


def expected_tables() -> dict[str, str]:
    return {
        "file header": rows(
            (offset, size, f"`{name}`", meaning)
            for offset, size, name, meaning in layout_table(FILE_HEADER_FIELDS)
        ),
        "record header": rows(
            (offset, size, f"`{name}`", meaning)
            for offset, size, name, meaning in layout_table(RECORD_HEADER_FIELDS)
        ),
        "kinds": rows((kind.number, kind.name, kind.payload) for kind in KINDS.values()),
    }


def with_tables(page: str) -> str:
    """The page with its tables as they are to be."""
    for name, table in expected_tables().items():
        before, rest = page.split(f"<!-- {name} -->\n")
        head = "".join(rest.splitlines(keepends=True)[:2])
        after = rest[rest.index("<!-- end -->") :]
        page = f"{before}<!-- {name} -->\n{head}{table}{after}"
    return page


def test_the_page_shows_the_layout() -> None:
    """OCTAVO_WRITE_DOCS=1 writes the tables instead."""
    page = PAGE.read_text()
    if os.environ.get("OCTAVO_WRITE_DOCS"):
        PAGE.write_text(with_tables(page))
    assert PAGE.read_text() == with_tables(page)


def test_the_page_tells_the_limits() -> None:
    page, limits = PAGE.read_text(), SegmentLimits()
    assert f"when {limits.max_records} records, {limits.max_bytes >> 20} MiB" in page
    assert limits.max_age_ms == 3_600_000
    assert "or an hour" in page
