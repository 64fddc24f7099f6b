"""Proof that the simulator bites: known bugs are planted, one at a time, and each must be found.

`python -m simulator.mutants` prints a table (mutant, seed that found it, by which check) and
exits 1 when one survives. A mutant is a few substitutions in the source of a core; one
that matches nothing, or more than one place, is an error. Each runs in a process of its own, where
the changed source is compiled in place of the real one.

Nothing here may import a core before the changed source is in place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated

import typer

from simulator.mutant import Edit, Mutant
from simulator.mutants_kvmem import KVMEM_MUTANTS
from simulator.mutants_scheduler import SCHEDULER_MUTANTS

MAX_SEEDS = 300
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Find:
    """`seed` None: the mutant survived."""

    name: str
    seed: int | None
    check: str = ""
    violation: str = ""


class MutationError(Exception):
    """An edit does not fit the source."""


MUTANTS = (*KVMEM_MUTANTS, *SCHEDULER_MUTANTS)


# ---- planting ----


def mutated(source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits made. Raises MutationError."""
    for edit in edits:
        count = source.count(edit.old)
        if count != 1:
            raise MutationError(f"{edit.old!r} stands {count} times in {edit.module}")
        source = source.replace(edit.old, edit.new)
    return source


def edits_by_module(mutant: Mutant) -> dict[str, list[Edit]]:
    modules: dict[str, list[Edit]] = {}
    for edit in mutant.edits:
        modules.setdefault(edit.module, []).append(edit)
    return modules


def source_path(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


class _MutatingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, edits: Sequence[Edit]) -> None:
        super().__init__(module, str(source_path(module)))
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        """As compiled from the changed source; no cached bytecode is read or written."""
        del fullname
        source = self.get_data(self.path).decode()
        return self.source_to_code(mutated(source, self._edits).encode(), self.path)


class _MutatingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._edits = edits_by_module(mutant)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        edits = self._edits.get(fullname)
        if edits is None:
            return None
        loader = _MutatingLoader(fullname, edits)
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def plant(mutant: Mutant) -> None:
    """From here on the process imports the mutant in place of the real modules."""
    for module in edits_by_module(mutant):
        assert module not in sys.modules, f"{module} has been imported already"
    sys.meta_path.insert(0, _MutatingFinder(mutant))


# ---- hunting ----


def hunt(mutant: Mutant, max_seeds: int) -> Find:
    """Run seeds until a check fails. For a fresh process: it keeps the mutant for good."""
    plant(mutant)
    from simulator.world import simulate

    for seed in range(max_seeds):
        outcome = simulate(seed)
        if outcome.violation:
            return Find(mutant.name, seed, outcome.check, outcome.violation)
    return Find(mutant.name, None)


def hunt_all(mutants: Sequence[Mutant], max_seeds: int, num_processes: int) -> Iterator[Find]:
    """Each mutant in a process of its own; in order, as they are found."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, max_tasks_per_child=1) as executor:
        yield from executor.map(partial(hunt, max_seeds=max_seeds), mutants)


def main(
    only: Annotated[str, typer.Option(help="Those with this in their name")] = "",
    max_seeds: Annotated[int, typer.Option(min=1)] = MAX_SEEDS,
    processes: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Plant every bug and find it."""
    mutants = [mutant for mutant in MUTANTS if only in mutant.name]
    width = max((len(mutant.name) for mutant in mutants), default=0)
    survivors = 0
    for find in hunt_all(mutants, max_seeds, processes):
        seed = "SURVIVES" if find.seed is None else f"seed {find.seed}"
        print(f"{find.name:<{width}}  {seed:>8}  {find.check}", flush=True)
        survivors += find.seed is None
    num_found = len(mutants) - survivors
    print(f"{num_found} of {len(mutants)} mutants found, within {max_seeds} seeds each")
    raise typer.Exit(1 if survivors or not mutants else 0)


if __name__ == "__main__":
    typer.run(main)
