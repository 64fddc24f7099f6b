"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.sanitized import MISTAKES

RUNTIMES = ("libasan.so", "libubsan.so")
TIMEOUT_S = 120


def _runtime(name: str) -> Path:
    """Where the compiler's runtime library lies; the bare name when it has none."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    runtimes = [_runtime(name) for name in RUNTIMES]
    for runtime in runtimes:
        if not runtime.is_absolute():
            pytest.skip(f"g++ has no {runtime}")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, runtimes)),
        # Python leaves memory to the system at its end; fibers have stacks of their own.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.cuda.sanitized", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )


def test_nothing_is_found() -> None:
    done = sanitized("plain", "splits", "copies")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "clean\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        ("beyond an array", "out of bounds for type"),
        ("beyond shared memory", "AddressSanitizer: heap-buffer-overflow"),
    ],
)
def test_a_mistake_in_shared_memory_is_found(mistake: str, report: str) -> None:
    assert mistake in MISTAKES
    done = sanitized("plain", "--mistake", mistake)
    assert done.returncode != 0
    assert report in done.stderr
