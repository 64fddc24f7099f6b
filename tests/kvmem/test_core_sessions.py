"""Sessions, fences, batch numbers, pools."""

from __future__ import annotations

import dataclasses

import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import errors
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import ConfirmPool, GrantSession
from kvmem_svc.core.sequences import Status
from tests.kvmem.driver import Driver, i32, u64

# --- one holder at a time ---------------------------------------------------------------


def pass_time(gatekeeper: Gatekeeper, start_ms: int, end_ms: int) -> None:
    """As the shell lets it: a look at the clock every 100 ms."""
    for now_ms in range(start_ms, end_ms, 100):
        gatekeeper.tick(now_ms)
    gatekeeper.tick(end_ms)


def test_a_silent_session_is_taken_over_when_its_lease_ends_and_not_before() -> None:
    driver = Driver()
    gatekeeper, first = driver.gatekeeper, driver.memory.ledger.fence()
    pass_time(gatekeeper, 0, 900)
    driver.gatekeeper.apply(driver.batch(), 900)  # renews it to 1900
    late = driver.batch()
    pass_time(gatekeeper, 900, 1_899)
    with pytest.raises(errors.SessionHeld, match="'test'") as held:
        gatekeeper.open_session("other", 1_899)
    assert held.value.retry_after_ms == 1
    assert held.value.metadata == {"holder": "test", "holder_address": "here:1"}
    with pytest.raises(errors.LeaseExpired):
        gatekeeper.apply(late, 1_900)
    second = gatekeeper.open_session("other", 1_900)
    assert second.epoch == first.epoch + 1
    with pytest.raises(errors.StaleEpoch, match="epoch 1 is stale, the newest one is 2"):
        gatekeeper.apply(late, 1_900)


def test_heartbeats_renew_the_lease_of_an_idle_session() -> None:
    driver = Driver()
    session = driver.memory.ledger.session
    assert session is not None
    for now_ms in range(0, 5_000, 400):
        driver.gatekeeper.heartbeat(session, now_ms)
    with pytest.raises(errors.SessionHeld):
        driver.gatekeeper.open_session("other", 5_000)
    pass_time(driver.gatekeeper, 5_000, 5_800)
    with pytest.raises(errors.LeaseExpired):
        driver.gatekeeper.heartbeat(session, 5_800)
    driver.gatekeeper.open_session("other", 5_800)
    with pytest.raises(errors.StaleEpoch):
        driver.gatekeeper.heartbeat(session, 5_800)


def test_a_lease_is_extended_by_the_time_in_which_nobody_could_speak() -> None:
    """The memory service was paused for an hour: that counts for half a second."""
    driver = Driver()
    driver.gatekeeper.tick(3_600_000)
    with pytest.raises(errors.SessionHeld) as held:
        driver.gatekeeper.open_session("other", 3_600_000)
    assert held.value.retry_after_ms == 200
    pass_time(driver.gatekeeper, 3_600_000, 3_600_499)
    driver.gatekeeper.apply(driver.batch(), 3_600_499)


def test_time_that_goes_back_changes_nothing() -> None:
    driver = Driver()
    driver.gatekeeper.tick(10_000)  # counts for 500
    driver.gatekeeper.tick(1_000)
    pass_time(driver.gatekeeper, 1_000, 1_499)
    with pytest.raises(errors.SessionHeld):
        driver.gatekeeper.open_session("other", 1_499)
    driver.gatekeeper.open_session("other", 1_500)


def test_a_closed_session_is_unknown() -> None:
    driver = Driver()
    batch = driver.batch()
    driver.gatekeeper.close_session(batch.fence, 0)
    with pytest.raises(errors.UnknownSession):
        driver.gatekeeper.apply(batch, 0)
    assert driver.gatekeeper.open_session("other", 0).epoch == 2


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
        driver.gatekeeper.apply(
            dataclasses.replace(batch, fence=dataclasses.replace(batch.fence, **change)), 0
        )
    assert not driver.manager.requests
    assert driver.memory.ledger.next_batch_seq == batch.batch_seq


# --- resuming ---------------------------------------------------------------------------


def released(driver: Driver) -> b.Fence:
    """The stream of the open session breaks at 0."""
    session = driver.memory.ledger.session
    assert session is not None
    driver.gatekeeper.release_session(session, 0)
    return driver.memory.ledger.fence()


def test_the_holder_of_a_broken_stream_resumes_and_gets_lost_results_again() -> None:
    driver = Driver()
    batches = [driver.batch(b.Arrive(f"r{i}", i32(1)), batch_seq=i) for i in (1, 2, 3)]
    results = [driver.gatekeeper.apply(batch, 0) for batch in batches]
    fence = released(driver)
    driver.gatekeeper.resume_session(fence, 1, 150)
    assert driver.gatekeeper.mutations_open
    assert driver.memory.ledger.next_batch_seq == 4
    assert [driver.gatekeeper.apply(batch, 1_000) for batch in batches[1:]] == results[1:]
    assert len(driver.manager.requests) == 3
    pass_time(driver.gatekeeper, 1_000, 1_900)
    with pytest.raises(errors.SessionHeld):  # it has a whole lease again
        driver.gatekeeper.open_session("other", 1_900)


