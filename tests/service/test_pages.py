"""The heap of a service on large pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.service.pages import LARGE_PAGE_BYTES, heap_ranges

MIB = 1 << 20

MAPS = """\
00400000-00900000 r-xp 00000000 08:01 11 /usr/bin/python3
00a00000-00c00000 rw-p 00500000 08:01 11 /usr/bin/python3
01000000-01900000 rw-p 00000000 00:00 0 [heap]
10100000-10700000 rw-p 00000000 00:00 0
20000000-20100000 rw-p 00000000 00:00 0
30000000-40000000 ---p 00000000 00:00 0
7ffc0000000-7ffc0800000 rw-p 00000000 00:00 0 [stack]
"""


def test_the_heap_and_anonymous_memory_count_and_only_what_large_pages_fit_into():
    ranges = [(first // MIB, length // MIB) for first, length in heap_ranges(MAPS.splitlines())]
    # Rounded up to a large page where it begins, and down where it ends; one is too small for any.
    assert ranges == [(0x010, 8), (0x102, 4)]


def test_a_heap_is_moved_and_keeps_what_is_in_it():
    program = """
from octavo.service.pages import use_large_pages
kept = [str(n) for n in range(400_000)]
moved = use_large_pages()
assert kept == [str(n) for n in range(400_000)]
print(moved)
print(open("/proc/self/smaps").read())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    moved, _, smaps = done.stdout.partition("\n")
    on_large_pages = sum(map(int, re.findall(r"AnonHugePages: +(\d+) kB", smaps))) * 1024
    if not int(moved):
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        pytest.skip(f"not done here: {modes.read_text() if modes.is_file() else 'no large pages'}")
    assert int(moved) >= 8 * LARGE_PAGE_BYTES
    assert on_large_pages >= int(moved) // 2  # numbers made since then may have come and gone
