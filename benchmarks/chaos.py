"""Chaos: everything dies, again and again, under load, and every answer must stay what it was.

    python -m benchmarks.chaos --minutes 3 --seed 7

Services are killed, paused and cut off from one another at random moments while callers of the
SDK stream. Each answer is compared with the undisturbed one. Recovery times are from the moment of
the fault to the first token that any caller receives after the silence that it caused; what was
still under way at that moment does not count. The last line is JSON; the exit status is 1 when
anything was lost, wrong or leaked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.chaos_faults import Deck, Kind
from benchmarks.chaos_load import Load, make_shapes
from benchmarks.chaos_stack import EXECUTED_AGAIN, ChaosStack
from octavo import AsyncClient

RECOVERY_TIMEOUT_S = 90.0
# What was under way when a fault struck has arrived by then, and nobody has recovered.
SETTLE_S = 0.3
# Pieces of answers that say that the load flows.
FLOWING_ARRIVALS = 100
MAX_PAUSE_S = 1.5
NUM_SHAPES = 16
EMPTY_TIMEOUT_S = 30.0

console = Console(stderr=True)


@dataclass
class Outcome:
    """What the faults did."""

    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stuck: list[str] = field(default_factory=list)


async def strike(stack: ChaosStack, load: Load, kind: Kind, outcome: Outcome) -> None:
    """One fault, and the wait until tokens flow again."""
    owner = await _owner(stack)
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        await stack.wait_for_standby(owner)
    fault = asyncio.ensure_future(kind.strike(stack, owner))
    await asyncio.sleep(0)  # It strikes here, and may go on for a while.
    struck_s = time.monotonic()
    outcome.kills[kind.name] += 1
    await asyncio.sleep(SETTLE_S)
    flowing = await load.wait_until_flowing(FLOWING_ARRIVALS, RECOVERY_TIMEOUT_S)
    await fault
    stack.heal()
    if not flowing:
        outcome.stuck.append(f"{kind.name}: no token came in {RECOVERY_TIMEOUT_S:.0f} s")
        return
    recovery_s = load.end_of_silence_s(struck_s) - struck_s
    outcome.recovery_s[kind.name].append(recovery_s)
    console.print(f"{kind.name}: the next token came after {recovery_s:.2f} s")


async def _owner(stack: ChaosStack) -> str:
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while (owner := await stack.owner()) is None:
            await asyncio.sleep(0.02)
    return owner


async def rage(
    stack: ChaosStack, load: Load, draw: random.Random, end_s: float, progress: Progress
) -> Outcome:
    """Faults until `end_s`."""
    outcome, deck = Outcome(), Deck(draw)
    begin_s = time.monotonic()
    bar = progress.add_task("chaos", total=end_s - begin_s)
    while time.monotonic() < end_s:
        flowing = await load.wait_until_flowing(FLOWING_ARRIVALS, RECOVERY_TIMEOUT_S)
        if not flowing:
            outcome.stuck.append("the load does not flow any more")
            break
        await asyncio.sleep(draw.uniform(0.0, MAX_PAUSE_S))
        await strike(stack, load, deck.next(), outcome)
        progress.update(
            bar,
            completed=time.monotonic() - begin_s,
            description=f"{outcome.kills.total()} faults, {load.num_requests} requests,"
            f" {load.num_tokens} tokens, {len(load.lost)} lost, {len(load.wrong)} wrong",
        )
    return outcome


async def leaked(stack: ChaosStack) -> tuple[int, int]:
    """Blocks that somebody holds, and requests that are remembered, although nobody asks for
    anything any more."""
    blocks = requests = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EMPTY_TIMEOUT_S):
            while blocks or requests:
                stats = await stack.stats()
                if stats is not None:
                    levels = stats.levels
                    unused = levels.num_free_blocks + levels.num_cached_blocks
                    blocks = stats.geometry.num_blocks - unused
                    requests = stats.num_requests
                await asyncio.sleep(0.1)
    return blocks, requests


def percentiles(recovery_s: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """p50 and p99 (of few samples: the slowest) by kind."""
    return {
        "recovery_p50_s": {k: round(statistics.median(v), 3) for k, v in recovery_s.items()},
        "recovery_p99_s": {
            k: round(sorted(v)[min(len(v) - 1, int(len(v) * 0.99))], 3)
            for k, v in recovery_s.items()
        },
    }


async def run(
    folder: Path, minutes: float, seed: int, num_callers: int, worker_options: tuple[str, ...]
) -> dict[str, object]:
    """The whole benchmark; its result line."""
    # One each, so that the faults of a seed do not depend on how fast requests come and go.
    for_shapes, for_callers, for_faults = (random.Random(f"{seed}-{use}") for use in range(3))
    stack = ChaosStack(folder, worker_options)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        starting = progress.add_task("starting", total=None)
        async with (
            stack.running(),
            AsyncClient(stack.client_addresses, connect_timeout_s=RECOVERY_TIMEOUT_S) as client,
        ):
            progress.remove_task(starting)
            load = Load(client, make_shapes(NUM_SHAPES, for_shapes), for_callers)
            learning = progress.add_task("undisturbed answers", total=len(load.shapes))
            await load.learn(lambda: progress.advance(learning))
            load.start(num_callers)
            end_s = time.monotonic() + 60 * minutes
            outcome = await rage(stack, load, for_faults, end_s, progress)
            stack.heal()
            await load.finish()
            leaked_blocks, leaked_requests = await leaked(stack)
    for sentence in (*load.lost, *load.wrong, *outcome.stuck):
        console.print(f"[red]{sentence}", soft_wrap=True)
    return {
        "benchmark": "chaos",
        "minutes": minutes,
        "seed": seed,
        "concurrency": num_callers,
        "kills": dict(sorted(outcome.kills.items())),
        "requests": load.num_requests,
        "tokens": load.num_tokens,
        "lost": len(load.lost) + len(outcome.stuck),
        "wrong": len(load.wrong),
        "leaked_blocks": leaked_blocks,
        "leaked_requests": leaked_requests,
        "reexecuted_steps": stack.log.events[EXECUTED_AGAIN],
        **percentiles(outcome.recovery_s),
    }


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="how long the faults go on")] = 3.0,
    seed: Annotated[int | None, typer.Option(help="of all that is drawn; default: random")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="callers at a time")] = 16,
    model: Annotated[str, typer.Option(help="folder or hub id; empty: the demo model")] = "",
    num_blocks: Annotated[int, typer.Option(min=16, help="of the KV pool")] = 1024,
    keep_log: Annotated[str, typer.Option(help="copy the services' log to this file")] = "",
) -> None:
    """Break everything under load; the last line is JSON."""
    options = (f"--num-blocks={num_blocks}", *((f"--model={model}",) if model else ()))
    with tempfile.TemporaryDirectory(prefix="oct-") as scratch:
        folder = Path(scratch)
        chosen = secrets.randbits(32) if seed is None else seed
        try:
            result = asyncio.run(run(folder, minutes, chosen, concurrency, options))
        finally:
            log = folder / "services.log"
            if keep_log and log.is_file():
                Path(keep_log).write_bytes(log.read_bytes())
    print(json.dumps(result))
    sys.exit(any(result[key] for key in ("lost", "wrong", "leaked_blocks", "leaked_requests")))


if __name__ == "__main__":
    typer.run(main)
