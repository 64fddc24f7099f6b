"""The steps a worker was given, kept to be looked at, and to be executed again by themselves."""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from model_worker.step import StepInput, StepOutput

if TYPE_CHECKING:
    # It brings torch, which who reads a recording has no need of.
    from model_worker.runner import ModelRunner

# Some hundred bytes a row of a step.
MAX_STEPS = 50_000


@dataclass(frozen=True)
class RecordedStep:
    """A step and what came of it."""

    step: StepInput
    output: StepOutput

    @property
    def began_us(self) -> float:
        """In Unix time."""
        return self.output.started_unix_ns / 1000

    @property
    def busy_us(self) -> int:
        """What it took, from its beginning to its last draw."""
        timings = self.output.timings
        return timings.prepare_us + timings.forward_us + timings.sample_us


class Recorder:
    """Keeps the newest MAX_STEPS steps of one runner, until they are written."""

    def __init__(self) -> None:
        self._steps: deque[RecordedStep] = deque(maxlen=MAX_STEPS)

    def attach(self, runner: ModelRunner) -> None:
        """Keep every step that `runner` carries out from now on; it costs an append a step."""
        execute = runner.execute

        def recorded(step: StepInput) -> StepOutput:
            output = execute(step)
            self._steps.append(RecordedStep(step, output))
            return output

        runner.execute = recorded

    def write(self, path: Path) -> None:
        """Write what was kept since the last time. No step may run meanwhile."""
        steps, self._steps = self._steps, deque(maxlen=MAX_STEPS)
        beside = path.with_suffix(".part")
        with beside.open("wb") as file:
            pickle.dump(list(steps), file)
        os.replace(beside, path)

    def write_where_told(self, lines: TextIO) -> None:
        """Write to each path that comes in on a line, until there are no more. On a thread of its
        own, which dies with the process."""

        def follow() -> None:
            for line in lines:
                self.write(Path(line.strip()))

        threading.Thread(target=follow, name="recorder", daemon=True).start()


def read_steps(path: Path) -> list[RecordedStep]:
    """What a Recorder of this benchmark has written; not for files of strangers."""
    with path.open("rb") as file:
        return pickle.load(file)


def num_drawn(steps: Iterable[RecordedStep]) -> int:
    return sum(step.output.sampled_token_ids.size for step in steps)
