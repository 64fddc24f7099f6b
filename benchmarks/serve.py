"""Serving: tokens/s of the three processes, against the same cores in one process.

    python -m benchmarks.serve --quick

Both stacks are up at the same time and serve the same client processes, one after the other in
interleaved pairs; only the one being measured has work. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import workload
from model_worker.threads import WAITING
from octavo import Client, OctavoError

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
console = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    """How much is measured. `pairs`: split and one-process runs at 16 concurrent."""

    concurrencies: tuple[int, ...]
    pairs: int
    requests_per_client: int
    max_prompt: int
    max_output: int
    num_blocks: int = 2048


QUICK = Plan((1, 8, 16), pairs=3, requests_per_client=1, max_prompt=96, max_output=48)
FULL = Plan((1, 8, 16), pairs=10, requests_per_client=2, max_prompt=256, max_output=96)


@contextmanager
def process(log: Path, module: str, *args: str, env: Mapping[str, str]) -> Iterator[None]:
    """`python -m module args` until the block ends; its output goes to `log`."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
        )
        try:
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_until_serving(address: str, log: Path) -> None:
    """Poll health; raises RuntimeError with the end of the log when it does not come up."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    with Client(address) as client:
        while time.monotonic() < deadline:
            try:
                if client.health().serving:
                    return
            except OctavoError:
                pass
            time.sleep(0.2)
    raise RuntimeError(f"{address} did not come up:\n{log.read_text()[-2000:]}")


@contextmanager
def stacks(folder: Path, model: str, num_blocks: int) -> Iterator[dict[str, str]]:
    """Both stacks, up and serving: name -> address of the public service."""
    address = {name: f"unix:{folder}/{name}.sock" for name in ("kvmem", "worker", "split", "one")}
    size = ("--model", model, "--num-blocks", str(num_blocks))
    peers = ("--kvmem", address["kvmem"], "--worker", address["worker"])
    commands = {
        "kvmem": ("kvmem_svc", "--address", address["kvmem"]),
        "worker": ("model_worker", "--address", address["worker"], *size),
        "split": ("scheduler_svc", "--address", address["split"], *peers),
        "one": ("benchmarks.one_process", "--address", address["one"], *size),
    }
    with ExitStack() as running:
        for name, (module, *args) in commands.items():
            running.enter_context(process(folder / f"{name}.log", module, *args, env=WAITING))
        for name in ("split", "one"):
            wait_until_serving(address[name], folder / f"{name}.log")
        yield {name: address[name] for name in ("split", "one")}


def run_load(address: str, concurrency: int, items: Path) -> dict[str, float]:
    """One client process; what it measured."""
    command = [sys.executable, "-m", "benchmarks.load", "--address", address]
    command += ["--concurrency", str(concurrency), "--workload", str(items)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def measure(
    addresses: Mapping[str, str], plan: Plan, folder: Path, lengths: list[tuple[int, int]]
) -> dict[str, object]:
    """Tokens/s of the split at each concurrency, and the pairs at the highest."""
    result: dict[str, object] = {}
    runs = {c: 2 * plan.pairs if c == max(plan.concurrencies) else 1 for c in plan.concurrencies}
    with Progress(console=console) as progress:
        bar = progress.add_task("serving", total=sum(runs.values()) + 1)
        items = folder / "warmup.json"
        write_items(items, lengths, 4, 0, plan)
        for address in addresses.values():
            run_load(address, 4, items)
        progress.advance(bar)
        for concurrency in plan.concurrencies:
            items = folder / f"items-{concurrency}.json"
            write_items(items, lengths, concurrency * plan.requests_per_client, concurrency, plan)
            pairs: list[tuple[float, float]] = []
            for index in range(max(1, runs[concurrency] // 2)):
                order = ("split", "one") if index % 2 == 0 else ("one", "split")
                if runs[concurrency] == 1:
                    order = ("split",)
                rate = {}
                for name in order:
                    measured = run_load(addresses[name], concurrency, items)
                    rate[name] = measured["tokens_per_s"]
                    if name == "split":
                        result[f"ttft_p50_s_{concurrency}"] = round(measured["ttft_p50_s"], 4)
                        result[f"tpot_p50_s_{concurrency}"] = round(measured["tpot_p50_s"], 4)
                    progress.advance(bar)
                pairs.append((rate["split"], rate.get("one", rate["split"])))
            result[f"tokens_per_s_{concurrency}"] = round(
                statistics.median(split for split, _ in pairs), 2
            )
            if len(pairs) > 1:
                ratios = [split / one for split, one in pairs]
                low, high = interval(ratios)
                result["split_ratio"] = round(statistics.median(ratios), 4)
                result["split_ratio_interval"] = [round(low, 4), round(high, 4)]
    return result


def write_items(
    path: Path, lengths: list[tuple[int, int]], count: int, seed: int, plan: Plan
) -> None:
    items = workload.make_items(
        lengths, count, seed, max_prompt=plan.max_prompt, max_output=plan.max_output
    )
    path.write_text(json.dumps([asdict(item) for item in items]))


def hf_tokens_per_s(items: Path, model: str, concurrency: int) -> float:
    """Hugging Face's continuous batching on the same requests."""
    command = [sys.executable, "-m", "benchmarks.hf_baseline", "--workload", str(items)]
    command += ["--model", model, "--concurrency", str(concurrency)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def main(
    quick: Annotated[bool, typer.Option(help="a few minutes instead of half an hour")] = False,
    traces: Annotated[str | None, typer.Option(help="folder of workload traces")] = None,
    model: Annotated[str, typer.Option(help="folder or hub id; empty: the demo model")] = "",
    hf: Annotated[bool, typer.Option(help="compare with Hugging Face as well")] = True,
) -> None:
    """Measure the served tokens/s; the last line is JSON."""
    plan = QUICK if quick else FULL
    name, lengths = workload.load_lengths(workload.traces_dir(traces))
    if name == "uniform":
        console.print(workload.HOW_TO_GET)
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        folder = Path(scratch)
        with stacks(folder, model, plan.num_blocks) as addresses:
            result = measure(addresses, plan, folder, lengths)
        most = max(plan.concurrencies)
        if hf:
            with console.status("Hugging Face generate_batch ..."):
                theirs = hf_tokens_per_s(folder / f"items-{most}.json", model, most)
            result["hf_tokens_per_s_16"] = round(theirs, 2)
            result["vs_hf"] = round(float(str(result[f"tokens_per_s_{most}"])) / theirs, 3)
    print(json.dumps({"benchmark": "serve", "workload": name, "quick": quick, **result}))


if __name__ == "__main__":
    typer.run(main)
