"""`octavo kvmem`: the memory service's journal. The service's own tool does the work, in a process
of its own, since nothing here knows the service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look after the memory service's journal. It holds prompts.",
)

Journal = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", help="The journal's folder.", show_default="that of `octavo up`"
    ),
]
StateFolder = Annotated[
    Path | None, typer.Option(envvar="OCTAVO_STATE_DIR", help="Whose journal, without a PATH.")
]


@app.command()
def verify(journal: Journal = None, state_dir: StateFolder = None) -> None:
    """Read everything and say whether it is whole; exit status 3 when it is not."""
    _run_tool("verify", journal, state_dir)


@app.command()
def show(
    journal: Journal = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids as well: prompts and answers.")
    ] = False,
    state_dir: StateFolder = None,
) -> None:
    """One line for each record; nothing of prompts unless asked for."""
    _run_tool("show", journal, state_dir, *(["--tokens"] if tokens else []))


@app.command()
def purge(
    journal: Journal = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    state_dir: StateFolder = None,
) -> None:
    """Delete it, and what was set aside. Refuses while a service uses it."""
    _run_tool("purge", journal, state_dir, *(["--yes"] if yes else []))


def _run_tool(command: str, journal: Path | None, state_dir: Path | None, *options: str) -> None:
    """Ends this process with the tool's exit status."""
    from octavo.cli.state import default_state_dir, journal_path

    path = journal or journal_path(state_dir or default_state_dir())
    tool = [sys.executable, "-m", "kvmem_svc.journal.tool", command, str(path), *options]
    try:
        status = subprocess.run(tool, check=False).returncode
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(status)
