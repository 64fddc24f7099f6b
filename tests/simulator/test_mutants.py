"""The simulator finds planted bugs. `make sim-mutants` plants them all; here are three."""

from __future__ import annotations

import pytest

from simulator.mutants import (
    MUTANTS,
    Edit,
    Mutant,
    MutationError,
    edits_by_module,
    hunt_all,
    mutated,
    source_path,
)

FEW = (
    "a freed block skips the quarantine",
    "tokens are shown before kvmem has them",
    "a caller who comes back is told everything again",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_source(mutant: Mutant) -> None:
    for module, edits in edits_by_module(mutant).items():
        path = source_path(module)
        compile(mutated(path.read_text(), edits), str(path), "exec")


def test_an_edit_that_fits_nowhere_or_twice_is_an_error() -> None:
    with pytest.raises(MutationError, match="0 times"):
        mutated("a = 1", [Edit("m", "b", "c")])
    with pytest.raises(MutationError, match="2 times"):
        mutated("a = a", [Edit("m", "a", "b")])


def test_planted_bugs_are_found() -> None:
    mutants = [mutant for mutant in MUTANTS if mutant.name in FEW]
    finds = list(hunt_all(mutants, max_seeds=60, num_processes=2))
    assert len(finds) == len(FEW)
    assert [find.name for find in finds if find.seed is None] == []
