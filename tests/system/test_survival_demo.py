"""The same with a real model: every process dies in turn, under sixteen streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import Generation
from tests.system.stack import Stack
from tests.system.survival import Shape, make_whole, running, shapes, undisturbed

pytestmark = pytest.mark.model

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def real() -> Iterator[Stack]:
    """The demo model in batch-invariant arithmetic, without which only P1 is promised."""
    worker = ("--batch-invariant=on",)
    with Stack(num_blocks=512, worker=worker, journal=True, proxies=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def wanted(real: Stack) -> dict[Shape, Generation]:
    return undisturbed(real, shapes(4, MAX_TOKENS))


@pytest.mark.parametrize("name", ["scheduler", "kvmem", "worker"])
def test_a_process_is_killed_under_the_real_model(
    real: Stack, wanted: dict[Shape, Generation], name: str
) -> None:
    make_whole(real)
    with running(real, wanted):
        real.kill(name)
        real.start(name)
