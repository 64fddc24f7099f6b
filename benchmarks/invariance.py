"""What batch-invariant arithmetic costs: the same steps with it and without, in turn.

    python -m benchmarks.invariance

Whole steps of the model runner (tables, forward, greedy draws) on the demo model: decodes of 1,
8 and 16 sequences at a context of 256 tokens, and a prefill of 512. In every round each mode
runs once; figures are medians. Both modes attend with the `cpu` backend. The last line is JSON:
`ratio_*` is the time with batch invariance ÷ without, `ms_*` the milliseconds with it.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from model_worker.options import WorkerOptions
from model_worker.step import SequenceStart, StepInput
from model_worker.threads import place_threads
from octavo.service import logs

if TYPE_CHECKING:
    # It brings torch, which must not be loaded before place_threads.
    from model_worker.runner import ModelRunner

BATCHES = (1, 8, 16)
CONTEXT = 256
PREFILL = 512
BLOCK_SIZE = 16
SWITCH = ("on", "off")
console = Console(stderr=True)


class Steps:
    """Runs decodes and prefills on a runner of one mode, always at the same positions."""

    def __init__(self, model: str, dtype: str, batch_invariant: str) -> None:
        from model_worker.build import build_runner

        per_sequence = -(-max(CONTEXT, PREFILL) // BLOCK_SIZE)
        self.runner: ModelRunner = build_runner(
            WorkerOptions(
                model=model,
                dtype=dtype,
                attention="cpu",
                batch_invariant=batch_invariant,
                num_blocks=max(BATCHES) * per_sequence,
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=max(PREFILL, CONTEXT),
            )
        )
        self.is_batch_invariant = self.runner.is_batch_invariant
        self._step_id = 0
        table = np.random.default_rng(0).permutation(max(BATCHES) * per_sequence)
        self._starts = tuple(
            SequenceStart(i + 1, ids.astype(np.int32), 1)
            for i, ids in enumerate(table.reshape(max(BATCHES), per_sequence))
        )
        for row in range(max(BATCHES)):
            self._execute([row], CONTEXT, 0)

    def decode(self, batch: int) -> float:
        """Seconds of a step of `batch` decodes."""
        return self._execute(list(range(batch)), 1, CONTEXT - 1)

    def prefill(self) -> float:
        """Seconds of a step with one prompt of PREFILL tokens."""
        return self._execute([0], PREFILL, 0)

    def _execute(self, rows: list[int], num_tokens: int, computed: int) -> float:
        count = len(rows)
        step = StepInput(
            step_id=self._step_id,
            sequence_ids=np.array(rows, np.uint64) + np.uint64(1),
            table_versions=np.ones(count, np.uint32),
            num_input_tokens=np.full(count, num_tokens, np.int32),
            num_computed_tokens=np.full(count, computed, np.int32),
            input_token_ids=np.arange(count * num_tokens, dtype=np.int32) % 1000,
            num_samples=np.ones(count, np.int32),
            starts=self._starts if self._step_id == 0 else (),
        )
        self._step_id += 1
        started = time.perf_counter()
        self.runner.execute(step)
        return time.perf_counter() - started


def measure(model: str, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """By what ran and mode: median seconds; and the median of the ratios of each round."""
    modes = {switch: Steps(model, dtype, switch) for switch in SWITCH}
    assert modes["on"].is_batch_invariant
    assert not modes["off"].is_batch_invariant
    names = [*map(str, BATCHES), "prefill"]
    figures = {}
    for name in names:
        times: dict[str, list[float]] = {switch: [] for switch in SWITCH}
        for index in range(rounds + 1):
            for switch, steps in modes.items():
                seconds = steps.prefill() if name == "prefill" else steps.decode(int(name))
                if index:  # the first round warms up
                    times[switch].append(seconds)
        figures[name] = {switch: statistics.median(times[switch]) for switch in SWITCH}
        pairs = zip(times["on"], times["off"], strict=True)
        figures[name]["ratio"] = statistics.median(on / off for on, off in pairs)
    return figures


def main(
    model: Annotated[str, typer.Option(help="A folder; empty: the demo model.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    dtype: Annotated[list[str] | None, typer.Option(help="Default: both.")] = None,
) -> None:
    """Measure float32 and bfloat16."""
    logs.setup("benchmark", level="warning")
    result: dict[str, object] = {"benchmark": "invariance", "context": CONTEXT}
    table = Table("dtype", "step", "on ms", "off ms", "on ÷ off")
    for name in dtype or ["float32", "bfloat16"]:
        suffix = "" if name == "float32" else "_bf16"
        for what, figure in measure(model, name, rounds).items():
            on_ms, off_ms = figure["on"] * 1e3, figure["off"] * 1e3
            table.add_row(name, what, f"{on_ms:.1f}", f"{off_ms:.1f}", f"{figure['ratio']:.3f}")
            result[f"ratio_{what}{suffix}"] = round(figure["ratio"], 3)
            result[f"ms_{what}{suffix}"] = round(on_ms, 1)
    console.print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    # Before torch is loaded.
    place_threads()
    typer.run(main)
