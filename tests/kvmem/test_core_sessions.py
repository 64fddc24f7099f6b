"""Sessions, fences, batch numbers, pools."""

from __future__ import annotations

import dataclasses

import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import errors
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.sequences import Status
from tests.kvmem.driver import Driver, i32, u64

# --- one holder at a time ---------------------------------------------------------------


def test_a_session_held_by_a_stream_is_not_taken_over() -> None:
    memory = Driver().memory
    with pytest.raises(errors.SessionHeld, match="'test'"):
        memory.open_session("other", 10**9, held_by_stream=True)


def test_a_session_whose_stream_broke_is_taken_over_at_once() -> None:
    memory = Driver().memory
    first = memory.ledger.fence()
    memory.ledger.release(first.session_id, 0)
    second = memory.open_session("other", 1, held_by_stream=True)
    assert second.epoch == first.epoch + 1
    with pytest.raises(errors.StaleEpoch, match="epoch 1 is stale, the newest one is 2"):
        memory.apply(b.Batch(first, 1, 0, 0, [], b""), 1)


def test_the_lease_of_unary_calls_ends_after_silence_and_not_before() -> None:
    memory = KvMemory("boot", max_sequences=4, lease_ttl_ms=100)
    memory.open_session("one", 0, held_by_stream=False)
    fence = memory.ledger.fence()
    memory.apply(b.Batch(fence, 1, 0, 0, [], b""), 99)  # renews it to 199
    with pytest.raises(errors.SessionHeld) as held:
        memory.open_session("two", 198, held_by_stream=False)
    assert held.value.retry_after_ms == 1
    with pytest.raises(errors.LeaseExpired):
        memory.apply(b.Batch(fence, 2, 0, 0, [], b""), 199)
    assert memory.open_session("two", 199, held_by_stream=False).epoch == 2


def test_a_closed_session_is_unknown() -> None:
    memory = Driver().memory
    fence = memory.ledger.fence()
    memory.close_session(fence, 0)
    with pytest.raises(errors.UnknownSession):
        memory.apply(b.Batch(fence, 1, 1, 0, [], b""), 0)
    assert memory.open_session("other", 0, held_by_stream=True).epoch == 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kvmem_boot_id": "before"}, errors.StaleBootId),
        ({"worker_boot_id": "before"}, errors.StaleBootId),
        ({"worker_boot_id": ""}, errors.StaleBootId),
        ({"epoch": 0}, errors.StaleEpoch),
        ({"epoch": 2}, errors.UnknownSession),
        ({"session_id": "mine"}, errors.UnknownSession),
    ],
)
def test_a_fence_that_does_not_fit_changes_nothing(change: dict, error: type) -> None:
    driver = Driver()
    batch = driver.batch(b.Arrive("r", i32(1)))
    with pytest.raises(error):
        driver.memory.apply(
            dataclasses.replace(batch, fence=dataclasses.replace(batch.fence, **change)), 0
        )
    assert not driver.manager.requests
    assert driver.memory.ledger.next_batch_seq == batch.batch_seq


# --- resuming ---------------------------------------------------------------------------


def test_the_holder_of_a_broken_stream_resumes_and_gets_lost_results_again() -> None:
    driver = Driver()
    memory, fence = driver.memory, driver.memory.ledger.fence()
    batches = [driver.batch(b.Arrive(f"r{i}", i32(1)), batch_seq=i) for i in (1, 2, 3)]
    results = [memory.apply(batch, 0) for batch in batches]
    memory.ledger.release(fence.session_id, 0)
    memory.resume_session(fence, 1, 150, held_by_stream=True)
    with pytest.raises(errors.SessionHeld):
        memory.open_session("other", 10**9, held_by_stream=True)
    assert memory.ledger.next_batch_seq == 4
    assert [memory.apply(batch, 10**9) for batch in batches[1:]] == results[1:]
    assert len(driver.manager.requests) == 3


def test_resuming_ends_with_the_grace_and_with_a_newer_session() -> None:
    driver = Driver()
    memory, fence = driver.memory, driver.memory.ledger.fence()
    memory.ledger.release(fence.session_id, 0)
    with pytest.raises(errors.LeaseExpired):
        memory.resume_session(fence, 0, 200, held_by_stream=True)
    memory.open_session("other", 100, held_by_stream=True)
    with pytest.raises(errors.StaleEpoch):
        memory.resume_session(fence, 0, 100, held_by_stream=True)


