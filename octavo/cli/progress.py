"""Progress for whatever takes longer than a moment: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from octavo.cli.supervisor import ServiceState, Supervisor

_MARKS = {
    ServiceState.STARTING: "…",
    ServiceState.SERVING: "✔",
    ServiceState.WAITING: "↻",
    ServiceState.STOPPED: "■",
    ServiceState.FAILED: "✘",
}


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextlib.contextmanager
def preparing_model(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Gives a callback for (stage, fraction); says at the end how long it took."""
    title, began_s = "Preparing the model", time.monotonic()
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(title, total=1.0)
            yield lambda stage, fraction: bar.update(
                task, description=f"{title}: {stage}", completed=fraction
            )
    else:
        stages: list[str] = []
        yield lambda stage, fraction: _say_new_stage(console, title, stage, fraction, stages)
    console.print(f"The model is ready ({time.monotonic() - began_s:.1f} s).", highlight=False)


def _say_new_stage(
    console: Console, title: str, stage: str, fraction: float, stages: list[str]
) -> None:
    if stage not in stages and fraction < 1:
        stages.append(stage)
        console.print(f"{title}: {stage}", highlight=False)


@contextlib.contextmanager
def generating(console: Console, title: str, max_tokens: int) -> Iterator[Callable[[int], None]]:
    """Gives a callback for the number of tokens that have come."""
    if not console.is_terminal:
        console.print(f"{title} ...")
        yield lambda _: None
        return
    with _bar(console) as bar:
        task = bar.add_task(title, total=max_tokens)
        yield lambda num_tokens: bar.advance(task, num_tokens)


async def starting_services(console: Console, supervisor: Supervisor, timeout_s: float) -> None:
    """Wait until every service serves. Raises ServiceFailedError."""
    began_s = time.monotonic()
    num_services = len(supervisor.services)
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("Starting", total=num_services)

            def show() -> None:
                bar.update(
                    task, description=describe(supervisor), completed=num_serving(supervisor)
                )

            show()
            await supervisor.wait_serving(timeout_s, show)
    else:
        console.print("Starting the services", highlight=False)
        await supervisor.wait_serving(timeout_s)
    seconds = time.monotonic() - began_s
    console.print(f"All {num_services} services are serving ({seconds:.1f} s).", highlight=False)


def num_serving(supervisor: Supervisor) -> int:
    return sum(s.state is ServiceState.SERVING for s in supervisor.services.values())


def describe(supervisor: Supervisor) -> str:
    """Every service with a mark for its state."""
    return "Starting  " + "  ".join(
        f"{_MARKS[service.state]} {name}" for name, service in supervisor.services.items()
    )
