"""`octavo up` and `octavo prepare`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from octavo.cli.merged_log import MergedLog
from octavo.cli.progress import preparing_model, starting_services
from octavo.cli.stack import READY_TIMEOUT_S, Stack, StackOptions, prepare_model, run_stack
from octavo.cli.state import StateDir


async def run_up(state: StateDir, options: StackOptions, console: Console) -> int:
    """Run a stack until it is told to stop; the exit status. Raises StateError, StackError,
    ServiceFailedError."""
    with state.lock():
        log = MergedLog(state.log_path, console)
        try:
            return await _run(state, options, log, console)
        finally:
            log.close()


async def _run(state: StateDir, options: StackOptions, log: MergedLog, console: Console) -> int:
    stack = Stack(state, options, log, env=os.environ)

    async def serve() -> None:
        with preparing_model(console) as progress:
            model_path = await stack.prepare(progress)
        supervisor = stack.launch(model_path)
        await starting_services(console, supervisor, READY_TIMEOUT_S)
        console.print(_welcome(stack, state))
        await supervisor.wait_failed()

    def say_stopping() -> None:
        console.print("Stopping. Ctrl-C again kills what is left.")

    def say_stopped(service: str) -> None:
        console.print(f"{service} has ended.")

    return await run_stack(stack, serve, say_stopping, say_stopped)


def _welcome(stack: Stack, state: StateDir) -> Panel:
    lines = [
        "[bold]Octavo is serving.[/]  In another terminal:",
        '  octavo chat "What is the capital of France?"',
        "  octavo chat",
        f"address  {stack.addresses['scheduler']}",
        *([f"address  {stack.options.listen}"] if stack.options.listen else []),
        f"log      {state.log_path}",
    ]
    return Panel("\n".join(lines), expand=False)


async def run_prepare(model: str, console: Console) -> None:
    """Make a model ready and say where it is. Raises StackError."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        log = MergedLog(Path(scratch) / "prepare.log", console)
        try:
            with preparing_model(console) as progress:
                path = await prepare_model(model, progress, log, os.environ)
        finally:
            log.close()
    console.print(path, soft_wrap=True)
