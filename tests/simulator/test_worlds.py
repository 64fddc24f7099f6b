"""Whole worlds: many seeds without a violation, every mark reached, every replay the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from simulator.callers import Caller
from simulator.marks import MARKS
from simulator.promises import PROMISES
from simulator.world import Outcome, simulate

NUM_SEEDS = 200
SEEDS_OF_A_PROMISE = 3


def run_cli(*args: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulator", *args],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_no_seed_violates_anything_and_every_mark_is_reached() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as executor:
        outcomes: list[Outcome] = list(executor.map(simulate, range(NUM_SEEDS), chunksize=20))
    found = [f"seed {o.seed}: {o.check}: {o.violation}" for o in outcomes if o.violation]
    assert not found, "\n".join(found)
    unreached = [mark for mark in MARKS if not any(o.marks[mark] for o in outcomes)]
    assert not unreached


@pytest.mark.parametrize("seed", [3, 7])
def test_a_seed_replays_exactly_whatever_the_hash_seed(seed: int) -> None:
    args = ("--seed", str(seed), "--history")
    first, second = (run_cli(*args, hash_seed=h) for h in ("1", "4242"))
    assert first.returncode == 0
    assert first.stdout == second.stdout
    *history, last = first.stdout.splitlines()
    assert f"digest {simulate(seed).digest}" in last
    assert any("begins step" in line for line in history)


def test_different_seeds_are_different_worlds() -> None:
    assert len({simulate(seed).digest for seed in range(8)}) == 8


def test_many_seeds_end_with_a_line_of_json() -> None:
    done = run_cli("--seeds", "3", "--start", "5", "--json")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert set(summary) == {"seeds", "violations", "requests", "requests_per_s", "reached"}
    assert (summary["seeds"], summary["violations"]) == (3, 0)
    assert summary["reached"].keys() == MARKS.keys()


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_is_kept(name: str) -> None:
    for seed in range(SEEDS_OF_A_PROMISE):
        outcome = simulate(seed, PROMISES[name])
        assert not outcome.violation, f"seed {seed}: {outcome.check}: {outcome.violation}"


def test_a_broken_promise_says_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers who do not come back lose what they asked for when their scheduler dies."""
    monkeypatch.setattr(Caller, "_is_passing", lambda *_: False)
    outcomes = [simulate(seed, PROMISES["another-scheduler"]) for seed in range(4)]
    broken = [outcome for outcome in outcomes if outcome.violation]
    assert broken
    assert {outcome.check for outcome in broken} == {"promise another-scheduler"}


def test_an_unknown_promise_exits_with_an_error() -> None:
    assert run_cli("--promise", "no-such-promise").returncode == 2
