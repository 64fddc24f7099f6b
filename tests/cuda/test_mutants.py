"""The checks bite: each mistake of `mutants.MUTANTS`, put into the kernels, makes one fail."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model_worker.attention.cuda_kernels import COPY_BLOCKS, WRITE_KV, Kernel, attention_kernels
from tests.cuda.checks import SHAPES
from tests.cuda.host import EmulationError, HostLauncher
from tests.cuda.mutants import MUTANTS, Mutant, run_check

SEEDS = (0, 1, 2, 3)
HANG_S = 60
NOTICED, MISSED = 3, 4


class Edit:
    """Puts a mutant into the source that has its text; counts, since one has it once."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self.num_places = 0

    def __call__(self, source: str) -> str:
        self.num_places += source.count(self._mutant.text)
        return source.replace(self._mutant.text, self._mutant.becomes)


def kernels_of(check: str) -> list[Kernel]:
    """What the check called `check` runs."""
    if check == "copies":
        return [COPY_BLOCKS]
    if check == "large offsets":
        return [WRITE_KV, attention_kernels(torch.bfloat16, 256, 1).attention]
    shape = SHAPES[check]
    kernels = attention_kernels(shape.dtype, shape.head_dim, shape.group)
    return [WRITE_KV, kernels.attention]


def prepare(name: str) -> HostLauncher:
    edit = Edit(MUTANTS[name])
    launcher = HostLauncher(num_resident=64, edit=edit, extra_flags=("-O1", "-w"))
    for kernel in kernels_of(MUTANTS[name].check):
        launcher.prepare(kernel)
    assert edit.num_places == 1, f"{name}: its text is there {edit.num_places} times"
    return launcher


@pytest.fixture(scope="module")
def launchers() -> Iterator[dict[str, HostLauncher]]:
    """The mutants, built two at a time; after a check that warms torch up for all children."""
    run_check("plain", HostLauncher())
    with ThreadPoolExecutor(2) as pool:
        built = {name: pool.submit(prepare, name) for name in MUTANTS}
        yield {name: future.result() for name, future in built.items()}


def in_child(work: HostLauncher, check: str) -> int:
    """The exit code of a child that runs the check, or minus the signal that ended it: a mutant
    may write anywhere. Other exceptions make it 1, which is neither outcome."""
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            faulthandler.disable()
            signal.alarm(HANG_S)
            torch.set_num_threads(1)
            for seed in SEEDS:
                work.seed = seed
                run_check(check, work)
            outcome = MISSED
        except (AssertionError, EmulationError):
            outcome = NOTICED
        finally:
            os._exit(outcome)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(name: str, launchers: dict[str, HostLauncher]) -> None:
    outcome = in_child(launchers[name], MUTANTS[name].check)
    assert outcome != MISSED, "every check passes"
    assert outcome in (NOTICED, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT), outcome


@pytest.mark.parametrize("check", sorted({mutant.check for mutant in MUTANTS.values()}))
def test_without_a_mistake_the_same_checks_pass(check: str) -> None:
    assert in_child(HostLauncher(num_resident=64), check) == MISSED
