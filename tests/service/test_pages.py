"""The heap of a service on large pages."""

from __future__ import annotations

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
import re
from octavo.service.pages import use_large_pages

def on_large_pages():
    smaps = open("/proc/self/smaps").read()
    return 1024 * sum(map(int, re.findall(r"AnonHugePages: +([0-9]+) kB", smaps)))

kept = [str(n) for n in range(400_000)]
before = on_large_pages()
moved = use_large_pages()
gained = on_large_pages() - before
assert kept == [str(n) for n in range(400_000)]
print(moved, gained)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    moved, gained = map(int, done.stdout.split())
    if not moved:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        pytest.skip(f"not done here: {modes.read_text() if modes.is_file() else 'no large pages'}")
    # How much of a heap lies in whole large pages is the allocator's affair.
    assert moved % LARGE_PAGE_BYTES == 0
    assert gained >= moved // 2  # some may have been on large pages before
