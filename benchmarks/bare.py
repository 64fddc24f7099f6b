"""The model runner alone, in a process of its own, fed the very steps that a worker was given.

It loads the model, says so in a JSON line, and then answers every path of a recording that comes in
on stdin with one more: how long the steps take back to back, with no wire, scheduler or memory
service, and whether the same tokens were drawn.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from benchmarks.recording import RecordedStep, num_drawn, read_steps
from model_worker.options import WorkerOptions
from model_worker.threads import place_threads
from octavo.service import logs

if TYPE_CHECKING:
    from model_worker.runner import ModelRunner


def replay(runner: ModelRunner, recorded: list[RecordedStep]) -> dict[str, float]:
    """Execute the steps, whose sequences all begin in them."""
    runner.forget_sequences()
    steps = [replace(each.step, ready_ns=None) for each in recorded]
    started = time.perf_counter()
    outputs = [runner.execute(step) for step in steps]
    seconds = time.perf_counter() - started
    num_same = sum(
        np.count_nonzero(output.sampled_token_ids == each.output.sampled_token_ids)
        for output, each in zip(outputs, recorded, strict=True)
    )
    return {
        "seconds": seconds,
        "num_steps": len(steps),
        "num_tokens": num_drawn(recorded),
        "num_same_tokens": int(num_same),
        "forward_s": sum(output.timings.forward_us for output in outputs) / 1e6,
    }


def main(
    model: Annotated[str, typer.Option()] = "",
    num_blocks: Annotated[int, typer.Option(min=1)] = 2048,
    attention: Annotated[str, typer.Option()] = WorkerOptions.attention,
) -> None:
    """Replay recordings until stdin ends."""
    logs.setup("bare")
    from model_worker.build import build_runner

    options = WorkerOptions(
        model=model, num_blocks=num_blocks, attention=attention, num_host_blocks=0
    )
    runner = build_runner(options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(replay(runner, read_steps(Path(line.strip())))), flush=True)


if __name__ == "__main__":
    # Before torch is loaded.
    place_threads()
    typer.run(main)
