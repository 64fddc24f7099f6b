"""Serving: the three processes, against the same cores in one process and the bare model runner.

    python -m benchmarks.serve [--quick] [--traces DIR]

Rounds at 16 concurrent: the split, the one process and the bare runner one after the other, on the
same requests, so that a ratio is of runs minutes apart at most. The first two serve the same client
process; the runner executes the very steps that the split's worker was given. Then Poisson arrivals
over the traces, at a share of what the rounds have shown to be the capacity; then Hugging Face.

The last line is JSON. `split_ratio`, `bare_ratio`: medians of tokens/s over tokens/s, with
bootstrap intervals. `worker_idle_*`: time at the worker with nothing to do, between steps while
there was work; `worker_gap_*`: all the time between such steps (see model_worker/gaps.py).
`control_cpu_pct`: CPU of scheduler and memory service, percent of the steps' wall time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import workload
from benchmarks.recording import read_steps
from benchmarks.serve_report import LATENCIES, Round, Run, ratios_of, rounded, show, worker_of
from benchmarks.serve_stacks import Failed, Sides, run_module, sides

console = Console(stderr=True)


@dataclass(frozen=True)
class Plan:
    """How much is measured. Of the concurrencies the last one has the rounds.

    loads: Poisson arrivals, as shares of the capacity; poisson_s: for how long each.
    """

    rounds: int
    requests_per_client: int
    max_prompt: int
    max_output: int
    num_traces: int
    loads: tuple[float, ...]
    poisson_s: float
    concurrencies: tuple[int, ...] = (1, 8, 16)
    num_blocks: int = 2048


QUICK = Plan(3, 2, 96, 48, num_traces=1, loads=(0.7,), poisson_s=15)
FULL = Plan(12, 3, 256, 96, num_traces=3, loads=(0.5, 0.8), poisson_s=60)


class Benchmark:
    """The phases that need the sides; everything measured ends in `runs` and `rounds`."""

    def __init__(self, plan: Plan, folder: Path, all_sides: Sides, progress: Progress) -> None:
        self.runs: list[Run] = []
        self.rounds: list[Round] = []
        self._plan = plan
        self._folder = folder
        self._sides = all_sides
        self._progress = progress

    def items(self, name: str, lengths: workload.Lengths, count: int, seed: int) -> Path:
        """A file of `count` requests."""
        items = workload.make_items(
            lengths,
            count,
            seed,
            max_prompt=self._plan.max_prompt,
            max_output=self._plan.max_output,
        )
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps([asdict(item) for item in items]))
        return path

    def _load(self, side: str, items: Path, *args: str) -> dict[str, float]:
        where = ("--address", self._sides.address(side), "--workload", str(items))
        return run_module("benchmarks.load", *where, *args)

    def at_concurrency(self, lengths: workload.Lengths, concurrency: int) -> None:
        """The split alone."""
        count = concurrency * self._plan.requests_per_client
        items = self.items(f"closed-{concurrency}", lengths, count, concurrency)
        with self._phase(f"{concurrency} concurrent", 1):
            measured = self._load("split", items, "--concurrency", str(concurrency))
        steps = read_steps(self._sides.take_recording())
        self.runs.append(
            Run(f"{concurrency} concurrent", str(concurrency), measured, worker_of(steps))
        )

    def warm_up(self, lengths: workload.Lengths) -> None:
        items = self.items("warm-up", lengths, 4, 0)
        with self._phase("warming up", 3) as advance:
            for side in ("split", "one"):
                self._load(side, items, "--concurrency", "4")
                advance()
            self._sides.replay(self._sides.take_recording())

    def interleave(self, items: Path, concurrency: int) -> None:
        """The rounds: every side serves the same requests."""
        args = ("--concurrency", str(concurrency))
        with self._phase(f"{self._plan.rounds} rounds", 3 * self._plan.rounds) as advance:
            for number in range(self._plan.rounds):
                measured: dict[str, dict[str, float]] = {}
                for side in ("split", "one") if number % 2 == 0 else ("one", "split"):
                    cpu_s = self._sides.control_cpu_s()
                    measured[side] = self._load(side, items, *args)
                    if side == "split":
                        measured["control"] = {"cpu_s": self._sides.control_cpu_s() - cpu_s}
                    advance()
                recording = self._sides.take_recording()
                bare = self._sides.replay(recording)
                advance()
                self.rounds.append(
                    Round(
                        measured["split"],
                        measured["one"],
                        bare,
                        read_steps(recording),
                        measured["control"]["cpu_s"],
                    )
                )
                recording.unlink()
                self.runs.append(Run(f"{concurrency} concurrent", "", measured["split"]))

    def poisson(self, name: str, lengths: workload.Lengths, load: float, capacity: float) -> None:
        """The split under arrivals that do not wait, at `load` of `capacity` tokens/s."""
        mean = sum(min(o, self._plan.max_output) for _, o in lengths) / len(lengths)
        rate = load * capacity / mean
        count = max(16, round(rate * self._plan.poisson_s))
        items = self.items(f"poisson-{name}", lengths, count, count)
        label = f"Poisson, {name}, {rate:.2f}/s ({load:.0%} of capacity)"
        with self._phase(label, 1):
            measured = self._load("split", items, "--rate", str(rate))
        steps = read_steps(self._sides.take_recording())
        key = f"{name}_{round(100 * load)}"
        self.runs.append(Run(label, key, measured, worker_of(steps)))

    def figures(self) -> dict[str, object]:
        """Of the runs that are not the rounds'."""
        report: dict[str, object] = {}
        for run in filter(lambda run: run.key, self.runs):
            for name in ("tokens_per_s", *LATENCIES):
                report[f"{name}_{run.key}"] = run.measured[name]
            for name in ("worker_idle_p50_ms", "worker_idle_p99_pct"):
                report[f"{name}_{run.key}"] = run.worker[name]
        return report

    @contextmanager
    def _phase(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        if not console.is_terminal:  # where a bar would be seen at its end alone
            console.print(f"{what} ...")
        task = self._progress.add_task(what, total=total)
        yield lambda: self._progress.advance(task)
        self._progress.update(task, completed=total)


def measure(
    benchmark: Benchmark, plan: Plan, traces: dict[str, workload.Lengths]
) -> tuple[dict[str, object], Path]:
    """The figures, and the requests of the rounds."""
    lengths = next(iter(traces.values()))
    benchmark.warm_up(lengths)
    *fewer, most = plan.concurrencies
    for concurrency in fewer:
        benchmark.at_concurrency(lengths, concurrency)
    items = benchmark.items("rounds", lengths, most * plan.requests_per_client, most)
    benchmark.interleave(items, most)
    report = ratios_of(benchmark.rounds)
    capacity = statistics.median(one.split["tokens_per_s"] for one in benchmark.rounds)
    for name in list(traces)[: plan.num_traces]:
        for load in plan.loads:
            benchmark.poisson(name, traces[name], load, capacity)
    return report, items


def compare_with_hf(report: dict[str, object], items: Path, model: str) -> None:
    """Hugging Face's continuous batching on the first 16 requests of the rounds. Where it does not
    end in time, or cannot be had, there is no figure."""
    report["vs_hf"] = None
    args = ("--workload", str(items), "--model", model)
    try:
        theirs = run_module("benchmarks.hf_baseline", *args)["tokens_per_s"]
    except Failed as error:
        console.print(error, style="yellow", markup=False)
        return
    report["hf_tokens_per_s_16"] = theirs
    report["vs_hf"] = float(str(report["tokens_per_s_16"])) / theirs


def main(
    quick: Annotated[bool, typer.Option(help="a few minutes instead of half an hour")] = False,
    traces: Annotated[str | None, typer.Option(help="folder of workload traces")] = None,
    model: Annotated[str, typer.Option(help="folder or hub id; empty: the demo model")] = "",
    hf: Annotated[bool, typer.Option(help="compare with Hugging Face as well")] = True,
) -> None:
    """Measure what is served; the last line is JSON."""
    plan = QUICK if quick else FULL
    lengths = workload.load_traces(workload.traces_dir(traces))
    if workload.UNIFORM in lengths:
        console.print(workload.HOW_TO_GET)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="octavo-") as scratch,
            Progress(*columns, console=console) as progress,
        ):
            starting = progress.add_task("starting every side", total=1)
            with sides(Path(scratch), model, plan.num_blocks) as all_sides:
                progress.advance(starting)
                benchmark = Benchmark(plan, Path(scratch), all_sides, progress)
                report, items = measure(benchmark, plan, lengths)
            if hf:
                task = progress.add_task("Hugging Face generate_batch", total=1)
                compare_with_hf(report, items, model)
                progress.advance(task)
    except Failed as error:
        console.print(error, style="red", markup=False)
        raise typer.Exit(1) from None
    report = rounded(report | benchmark.figures())
    show(benchmark.runs, benchmark.rounds, report)
    name = next(iter(lengths))
    print(json.dumps({"benchmark": "serve", "workload": name, "quick": quick, **report}))


if __name__ == "__main__":
    typer.run(main)
