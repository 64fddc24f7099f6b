"""The model worker as it is served, whose runner keeps the steps it is given.

`python -m model_worker`, but for that: a path on a line of stdin has them written there.
"""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.recording import Recorder
from model_worker.options import WorkerOptions
from model_worker.serve import serve
from model_worker.threads import place_threads
from octavo.service import logs
from octavo.service.server import run

if TYPE_CHECKING:
    from model_worker.runner import ModelRunner

STEP_TIMEOUT_S = 30.0


def main(
    address: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()] = "",
    num_blocks: Annotated[int, typer.Option(min=1)] = 2048,
    attention: Annotated[str, typer.Option()] = WorkerOptions.attention,
) -> None:
    """Serve until SIGTERM."""
    place_threads()
    logs.setup("octavo-worker")
    recorder = Recorder()

    def load(options: WorkerOptions) -> ModelRunner:
        from model_worker.build import build_runner

        runner = build_runner(options)
        recorder.attach(runner)
        return runner

    recorder.write_where_told(sys.stdin)
    options = WorkerOptions(
        model=model, num_blocks=num_blocks, attention=attention, num_host_blocks=0
    )
    run(serve(address, options, STEP_TIMEOUT_S, load))


if __name__ == "__main__":
    typer.run(main)