def test_only_its_holder_has_a_session_whose_stream_broke_until_the_grace_is_over() -> None:
    driver = Driver()
    fence = released(driver)
    with pytest.raises(errors.SessionHeld) as held:
        driver.gatekeeper.open_session("other", 199)
    assert held.value.retry_after_ms == 1
    driver.gatekeeper.apply(driver.batch(), 199)  # does not make the grace longer
    with pytest.raises(errors.LeaseExpired):
        driver.gatekeeper.resume_session(fence, 0, 200)
    driver.gatekeeper.open_session("other", 200)
    with pytest.raises(errors.StaleEpoch):
        driver.gatekeeper.resume_session(fence, 0, 200)


def test_a_lease_that_has_ended_is_not_brought_back_by_the_end_of_its_stream() -> None:
    """It is by being refused that its holder, back from a pause, ends the stream."""
    driver = Driver()
    session = driver.memory.ledger.session
    assert session is not None
    pass_time(driver.gatekeeper, 0, 1_000)
    with pytest.raises(errors.LeaseExpired):
        driver.gatekeeper.heartbeat(session, 1_000)
    fence = driver.memory.ledger.fence()
    driver.gatekeeper.release_session(session, 1_000)
    with pytest.raises(errors.LeaseExpired):
        driver.gatekeeper.resume_session(fence, 0, 1_000)
    driver.gatekeeper.open_session("other", 1_000)


def test_the_end_of_a_former_sessions_stream_is_not_the_end_of_the_newest() -> None:
    driver = Driver()
    former = driver.memory.ledger.session
    assert former is not None
    driver.take_over()
    driver.gatekeeper.release_session(former, 0)
    driver.gatekeeper.abandon_session(former)
    with pytest.raises(errors.SessionHeld):
        driver.gatekeeper.open_session("third", 450)


def test_a_session_that_its_holder_never_heard_of_is_taken_over_at_once() -> None:
    driver = Driver()
    session = driver.memory.ledger.session
    assert session is not None
    driver.gatekeeper.abandon_session(session)
    assert driver.gatekeeper.open_session("other", 0).epoch == 2


@pytest.mark.parametrize("last", [1, 11])
def test_resuming_outside_the_kept_results_is_a_gap(last: int) -> None:
    driver = Driver()
    for _ in range(10):
        driver.do()
    with pytest.raises(errors.SequenceGap, match=r"2 \.\. 10"):
        driver.gatekeeper.resume_session(driver.memory.ledger.fence(), last, 0)


# --- after a recovery -------------------------------------------------------------------


def recovered(driver: Driver) -> Gatekeeper:
    """A new process has the state from a journal."""
    return Gatekeeper(driver.memory, driver.gatekeeper.leases.times, recovered=True)


def test_after_a_recovery_the_holder_resumes_and_confirms_the_pool_again() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    batch = driver.batch(b.Append(running, i32(5)))
    result = driver.gatekeeper.apply(batch, 0)
    before = driver.state()
    driver.gatekeeper = gatekeeper = recovered(driver)
    with pytest.raises(errors.SessionHeld):
        gatekeeper.open_session("other", 10**6)
    session = gatekeeper.resume_session(batch.fence, 1, 10**6 + 500)
    assert session.epoch == 1
    assert not gatekeeper.mutations_open
    for call in (lambda: gatekeeper.apply(batch, 10**6), lambda: gatekeeper.adopt(batch.fence, 0)):
        with pytest.raises(errors.NoPool, match="recovered"):
            call()
    confirmed = driver.confirm()
    assert (confirmed.is_new_pool, confirmed.pending_copies) == (False, ())
    assert gatekeeper.mutations_open
    assert gatekeeper.apply(batch, 10**6) is result
    assert driver.state() == before
    driver.do(b.Append(running, i32(6)))


def test_after_a_recovery_the_grace_ends_and_another_holder_takes_over() -> None:
    driver = Driver()
    gatekeeper = recovered(driver)
    fence = driver.memory.ledger.fence()
    pass_time(gatekeeper, 0, 699)
    with pytest.raises(errors.SessionHeld):
        gatekeeper.open_session("other", 699)
    with pytest.raises(errors.LeaseExpired):
        gatekeeper.resume_session(fence, 0, 700)
    assert gatekeeper.open_session("other", 700).epoch == 2


def test_after_a_recovery_without_a_session_nobody_waits() -> None:
    driver = Driver()
    driver.gatekeeper.close_session(driver.memory.ledger.fence(), 0)
    assert recovered(driver).open_session("other", 0).epoch == 2


def test_a_new_worker_after_a_recovery_is_a_new_pool() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    driver.gatekeeper = recovered(driver)
    assert driver.confirm(worker="worker 2").is_new_pool
    assert driver.view(running).status == Status.WAITING
    driver.do(b.Admit([b.AdmitMember(running, 8)]))


# --- batch numbers ----------------------------------------------------------------------


