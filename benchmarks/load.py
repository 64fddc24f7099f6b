"""A client process of the serving benchmarks; one JSON line of what it measured.

    python -m benchmarks.load --address unix:/... --concurrency 16 --workload FILE

keeps 16 requests in flight until all are served; with --rate they are sent when a Poisson process
of so many a second says, whatever has been answered. Every run has a cache salt of its own, so that
it finds nothing in the prefix cache of what another run with the same prompts has left there.

TTFT: from sending a request to its first token. ITL: between two messages with tokens of a request
(a message has one token, unless the client was too slow for the stream). TPOT: from the first token
to the last, over all but the first.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop

from benchmarks.workload import poisson_arrivals
from octavo import AsyncClient, SamplingParams

REQUEST_TIMEOUT_S = 600.0


@dataclass
class Measured:
    """What the requests of a run met, in seconds."""

    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


async def one_request(client: AsyncClient, item: dict, salt: str, measured: Measured) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=item["num_output_tokens"], ignore_eos=True)
    started = time.perf_counter()
    arrivals: list[float] = []
    count = 0
    stream = client.stream(
        item["prompt_token_ids"], params, timeout_s=REQUEST_TIMEOUT_S, cache_salt=salt
    )
    async for chunk in stream:
        assert not chunk.num_cached_tokens, "a prompt was found in the prefix cache"
        if new := sum(len(candidate.token_ids) for candidate in chunk.candidates):
            count += new
            arrivals.append(time.perf_counter())
    assert count == item["num_output_tokens"], (count, item["num_output_tokens"])
    measured.num_tokens += count
    measured.ttft_s.append(arrivals[0] - started)
    measured.itl_s.extend(np.diff(arrivals).tolist())
    if count > 1:
        measured.tpot_s.append((arrivals[-1] - arrivals[0]) / (count - 1))


async def keep_in_flight(
    client: AsyncClient, concurrency: int, items: list[dict], salt: str, measured: Measured
) -> None:
    """Send all items, `concurrency` at a time."""
    queue = deque(items)

    async def worker() -> None:
        while queue:
            await one_request(client, queue.popleft(), salt, measured)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def send_at(
    client: AsyncClient, at_s: Sequence[float], items: list[dict], salt: str, measured: Measured
) -> None:
    """Send each item at its time from now on."""
    started = time.perf_counter()

    async def later(item: dict, arrival_s: float) -> None:
        await asyncio.sleep(started + arrival_s - time.perf_counter())
        await one_request(client, item, salt, measured)

    await asyncio.gather(*map(later, items, at_s))


async def run(address: str, concurrency: int, rate_per_s: float, items: list[dict]) -> dict:
    """Send all items; tokens/s and latencies."""
    measured, salt = Measured(), secrets.token_hex(8)
    async with AsyncClient(address) as client:
        await client.model()  # Connected, before the clock runs.
        started, cpu_s = time.perf_counter(), time.process_time()
        if rate_per_s:
            arrivals = poisson_arrivals(len(items), rate_per_s, seed=0)
            await send_at(client, arrivals, items, salt, measured)
        else:
            await keep_in_flight(client, concurrency, items, salt, measured)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    return {
        "tokens_per_s": measured.num_tokens / seconds,
        "num_tokens": measured.num_tokens,
        "seconds": seconds,
        "client_cpu_s": cpu_s,
        **percentiles("ttft_ms", measured.ttft_s),
        **percentiles("tpot_ms", measured.tpot_s),
        **percentiles("itl_ms", measured.itl_s),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    """The median and the 99th, in ms; None of nothing."""
    return {
        f"{name}_p{q}": float(np.percentile(seconds, q)) * 1000 if seconds else None
        for q in (50, 99)
    }


def main(
    address: Annotated[str, typer.Option()],
    workload: Annotated[Path, typer.Option(help="JSON list of items")],
    concurrency: Annotated[int, typer.Option(min=1)] = 1,
    rate: Annotated[float, typer.Option(min=0.0, help="requests/s; 0: as --concurrency says")] = 0,
) -> None:
    """Send all items and measure."""
    items = json.loads(workload.read_text())
    print(json.dumps(uvloop.run(run(address, concurrency, rate, items))))


if __name__ == "__main__":
    typer.run(main)