@pytest.mark.parametrize("last", [1, 11])
def test_resuming_outside_the_kept_results_is_a_gap(last: int) -> None:
    driver = Driver()
    for _ in range(10):
        driver.do()
    with pytest.raises(errors.SequenceGap, match=r"2 \.\. 10"):
        driver.memory.resume_session(driver.memory.ledger.fence(), last, 0, held_by_stream=True)


# --- batch numbers ----------------------------------------------------------------------


def test_the_same_batch_again_gives_the_same_result_and_changes_nothing() -> None:
    driver = Driver()
    batch = driver.batch(b.Arrive("r", i32(1, 2)))
    result = driver.memory.apply(batch, 0)
    before = driver.state()
    assert driver.memory.apply(batch, 0) is result
    assert driver.state() == before


def test_the_same_number_with_other_ops_is_refused() -> None:
    driver = Driver()
    driver.do(b.Arrive("r", i32(1, 2)))
    with pytest.raises(errors.BatchConflict, match="batch 1 "):
        driver.memory.apply(driver.batch(b.Arrive("s", i32(1, 2)), batch_seq=1), 0)
    assert list(driver.manager.requests) == ["r"]


@pytest.mark.parametrize("batch_seq", [0, 2, 12])
def test_a_gap_is_refused(batch_seq: int) -> None:
    driver = Driver()
    for _ in range(10):
        driver.do()
    with pytest.raises(errors.SequenceGap, match=f"batch_seq {batch_seq} "):
        driver.memory.apply(driver.batch(batch_seq=batch_seq), 0)


def test_steps_never_go_back_and_acknowledgement_never_leads() -> None:
    driver = Driver()
    driver.step_id, driver.acknowledged = 7, 5
    driver.do()
    for step_id, acknowledged, error in (
        (6, 5, errors.StepOutOfOrder),
        (7, 4, errors.StepOutOfOrder),
        (8, 9, errors.InvalidBatch),
    ):
        driver.step_id, driver.acknowledged = step_id, acknowledged
        with pytest.raises(error):
            driver.memory.apply(driver.batch(), 0)
    driver.step_id, driver.acknowledged = 8, 8
    driver.do()


def test_a_batch_of_too_many_ops_is_refused_whole() -> None:
    driver = Driver()
    ops = [b.Arrive("r", i32(1))] * 8193
    with pytest.raises(errors.InvalidBatch, match="8193 ops"):
        driver.memory.apply(driver.batch(*ops), 0)
    assert not driver.manager.requests


# --- takeover ---------------------------------------------------------------------------


def test_b04_a_takeover_takes_blocks_back_but_not_before_the_last_step_is_over() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    driver.step_id, driver.acknowledged = 4, 2
    driver.do(b.Append(running, i32(5)))
    driver.memory.ledger.close(driver.memory.ledger.fence().session_id)
    driver.memory.open_session("other", 0, held_by_stream=True)
    levels = driver.memory.levels()
    assert (levels.num_quarantined_blocks, levels.num_free_sequences) == (3, 8)
    assert not driver.manager.requests
    driver.step_id = 5
    assert driver.do().levels.num_quarantined_blocks == 3
    driver.acknowledged = 4
    assert driver.do().levels.num_free_blocks == 8


def test_results_of_a_former_session_are_not_given_to_the_next() -> None:
    driver = Driver()
    for _ in range(3):
        driver.do()
    driver.memory.ledger.close(driver.memory.ledger.fence().session_id)
    driver.memory.open_session("other", 0, held_by_stream=True)
    with pytest.raises(errors.SequenceGap):
        driver.memory.apply(driver.batch(batch_seq=3), 0)
    assert driver.do().batch_seq == 1


# --- pools ------------------------------------------------------------------------------


