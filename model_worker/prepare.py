"""`python -m model_worker.prepare`: fetch or convert a model before anything waits for it.

Prints one JSON object a line on stdout: {"stage": ..., "fraction": ...} while it works, then
{"path": ...}. When it cannot, the last line is {"error": ...} and the exit status is 1.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Annotated

import typer

from model_worker.errors import ModelError
from model_worker.source import resolve_model


def main(
    model: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_WORKER_MODEL",
            help="A local folder or a hub id; empty: the demo model.",
        ),
    ] = "",
) -> None:
    """Make MODEL ready on this machine and print where it is."""
    # Progress goes to whoever reads stdout; the libraries' own bars and advice do not.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore")
    try:
        source = resolve_model(model, lambda stage, fraction: _emit(stage=stage, fraction=fraction))
    except ModelError as error:
        _emit(error=str(error))
        raise typer.Exit(1) from None
    _emit(path=str(source.path))


def _emit(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    typer.run(main)
