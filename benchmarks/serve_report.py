"""What the runs of the serving benchmark come to."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.recording import RecordedStep

LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99")
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """One run against the split: what its client measured, and its worker. key: names its figures
    in the report; empty: they are not there by themselves."""

    what: str
    key: str
    measured: dict[str, float]
    worker: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """The same requests on every side. `steps`: those of the split's worker, which the bare runner
    repeated; control_cpu_s: of scheduler and memory service, from before the run to after it."""

    split: dict[str, float]
    one: dict[str, float]
    bare: dict[str, float]
    steps: list[RecordedStep]
    control_cpu_s: float

    @property
    def split_ratio(self) -> float:
        return self.split["tokens_per_s"] / self.one["tokens_per_s"]

    @property
    def bare_ratio(self) -> float:
        """Of tokens/s, for the same tokens."""
        return self.bare["seconds"] / self.split["seconds"]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    )
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


def walls_us(steps: Sequence[RecordedStep]) -> npt.NDArray[np.float64]:
    """Of each step from its beginning to the next one's; of the last to its end."""
    began = [step.began_us for step in steps]
    return np.diff([*began, began[-1] + steps[-1].busy_us])


def worker_of(steps: Sequence[RecordedStep]) -> dict[str, float]:
    """Idle time and gaps at the worker; percentages are of the median step."""
    return _worker_of([steps])


def _worker_of(runs: Sequence[Sequence[RecordedStep]]) -> dict[str, float]:
    step_us = float(np.median(np.concatenate([walls_us(steps) for steps in runs])))
    # Before its first step a run had no work.
    timings = [step.output.timings for steps in runs for step in steps[1:]]
    report = {"step_p50_ms": step_us / 1000}
    for name, values in (
        ("idle", [timing.idle_us for timing in timings]),
        ("gap", [timing.gap_us for timing in timings]),
    ):
        report[f"worker_{name}_p50_ms"] = float(np.percentile(values, 50)) / 1000
        report[f"worker_{name}_p99_ms"] = float(np.percentile(values, 99)) / 1000
        report[f"worker_{name}_p99_pct"] = 100 * float(np.percentile(values, 99)) / step_us
        report[f"worker_{name}_mean_pct"] = 100 * float(np.mean(values)) / step_us
    return report


def ratios_of(rounds: Sequence[Round]) -> dict[str, object]:
    """The figures of the rounds."""
    report: dict[str, object] = {"num_pairs": len(rounds)}
    for name in ("split", "bare"):
        ratios = [getattr(one, f"{name}_ratio") for one in rounds]
        low, high = interval(ratios)
        report |= {f"{name}_ratio": statistics.median(ratios)}
        report |= {f"{name}_low": low, f"{name}_high": high}
    walls_s = [float(walls_us(one.steps).sum()) / 1e6 for one in rounds]
    busy_s = [sum(step.busy_us for step in one.steps) / 1e6 for one in rounds]
    report |= _worker_of([one.steps for one in rounds])
    report["control_cpu_pct"] = 100 * sum(one.control_cpu_s for one in rounds) / sum(walls_s)
    report["control_cpu_ms_per_step"] = (
        1000 * sum(one.control_cpu_s for one in rounds) / sum(len(one.steps) for one in rounds)
    )
    report["client_cpu_pct"] = 100 * sum(one.split["client_cpu_s"] for one in rounds) / sum(walls_s)
    # Where the difference to the bare runner lies: steps that take longer beside the other
    # processes, time between them, and what comes before the first and after the last.
    report["busy_vs_bare"] = sum(busy_s) / sum(one.bare["seconds"] for one in rounds)
    report["busy_pct_of_window"] = 100 * sum(busy_s) / sum(walls_s)
    report["window_pct_of_run"] = 100 * sum(walls_s) / sum(one.split["seconds"] for one in rounds)
    report["bare_same_tokens_pct"] = (
        100
        * sum(one.bare["num_same_tokens"] for one in rounds)
        / sum(one.bare["num_tokens"] for one in rounds)
    )
    report["tokens_per_s_16"] = statistics.median(one.split["tokens_per_s"] for one in rounds)
    for name in LATENCIES:
        report[f"{name}_16"] = statistics.median(one.split[name] for one in rounds)
    return report


def rounded(report: dict[str, object]) -> dict[str, object]:
    """Four decimals, or four digits where there are more before them."""
    return {
        name: round(value, 4 if abs(value) < 10 else 2) if isinstance(value, float) else value
        for name, value in report.items()
    }


def show(runs: Sequence[Run], rounds: Sequence[Round], report: dict[str, object]) -> None:
    """Two tables on stdout."""
    console = Console()
    table = Table("the split", "tokens/s", *(name.replace("_", " ") for name in LATENCIES))
    for run in runs:
        table.add_row(
            run.what,
            f"{run.measured['tokens_per_s']:.1f}",
            *(f"{run.measured[name] or 0:.1f}" for name in LATENCIES),
        )
    console.print(table)
    table = Table("round", "split tok/s", "one process", "bare runner", "split/one", "split/bare")
    for number, one in enumerate(rounds, start=1):
        bare = one.split["num_tokens"] / one.bare["seconds"]
        table.add_row(
            str(number),
            *(f"{r['tokens_per_s']:.1f}" for r in (one.split, one.one)),
            f"{bare:.1f}",
            f"{one.split_ratio:.4f}",
            f"{one.bare_ratio:.4f}",
        )
    console.print(table)
    table = Table("figure", "value")
    for name, value in report.items():
        table.add_row(name, str(value))
    console.print(table)