def test_ops_need_a_pool() -> None:
    memory = KvMemory("boot", max_sequences=4)
    memory.open_session("one", 0, held_by_stream=True)
    fence = memory.ledger.fence()
    memory.apply(b.Batch(fence, 1, 0, 0, [], b""), 0)
    with pytest.raises(errors.NoPool):
        memory.apply(b.Batch(fence, 2, 0, 0, [b.Arrive("r", i32(1))], b""), 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_blocks": 0}, "num_blocks is 0, it must be 1 .. 2147483647"),
        ({"num_blocks": 2**31}, "num_blocks is 2147483648"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 1025}, "block_size is 1025"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 2**20 + 1}, "max_model_len is 1048577"),
    ],
)
def test_a_geometry_out_of_range_is_refused(change: dict, says: str) -> None:
    memory = KvMemory("boot", max_sequences=4)
    memory.open_session("one", 0, held_by_stream=True)
    geometry = dataclasses.replace(b.PoolGeometry(8, 4, 32), **change)
    with pytest.raises(errors.InvalidGeometry, match=says):
        memory.attach_pool(memory.ledger.fence(), "worker", geometry, 0)
    assert memory.manager is None


def test_a_block_size_need_not_be_a_power_of_two() -> None:
    driver = Driver(block_size=5, max_model_len=11)
    running = driver.run("r", 11)
    assert len(driver.table(running)) == 3


def test_a_pool_of_any_size_is_attached_without_touching_it() -> None:
    """Three gigablocks of columns would be felt; nothing but what is used is touched."""
    driver = Driver(num_blocks=2**28)
    running = driver.run("r", 8)
    assert driver.do(b.Free([running])).levels.num_free_blocks == 2**28


def test_the_same_worker_again_changes_nothing_and_another_geometry_is_refused() -> None:
    driver = Driver()
    driver.run("r", 8)
    before = driver.state()
    fence = driver.memory.ledger.fence()
    assert not driver.memory.attach_pool(fence, "worker", driver.geometry, 0)
    other = dataclasses.replace(driver.geometry, num_blocks=9)
    with pytest.raises(errors.InvalidGeometry, match="num_blocks=9"):
        driver.memory.attach_pool(fence, "worker", other, 0)
    assert driver.state() == before


def test_another_worker_takes_every_block_back_and_everybody_waits() -> None:
    driver = Driver()
    running, stale = driver.run("r", 8), driver.batch()
    driver.step_id = 3
    driver.do(b.Free([driver.run("s", 4)]))
    geometry = b.PoolGeometry(5, 2, 40)
    fence = driver.memory.ledger.fence()
    assert driver.memory.attach_pool(fence, "worker 2", geometry, 0)
    assert driver.memory.levels().num_free_blocks == 5
    view = driver.view(running)
    assert (view.status, view.num_computed_tokens, view.table_version) == (Status.WAITING, 0, 2)
    assert driver.tokens(running) == list(range(8))
    with pytest.raises(errors.StaleBootId, match="'worker'"):
        driver.memory.apply(stale, 0)
    driver.do(b.Admit([b.AdmitMember(running, 8)]))
    driver.do(b.Reserve(u64(running), i32(10)))
    assert len(driver.table(running)) == 5


def test_results_with_blocks_of_a_worker_that_is_gone_are_not_given_again() -> None:
    driver = Driver()
    driver.run("r", 8)
    fence = driver.memory.ledger.fence()
    driver.memory.attach_pool(fence, "worker 2", driver.geometry, 0)
    with pytest.raises(errors.SequenceGap):
        driver.memory.apply(driver.batch(batch_seq=2), 0)


def test_a_worker_whose_model_is_too_short_for_a_live_sequence_is_refused() -> None:
    driver = Driver()
    driver.run("r", 20)
    geometry = dataclasses.replace(driver.geometry, max_model_len=16)
    with pytest.raises(errors.InvalidGeometry, match="20 tokens"):
        driver.memory.attach_pool(driver.memory.ledger.fence(), "worker 2", geometry, 0)


def test_stats_count_what_happened() -> None:
    driver = Driver()
    parent = driver.run("r", 6)
    [child] = driver.fork(parent)
    driver.do(b.Append(child, i32(1)))
    assert driver.memory.stats().num_shared_blocks == 1
    driver.do(b.Preempt([child]))
    stats = driver.memory.stats()
    assert stats.num_allocations == 3
    assert stats.num_copies_on_write == 1
    assert stats.num_preemptions == 1
    assert stats.peak_in_use_blocks == 3
    assert (stats.num_requests, stats.num_sequences) == (1, 2)
