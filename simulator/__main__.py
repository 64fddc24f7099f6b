"""`python -m simulator`: one seed with its history, or many with a line of JSON at the end."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from simulator.marks import MARKS
from simulator.promises import PROMISES, Promise
from simulator.world import Outcome, simulate

# With so many seeds every mark must have been reached.
SEEDS_FOR_ALL_MARKS = 200


def main(
    seed: Annotated[int | None, typer.Option(help="Run this one")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run so many")] = SEEDS_FOR_ALL_MARKS,
    start: Annotated[int, typer.Option(help="The first of them")] = 0,
    history: Annotated[bool, typer.Option(help="Print all that happened")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON")] = False,
    promise: Annotated[str, typer.Option(help=f"Test one of {', '.join(PROMISES)}")] = "",
) -> None:
    """Simulate. Exits 1 for a violation, or when a mark was never reached."""
    if promise and promise not in PROMISES:
        raise typer.BadParameter(f"there is no promise {promise!r}; there are {list(PROMISES)}")
    tested = PROMISES.get(promise)
    if seed is not None:
        raise typer.Exit(_run_one(seed, tested, history=history))
    raise typer.Exit(_run_many(range(start, start + seeds), tested, quiet=as_json))


def _run_one(seed: int, promise: Promise | None, *, history: bool) -> int:
    outcome = simulate(seed, promise, keep_history=history)
    for line in outcome.lines:
        print(line)
    print(f"seed {seed}: {outcome.num_requests} requests, digest {outcome.digest}")
    _tell(outcome, promise)
    return 1 if outcome.violation else 0


def _run_many(seeds: range, promise: Promise | None, *, quiet: bool) -> int:
    started_s = time.process_time()
    reached = dict.fromkeys(MARKS, 0)
    num_requests = num_violations = 0
    for seed in seeds:
        outcome = simulate(seed, promise)
        num_requests += outcome.num_requests
        num_violations += bool(outcome.violation)
        for mark, count in outcome.marks.items():
            reached[mark] += count
        if not quiet:
            _tell(outcome, promise)
    unreached = [mark for mark, count in reached.items() if not count]
    enough = promise is None and len(seeds) >= SEEDS_FOR_ALL_MARKS
    if enough and unreached and not quiet:
        print(f"never reached: {', '.join(unreached)}", file=sys.stderr)
    summary = {
        "seeds": len(seeds),
        "violations": num_violations,
        "requests": num_requests,
        "requests_per_s": round(num_requests / (time.process_time() - started_s)),
        "reached": reached,
    }
    print(json.dumps(summary))
    return 1 if num_violations or (enough and unreached) else 0


def _tell(outcome: Outcome, promise: Promise | None) -> None:
    if outcome.violation:
        print(f"seed {outcome.seed}: VIOLATION of {outcome.check}: {outcome.violation}")
        with_promise = f" --promise {promise.name}" if promise else ""
        print(f"    python -m simulator --seed {outcome.seed}{with_promise} --history")


if __name__ == "__main__":
    typer.run(main)
