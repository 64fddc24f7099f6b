"""`octavo kvmem`: the memory service's journal, and what a running one holds.

The service's own tool reads the journal, in a process of its own, since nothing here knows the
service; the running one is asked.
"""

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
    help="Look after the memory service: its journal, which holds prompts, and its blocks.",
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
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH|ADDRESS",
            help="A journal's folder, or unix:/path or host:port of a running service.",
            show_default="the journal of `octavo up`",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="The service of `octavo up`, not its journal.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Of a running service: the picture as a file as well.")
    ] = None,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Of a journal: token ids as well, prompts and answers."),
    ] = False,
    state_dir: StateFolder = None,
) -> None:
    """A journal: one line for each record. A running service: its block map as a picture."""
    is_running = live or (what is not None and _is_address(what))
    if is_running and tokens:
        raise typer.BadParameter("--tokens is for a journal, and this is a running service")
    if not is_running and svg is not None:
        raise typer.BadParameter("--svg is for a running service, and this is a journal")
    if live and what is not None:
        raise typer.BadParameter("--live is the service of `octavo up`; give no address with it")
    if is_running:
        _show_blocks(what, state_dir, svg)
    else:
        journal = None if what is None else Path(what)
        _run_tool("show", journal, state_dir, *(["--tokens"] if tokens else []))


@app.command()
def purge(
    journal: Journal = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    state_dir: StateFolder = None,
) -> None:
    """Delete it, and what was set aside. Refuses while a service uses it."""
    _run_tool("purge", journal, state_dir, *(["--yes"] if yes else []))


def _is_address(text: str) -> bool:
    """Whether it is an address, and no folder that happens to have such a name."""
    from octavo.service.server import AddressError, check_address

    try:
        check_address(text)
    except AddressError:
        return False
    return text.startswith("unix:") or not Path(text).exists()


def _show_blocks(address: str | None, state_dir: Path | None, svg: Path | None) -> None:
    from rich.console import Console

    from octavo.cli.app import told_plainly
    from octavo.cli.block_map import show_blocks
    from octavo.cli.inspecting import kvmem_address

    console = Console(highlight=False, record=svg is not None)
    with told_plainly():
        try:
            show_blocks(kvmem_address(address, state_dir), console, svg)
        except OSError as error:
            raise typer.BadParameter(f"--svg: {svg} cannot be written: {error.strerror}") from error


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
