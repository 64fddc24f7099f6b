"""`octavo top` and `octavo kvmem show` beside the three services at work."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.system.requests import greedy, token_prompt
from tests.system.stack import REPOSITORY, Stack, wait_until

SOON_S = 60


def octavo(*arguments: str) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        cwd=REPOSITORY,
        env={**plain, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def busy(stack: Stack) -> Iterator[None]:
    """Three callers, each with one request of two candidates after the other."""
    leaving = threading.Event()

    def call(number: int) -> None:
        with stack.client() as client:
            for turn in itertools.count():
                name, prompt = f"seen-{number}-{turn}", token_prompt(40, salt=21 + number)
                with client.stream(prompt, greedy(400, n=2), request_id=name) as chunks:
                    for _ in chunks:
                        if leaving.is_set():
                            return

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call, number) for number in range(3)]
        try:
            yield
        finally:
            leaving.set()
        for each in calls:
            each.result()


def test_what_runs_is_seen(tiny: Stack) -> None:
    address = tiny.addresses["kvmem"]
    with busy(tiny):
        wait_until(lambda: tiny.pool_stats().num_shared_blocks > 0, "they are under way")
        shown = octavo("top", "--once", "--interval", "0.3", "--address", address)
        picture = octavo("kvmem", "show", address)
    rates = re.search(r"([\d.]+) steps/s, ([\d.]+) tokens/s", shown)
    assert rates is not None, shown
    steps_per_s, tokens_per_s = map(float, rates.groups())
    assert 0 < steps_per_s < tokens_per_s
    assert "held by scheduler-" in shown
    rows = [line for line in shown.splitlines() if line.startswith("seen-")]
    assert any("running" in row and "shared)" in row for row in rows), shown
    assert re.search(r"^A +seen-\d-\d+ +[12] ", picture, re.MULTILINE), picture
