"""A service's heap on large pages.

A service wakes up once a step, for a millisecond, beside a model that has streamed its weights
through every cache meanwhile, also through the one for addresses (TLB). Then each page of the heap
it touches costs a walk through page tables that have to come from memory themselves. On pages of
2 MiB there are few to walk: scheduler and memory service take about a tenth less CPU a step.

Linux does it on request (6.1 and later); elsewhere nothing happens.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

LARGE_PAGE_BYTES = 2 * 1024 * 1024
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
MAPS = Path("/proc/self/maps")
# By then a service has loaded what it needs, as a rule. Moving takes it 20 to 30 ms.
SETTLED_AFTER_S = 3.0


def heap_ranges(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(first address, length) of what large pages fit into, of the lines of /proc/PID/maps: the
    heap proper and anonymous memory, of which Python's own allocator has its arenas."""
    for line in maps:
        span, access, _, _, _, *name = line.split(maxsplit=5)
        if not access.startswith("rw") or (name and name[0].strip() != "[heap]"):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        first = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        last = end // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        if first < last:
            yield first, last - first


def use_large_pages() -> int:
    """Move the heap, as it is now, to large pages; how many bytes of it were moved.

    What is not backed by memory (stacks, reserves) stays as it is.
    """
    if not MAPS.is_file():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for first, length in list(heap_ranges(MAPS.read_text().splitlines())):
        if madvise(first, length, MADV_HUGEPAGE):
            continue
        for address in range(first, first + length, LARGE_PAGE_BYTES):
            # Page by page: one with nothing in it is refused, and the others are not.
            if not madvise(address, LARGE_PAGE_BYTES, MADV_COLLAPSE):
                num_bytes += LARGE_PAGE_BYTES
    return num_bytes


def use_large_pages_soon() -> None:
    """Once the service whose event loop this is has settled."""
    asyncio.get_running_loop().call_later(SETTLED_AFTER_S, use_large_pages)
