"""Who may execute, and in which order."""

from __future__ import annotations

import pytest

from model_worker.errors import StepError
from model_worker.fencing import Fence, Fencing


def fence(epoch: int, kvmem: str = "k1", worker: str = "w1", session: str = "s") -> Fence:
    return Fence(session, epoch, kvmem, worker)


def reason(call, *arguments) -> str:
    with pytest.raises(StepError) as caught:
        call(*arguments)
    return caught.value.reason


@pytest.fixture
def fencing() -> Fencing:
    fencing = Fencing("w1")
    assert fencing.check(fence(5))
    fencing.install(fence(5))
    return fencing


def test_epochs_only_grow(fencing):
    assert not fencing.check(fence(5))
    assert reason(fencing.check, fence(4)) == "STALE_EPOCH"
    assert fencing.check(fence(6))
    assert not fencing.check(fence(5))  # a check alone installs nothing
    fencing.install(fence(6))
    assert reason(fencing.check, fence(5)) == "STALE_EPOCH"


def test_an_epoch_is_one_sessions(fencing):
    assert reason(fencing.check, fence(5, session="t")) == "STALE_EPOCH"


@pytest.mark.parametrize("worker", ["", "w0", "W1"])
def test_a_fence_for_another_worker_is_refused(fencing, worker):
    assert reason(fencing.check, fence(9, worker=worker)) == "STALE_BOOT_ID"


def test_a_new_life_of_the_memory_service_replaces_the_old_for_good(fencing):
    assert fencing.check(fence(1, kvmem="k2"))
    fencing.install(fence(1, kvmem="k2"))
    assert reason(fencing.check, fence(99)) == "STALE_BOOT_ID"
    assert not fencing.check(fence(1, kvmem="k2"))


def test_step_ids_grow_over_sessions(fencing):
    assert fencing.begin_step(fence(5), 10)
    fencing.end_step(10)
    assert not fencing.begin_step(fence(5), 11)
    for step_id in (0, 9, 10):
        assert reason(fencing.begin_step, fence(5), step_id) == "STEP_OUT_OF_ORDER"
    fencing.install(fence(6))
    assert reason(fencing.begin_step, fence(6), 10) == "STEP_OUT_OF_ORDER"
    assert fencing.begin_step(fence(6), 11)  # 11 never ended, so it may be issued again


def test_a_memory_service_that_starts_over_counts_steps_from_the_start(fencing):
    fencing.begin_step(fence(5), 10)
    fencing.end_step(10)
    fencing.install(fence(1, kvmem="k2"))
    assert fencing.begin_step(fence(1, kvmem="k2"), 1)
    fencing.end_step(1)
    assert reason(fencing.begin_step, fence(1, kvmem="k2"), 1) == "STEP_OUT_OF_ORDER"


def test_a_step_that_waited_while_its_session_ended_is_not_run(fencing):
    fencing.install(fence(6))
    assert reason(fencing.begin_step, fence(5), 1) == "STALE_EPOCH"


def test_the_last_step_is_that_of_the_life_asked_about(fencing):
    assert fencing.last_step_id_of("k1") == 0
    fencing.begin_step(fence(5), 10)
    assert fencing.last_step_id_of("k1") == 0  # begun, not executed
    fencing.end_step(10)
    assert fencing.last_step_id_of("k1") == 10
    assert fencing.last_step_id_of("k2") == 0
    fencing.install(fence(1, kvmem="k2"))
    assert fencing.last_step_id_of("k2") == 0


def test_a_first_step_that_fails_leaves_nothing_of_the_life_before(fencing):
    fencing.begin_step(fence(5), 10)
    fencing.end_step(10)
    fencing.install(fence(1, kvmem="k2"))
    assert fencing.begin_step(fence(1, kvmem="k2"), 3)  # and fails: it never ends
    assert fencing.last_step_id_of("k2") == 0
    assert not fencing.begin_step(fence(1, kvmem="k2"), 3)


def test_steps_count_from_one(fencing):
    assert reason(fencing.begin_step, fence(5), 0) == "STEP_OUT_OF_ORDER"
