"""Stacks shared by the session, and the services' logs beside every failure."""

from __future__ import annotations

import os

# Before any test imports torch, whose OpenMP threads would spin on cores that the services need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo import Generation
from tests.system.models import TINY_WORKER, Transformers, save_tiny_llama
from tests.system.stack import RUNNING, Stack
from tests.system.survival import LEASE_TTL_MS, MAX_TOKENS, Shape, shapes, undisturbed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.failed:
        for stack in RUNNING:
            report.sections.append((f"services in {stack.folder}", stack.logs()))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_reference(tiny_model: Path) -> Transformers:
    return Transformers(tiny_model)


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Iterator[Stack]:
    """The tiny model with room for everything a test throws at it."""
    with Stack(model=tiny_model, num_blocks=1024, worker=TINY_WORKER) as stack:
        yield stack


@pytest.fixture(scope="session")
def small(tiny_model: Path) -> Iterator[Stack]:
    """The tiny model with a pool of 480 tokens, less than the model's 512."""
    with Stack(
        model=tiny_model,
        num_blocks=30,
        worker=TINY_WORKER,
        scheduler=("--max-num-seqs=16", "--max-waiting=64"),
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def mortal(tiny_model: Path) -> Iterator[Stack]:
    """The tiny model, with all that is needed to survive, and to make that hard."""
    with Stack(
        model=tiny_model,
        num_blocks=640,
        worker=TINY_WORKER,
        kvmem=(f"--lease-ttl-ms={LEASE_TTL_MS}",),
        journal=True,
        proxies=True,
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def expected(mortal: Stack) -> Mapping[Shape, Generation]:
    """What each kind of request answers when it is alone and nothing happens."""
    return undisturbed(mortal, shapes(8, MAX_TOKENS))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    from model_worker.demo_model import prepare

    return prepare()


@pytest.fixture(scope="session")
def demo_reference(demo_model: Path) -> Transformers:
    return Transformers(demo_model)


@pytest.fixture(scope="session")
def demo(demo_model: Path) -> Iterator[Stack]:
    """The demo model with a pool that needs no preemption."""
    with Stack(num_blocks=256) as stack:
        yield stack
