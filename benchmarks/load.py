"""A client process that keeps N requests in flight; one JSON line of what it measured.

python -m benchmarks.load --address unix:/... --concurrency 16 --workload FILE
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from octavo import AsyncClient, SamplingParams

REQUEST_TIMEOUT_S = 600.0


@dataclass
class Measured:
    """Seconds; one entry a request in each list."""

    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


async def one_request(client: AsyncClient, item: dict, measured: Measured) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=item["num_output_tokens"], ignore_eos=True)
    started = time.perf_counter()
    first = last = 0.0
    count = 0
    stream = client.stream(item["prompt_token_ids"], params, timeout_s=REQUEST_TIMEOUT_S)
    async for chunk in stream:
        for candidate in chunk.candidates:
            count += len(candidate.token_ids)
            last = time.perf_counter()
            first = first or last
    assert count == item["num_output_tokens"], (count, item["num_output_tokens"])
    measured.num_tokens += count
    measured.ttft_s.append(first - started)
    if count > 1:
        measured.tpot_s.append((last - first) / (count - 1))


async def run(address: str, concurrency: int, items: list[dict]) -> dict[str, float]:
    """Send all items, `concurrency` at a time; tokens/s and latencies."""
    measured, queue = Measured(), deque(items)

    async def worker(client: AsyncClient) -> None:
        while queue:
            await one_request(client, queue.popleft(), measured)

    async with AsyncClient(address) as client:
        started = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    return {
        "tokens_per_s": measured.num_tokens / seconds,
        "num_tokens": measured.num_tokens,
        "seconds": seconds,
        "ttft_p50_s": statistics.median(measured.ttft_s),
        "tpot_p50_s": statistics.median(measured.tpot_s),
    }


def main(
    address: Annotated[str, typer.Option()],
    concurrency: Annotated[int, typer.Option(min=1)],
    workload: Annotated[Path, typer.Option(help="JSON list of items")],
) -> None:
    """Keep `concurrency` requests in flight until all items are served."""
    items = json.loads(workload.read_text())
    print(json.dumps(uvloop.run(run(address, concurrency, items))))


if __name__ == "__main__":
    typer.run(main)