def test_the_same_batch_again_gives_the_same_result_and_changes_nothing() -> None:
    driver = Driver()
    batch = driver.batch(b.Arrive("r", i32(1, 2)))
    result = driver.gatekeeper.apply(batch, 0)
    before = driver.state()
    assert driver.gatekeeper.apply(batch, 0) is result
    assert driver.state() == before


def test_the_same_number_with_other_ops_is_refused() -> None:
    driver = Driver()
    driver.do(b.Arrive("r", i32(1, 2)))
    with pytest.raises(errors.BatchConflict, match="batch 1 "):
        driver.gatekeeper.apply(driver.batch(b.Arrive("s", i32(1, 2)), batch_seq=1), 0)
    assert list(driver.manager.requests) == ["r"]


@pytest.mark.parametrize("batch_seq", [0, 2, 12])
def test_a_gap_is_refused(batch_seq: int) -> None:
    driver = Driver()
    for _ in range(10):
        driver.do()
    with pytest.raises(errors.SequenceGap, match=f"batch_seq {batch_seq} "):
        driver.gatekeeper.apply(driver.batch(batch_seq=batch_seq), 0)


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
            driver.gatekeeper.apply(driver.batch(), 0)
    driver.step_id, driver.acknowledged = 8, 8
    driver.do()


def test_a_batch_of_too_many_ops_is_refused_whole() -> None:
    driver = Driver()
    ops = [b.Arrive("r", i32(1))] * 8193
    with pytest.raises(errors.InvalidBatch, match="8193 ops"):
        driver.gatekeeper.apply(driver.batch(*ops), 0)
    assert not driver.manager.requests


# --- pools ------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [[], [b.Arrive("r", i32(1))]], ids=["empty", "an op"])
def test_no_batch_comes_before_the_pool_not_even_an_empty_one(ops: list[b.Op]) -> None:
    gatekeeper = Gatekeeper(KvMemory("boot", max_sequences=4))
    gatekeeper.open_session("one", 0)
    fence = gatekeeper.memory.ledger.fence()
    with pytest.raises(errors.NoPool):
        gatekeeper.apply(b.Batch(fence, 1, 1, 0, ops, b""), 0)
    with pytest.raises(errors.NoPool):
        gatekeeper.adopt(fence, 0)
    assert gatekeeper.memory.ledger.next_batch_seq == 1


def test_a_pool_needs_a_session() -> None:
    memory = KvMemory("boot", max_sequences=4)
    with pytest.raises(errors.UnknownSession):
        memory.commit(ConfirmPool("worker", b.PoolGeometry(8, 4, 32)))


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
    memory.commit(GrantSession("one"))
    geometry = dataclasses.replace(b.PoolGeometry(8, 4, 32), **change)
    with pytest.raises(errors.InvalidGeometry, match=says):
        memory.commit(ConfirmPool("worker", geometry))
    assert memory.manager is None
    assert not memory.ledger.mutations_open


def test_a_worker_without_a_boot_id_is_refused() -> None:
    driver = Driver()
    driver.memory.commit(GrantSession("other"))
    with pytest.raises(errors.InvalidGeometry, match="worker_boot_id is empty"):
        driver.memory.commit(ConfirmPool("", driver.geometry))


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
    assert not driver.confirm().is_new_pool
    driver.geometry = dataclasses.replace(driver.geometry, num_blocks=9)
    with pytest.raises(errors.InvalidGeometry, match="num_blocks=9"):
        driver.confirm()
    assert driver.state() == before
    driver.memory.commit(GrantSession("other"))
    with pytest.raises(errors.InvalidGeometry, match="num_blocks=9"):
        driver.confirm()
    assert not driver.memory.ledger.mutations_open


def test_another_worker_takes_every_block_back_and_everybody_waits() -> None:
    driver = Driver()
    running, stale = driver.run("r", 8), driver.batch()
    driver.step_id = 3
    driver.do(b.Free([driver.run("s", 4)]))
    driver.geometry = b.PoolGeometry(5, 2, 40)
    assert driver.confirm(worker="worker 2").is_new_pool
    assert driver.memory.levels().num_free_blocks == 5
    view = driver.view(running)
    assert (view.status, view.num_computed_tokens, view.table_version) == (Status.WAITING, 0, 2)
    assert driver.tokens(running) == list(range(8))
    with pytest.raises(errors.StaleBootId, match="'worker'"):
        driver.gatekeeper.apply(stale, 0)
    driver.do(b.Admit([b.AdmitMember(running, 8)]))
    driver.do(b.Reserve(u64(running), i32(10)))
    assert len(driver.table(running)) == 5


def test_results_with_blocks_of_a_worker_that_is_gone_are_not_given_again() -> None:
    driver = Driver()
    driver.run("r", 8)
    driver.confirm(worker="worker 2")
    with pytest.raises(errors.SequenceGap):
        driver.gatekeeper.apply(driver.batch(batch_seq=2), 0)


def test_a_worker_whose_model_is_too_short_for_a_live_sequence_is_refused() -> None:
    driver = Driver()
    driver.run("r", 20)
    driver.geometry = dataclasses.replace(driver.geometry, max_model_len=16)
    with pytest.raises(errors.InvalidGeometry, match="20 tokens"):
        driver.confirm(worker="worker 2")


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
