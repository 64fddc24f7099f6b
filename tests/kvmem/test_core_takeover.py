"""What a former epoch left: its sequences, its freed blocks, the copies it never made; and what
nobody comes for."""

from __future__ import annotations

import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import errors
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import CloseSession, Expire, GrantSession, PendingCopy, PoolConfirmed
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.views import AdoptedRequest, adopted_requests
from tests.kvmem.driver import Driver, i32, pairs, u64


def begin(driver: Driver, step_id: int, acknowledged: int) -> None:
    """From the next batch on this step is being prepared."""
    driver.step_id, driver.acknowledged = step_id, acknowledged


def copies_of(confirmed: PoolConfirmed) -> list[tuple[int, int]]:
    return [(one.src_block_id, one.dst_block_id) for one in confirmed.pending_copies]


# --- sequences stay ---------------------------------------------------------------------


def test_a_takeover_changes_no_sequence() -> None:
    driver = Driver()
    first, second = driver.run("a", 8), driver.arrive("b", 3)
    driver.computed(first, 4, 9)
    before, levels = driver.state(), driver.memory.levels()
    driver.memory.commit(GrantSession("other"))
    assert driver.state() == before
    assert not driver.confirm(last_executed_step=1).is_new_pool
    assert driver.state() == before
    assert driver.memory.levels() == levels
    driver.do(b.Append(first, i32(5)), b.Admit([b.AdmitMember(second, 3)]))


def test_results_of_a_former_session_are_not_given_to_the_next() -> None:
    driver = Driver()
    for _ in range(3):
        driver.do()
    driver.take_over()
    with pytest.raises(errors.SequenceGap):
        driver.gatekeeper.apply(driver.batch(batch_seq=3), 0)
    assert driver.do().batch_seq == 1


def test_a_second_takeover_before_the_first_confirmed_fences_that_one_off() -> None:
    driver = Driver()
    driver.memory.commit(GrantSession("second"))
    second = driver.memory.ledger.fence()
    driver.memory.commit(GrantSession("third"))
    with pytest.raises(errors.StaleEpoch):
        driver.gatekeeper.attach_pool(second, "worker", driver.geometry, 0)
    driver.confirm()
    driver.do()


# --- numbers and quarantine -------------------------------------------------------------


@pytest.mark.parametrize(
    ("last_executed", "next_step", "acknowledged"),
    [(0, 7, 4), (4, 7, 4), (5, 7, 5), (6, 7, 6), (7, 8, 7), (9, 10, 9)],
)
def test_numbers_go_on_from_the_step_that_was_prepared_or_the_last_one_executed(
    last_executed: int, next_step: int, acknowledged: int
) -> None:
    driver = Driver()
    begin(driver, 7, 4)
    driver.do()
    driver.take_over(last_executed)
    assert (driver.memory.last_step_id, driver.memory.acknowledged_step) == (
        next_step,
        acknowledged,
    )
    begin(driver, next_step - 1, acknowledged)
    with pytest.raises(errors.StepOutOfOrder):
        driver.gatekeeper.apply(driver.batch(), 0)
    begin(driver, next_step, next_step - 1)
    driver.do()


def test_b04_nothing_freed_comes_back_until_the_pool_is_confirmed() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 4, 2)
    driver.do(b.Free([running]))  # step 3 may still write its blocks
    assert driver.memory.levels().num_quarantined_blocks == 2
    driver.memory.commit(GrantSession("other"))
    assert driver.memory.levels().num_quarantined_blocks == 2
    driver.confirm(last_executed_step=3)
    assert driver.memory.levels().num_quarantined_blocks == 0


def test_b04_blocks_of_a_step_that_was_never_executed_come_with_the_next_acknowledgement() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 4, 2)
    driver.do(b.Free([running]))
    driver.take_over(last_executed_step=2)
    assert driver.memory.levels().num_quarantined_blocks == 2
    begin(driver, 4, 3)  # as of now: step 3 will never be issued
    assert driver.do().levels.num_quarantined_blocks == 0


def test_b04_the_other_workers_pool_has_no_quarantine() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 4, 2)
    driver.do(b.Free([running]), b.Arrive("s", i32(1)))
    assert driver.take_over(worker="worker 2").is_new_pool
    assert driver.memory.levels().num_free_blocks == 8
    assert driver.memory.last_step_id == 4


# --- copies that were never made --------------------------------------------------------


def forked(driver: Driver) -> tuple[int, list[int]]:
    """A sequence of 6 tokens in blocks of 4, and a child that shares both blocks."""
    parent = driver.run("r", 6)
    return parent, driver.fork(parent)


def append(driver: Driver, sequence_id: int, token: int = 7) -> list[tuple[int, int]]:
    """Its copies."""
    return pairs(driver.do(b.Append(sequence_id, i32(token))).copies)


def test_a_copy_of_a_step_that_was_executed_is_not_pending() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    assert append(driver, child)
    assert driver.take_over(last_executed_step=2).pending_copies == ()
    assert driver.memory.stats().num_pending_copies == 0


def test_a_copy_of_the_step_being_prepared_is_made_in_the_next() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    [(src, dst)] = append(driver, child)
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_copies == (PendingCopy(src, dst, child),)
    assert driver.memory.last_step_id == 2
    # Asked again, the same; also while the step is being prepared.
    assert driver.confirm(last_executed_step=1) == confirmed
    begin(driver, 2, 1)
    driver.do()
    assert driver.confirm(last_executed_step=1) == confirmed
    begin(driver, 3, 1)
    driver.do()
    assert driver.confirm() == confirmed
    begin(driver, 3, 2)
    driver.do()
    assert driver.confirm().pending_copies == ()


@pytest.mark.parametrize("last_executed", [0, 1])
def test_b04_the_source_of_a_lost_steps_copy_is_held_for_the_step_that_makes_it(
    last_executed: int,
) -> None:
    """Step 2 makes a copy, step 3 is being prepared, 2 is never executed: 3 makes the copy."""
    driver = Driver()
    parent, [child] = forked(driver)
    begin(driver, 2, 1)
    [(src, dst)] = append(driver, child)
    begin(driver, 3, 1)
    driver.do(b.Free([parent]))
    confirmed = driver.take_over(last_executed)
    assert confirmed.pending_copies == (PendingCopy(src, dst, child),)
    begin(driver, 3, 2)
    assert driver.do().levels.num_quarantined_blocks == 1
    assert driver.manager.pool.quarantined_blocks().tolist() == [src]
    begin(driver, 4, 3)
    assert driver.do().levels.num_quarantined_blocks == 0


def test_a_copy_from_a_block_that_a_lost_step_was_to_fill_is_made_from_its_origin() -> None:
    driver = Driver()
    parent, [first] = forked(driver)
    begin(driver, 2, 1)
    [(origin, filled)] = append(driver, first)
    [third] = driver.fork(first)
    begin(driver, 3, 1)
    [(src, dst)] = append(driver, third)
    assert src == filled  # step 2 was to fill it
    confirmed = driver.take_over(last_executed_step=1)
    assert set(copies_of(confirmed)) == {(origin, filled), (origin, dst)}
    # So are those of the step that the new holder prepares.
    begin(driver, 3, 2)
    fourth = driver.fork(first)[0]
    [(src, other)] = append(driver, fourth)
    assert src == origin
    assert other not in (filled, dst)
    assert driver.table(parent)[1] == origin


def test_a_copy_for_nobody_is_not_pending() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    [(_, dst)] = append(driver, child)
    driver.do(b.Preempt([child]))
    assert driver.take_over(last_executed_step=1).pending_copies == ()
    begin(driver, 2, 1)
    driver.do()
    assert dst in driver.manager.pool.quarantined_blocks().tolist()
    begin(driver, 3, 2)
    assert driver.do().levels.num_quarantined_blocks == 0


def test_b04_both_ends_of_a_pending_copy_are_held_when_its_sequence_loses_it() -> None:
    driver = Driver()
    parent, [child] = forked(driver)
    begin(driver, 2, 1)
    [(src, dst)] = append(driver, child)
    driver.take_over(last_executed_step=1)
    begin(driver, 2, 1)
    driver.do(b.Free([parent, child]))
    assert driver.memory.pending_copies() == ()
    assert {src, dst} <= set(driver.manager.pool.quarantined_blocks().tolist())


def test_a_destination_that_a_fork_inherited_is_filled_for_the_child() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    [(src, dst)] = append(driver, child)
    [heir] = driver.fork(child)
    driver.do(b.Free([child]))
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_copies == (PendingCopy(src, dst, heir),)


def test_a_copy_stays_pending_over_a_second_takeover() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    [copy] = append(driver, child)
    driver.take_over(last_executed_step=1)
    begin(driver, 2, 1)
    grandchild = driver.fork(child)[0]
    [another] = append(driver, grandchild)
    assert another[0] == copy[0]
    assert copies_of(driver.take_over(last_executed_step=1)) == [copy, another]
    assert copies_of(driver.take_over(last_executed_step=2)) == []


def test_another_worker_has_nothing_to_copy() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    append(driver, child)
    assert driver.take_over(worker="worker 2").pending_copies == ()


def test_a_pool_confirmed_again_in_its_own_epoch_changes_nothing() -> None:
    """After a recovery the holder's own steps are in flight: their copies are being made."""
    driver = Driver()
    parent, [child] = forked(driver)
    begin(driver, 2, 1)
    [(_, filled)] = append(driver, child)
    begin(driver, 3, 1)  # step 2 is at the worker
    grandchild = driver.fork(child)[0]
    before = driver.state()
    assert driver.confirm(last_executed_step=1).pending_copies == ()
    assert driver.state() == before
    assert driver.memory.acknowledged_step == 1
    begin(driver, 3, 1)
    # Its copy reads what step 2 fills, for step 2 writes it as well.
    assert append(driver, grandchild)[0][0] == filled
    assert driver.view(parent).status == Status.RUNNING


# --- adoption ---------------------------------------------------------------------------


def adopt(driver: Driver) -> dict[str, AdoptedRequest]:
    adopted = driver.gatekeeper.adopt(driver.memory.ledger.fence(), 0)
    assert [one.arrival_number for one in adopted] == sorted(one.arrival_number for one in adopted)
    return {one.request_id: one for one in adopted}


def test_the_next_holder_is_told_everything() -> None:
    driver = Driver()
    arrive = b.Arrive("a", i32(5, 6, 7, 8, 9), 3, "tenant", b"spec", b"digest")
    value = driver.do(arrive).results[0].value
    assert isinstance(value, b.Arrived)
    parent = value.sequence_id
    driver.do(b.Admit([b.AdmitMember(parent, 5)]))
    [child] = driver.fork(parent, 1, 1, 2)
    driver.do(b.Commit(u64(parent, child), i32(3, 4), i32(5, 5), state_words=u64(11, 2**64 - 1)))
    pruned = driver.fork(child)[0]
    driver.do(b.Free([pruned]), b.Free([parent], b.FinishReason.STOP))
    waiting = driver.arrive("b", 4)
    driver.take_over()
    adopted = adopt(driver)
    a = adopted["a"]
    assert (a.num_candidates, a.tenant, a.request_spec, a.request_digest, a.arrival_number) == (
        3,
        "tenant",
        b"spec",
        b"digest",
        1,
    )
    assert a.prompt_token_ids.tolist() == [5, 6, 7, 8, 9]
    live, lost, ended = a.sequences
    assert (live.sequence_id, live.candidate, live.status) == (child, 1, Status.RUNNING)
    assert live.output_token_ids.tolist() == [2, 4]
    assert live.block_ids.tolist() == driver.table(child)
    assert (live.num_computed_tokens, live.table_version) == (5, 1)
    assert live.scheduler_state == b"\xff" * 8
    assert (lost.sequence_id, lost.candidate, lost.finish_reason) == (pruned, 2, 0)
    assert (ended.sequence_id, ended.status) == (parent, Status.FINISHED)
    assert ended.finish_reason == b.FinishReason.STOP
    assert ended.output_token_ids.tolist() == [1, 3]
    assert ended.scheduler_state == (11).to_bytes(8, "little")
    assert not ended.block_ids.size
    [one] = adopted["b"].sequences
    assert (one.sequence_id, one.status, one.scheduler_state) == (waiting, Status.WAITING, b"")


def test_what_was_adopted_is_as_of_then() -> None:
    driver = Driver()
    running = driver.run("a", 5)
    driver.do(b.Append(running, i32(1)))
    [before] = adopt(driver)["a"].sequences
    driver.do(b.Append(running, i32(2, 3, 4)))
    driver.do(b.Free([running]))
    driver.arrive("b", 8)  # in its row
    assert before.output_token_ids.tolist() == [1]
    assert before.block_ids.size == 2


def test_adopting_needs_an_open_session_with_its_pool() -> None:
    driver = Driver()
    former = driver.memory.ledger.fence()
    driver.memory.commit(GrantSession("other"))
    with pytest.raises(errors.StaleEpoch):
        driver.gatekeeper.adopt(former, 0)
    with pytest.raises(errors.NoPool):
        driver.gatekeeper.adopt(driver.memory.ledger.fence(), 0)


# --- nobody comes -----------------------------------------------------------------------


def ticks(driver: Driver, start_ms: int, end_ms: int) -> list[str]:
    """Ids that expire while time passes."""
    expired = []
    for now_ms in range(start_ms, end_ms + 1, 100):
        expired += driver.gatekeeper.tick(now_ms)
    return expired


def close(driver: Driver, now_ms: int) -> None:
    driver.gatekeeper.close_session(driver.memory.ledger.fence(), now_ms)


def test_orphans_expire_after_their_ttl_and_results_after_theirs() -> None:
    driver = Driver()
    driver.run("running", 8)
    driver.arrive("waiting", 3)
    driver.do(b.Free([driver.run("ended", 4)], b.FinishReason.STOP))
    close(driver, 0)
    assert ticks(driver, 0, 4_900) == []
    assert ticks(driver, 5_000, 5_000) == ["running", "waiting"]
    assert list(driver.manager.requests) == ["ended"]
    assert ticks(driver, 5_100, 8_900) == []
    assert ticks(driver, 9_000, 9_000) == ["ended"]
    stats = driver.memory.stats()
    assert (stats.num_requests, stats.num_finished_sequences, stats.num_expired_requests) == (
        0,
        0,
        3,
    )
    assert stats.levels.num_free_sequences == 8


def test_nothing_expires_while_a_session_is_alive() -> None:
    driver = Driver()
    driver.do(b.Free([driver.run("ended", 4)], b.FinishReason.STOP))
    driver.run("running", 4)
    for now_ms in range(0, 30_000, 500):
        driver.gatekeeper.apply(driver.batch(), now_ms)
        assert driver.gatekeeper.tick(now_ms) == []


def test_the_ttl_begins_with_the_last_sessions_end() -> None:
    driver = Driver()
    driver.run("running", 4)
    assert ticks(driver, 0, 5_900) == []  # its lease ended at 1000
    driver.gatekeeper.open_session("other", 5_900)
    late = driver.memory.ledger.fence()
    assert ticks(driver, 6_000, 11_800) == []
    assert ticks(driver, 11_900, 11_900) == ["running"]
    # What a session that was silent for that long believes in is gone: it is closed.
    with pytest.raises(errors.UnknownSession):
        driver.gatekeeper.resume_session(late, 0, 11_900)


def test_b04_blocks_that_expire_stay_in_quarantine_until_a_pool_is_confirmed() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 4, 3)
    driver.do(b.Append(running, i32(5)))
    driver.memory.commit(CloseSession())
    driver.memory.commit(Expire(("r", "unknown", "r")))
    levels = driver.memory.levels()
    assert (levels.num_quarantined_blocks, levels.num_free_sequences) == (3, 8)
    driver.memory.commit(GrantSession("other"))
    assert driver.memory.levels().num_quarantined_blocks == 3
    driver.confirm(last_executed_step=3)  # step 4 may have been issued, and was not executed
    assert driver.memory.levels().num_quarantined_blocks == 3
    begin(driver, 4, 3)
    driver.do()
    begin(driver, 5, 4)
    assert driver.do().levels.num_free_blocks == 8


def test_b04_a_source_that_expired_is_held_for_a_pending_copy() -> None:
    driver = Driver()
    parent = driver.run("r", 6)
    sharer = driver.arrive("s", 6)
    begin(driver, 2, 1)
    driver.do(b.Admit([b.AdmitMember(sharer, 6, parent, 1)]))
    # Its tokens are the same: make it write the shared block again.
    driver.do(b.Commit(u64(sharer), i32(), i32(0), i32(0)))
    [(src, dst)] = pairs(driver.do(b.Reserve(u64(sharer), i32(6))).copies)
    driver.memory.commit(Expire(("r",)))
    assert driver.take_over(last_executed_step=1).pending_copies == (PendingCopy(src, dst, sharer),)
    begin(driver, 2, 1)
    driver.do()
    assert src in driver.manager.pool.quarantined_blocks().tolist()


def test_expiring_in_a_memory_without_a_pool_is_nothing() -> None:
    memory = KvMemory("boot", max_sequences=4)
    memory.commit(Expire(("r",)))
    assert memory.manager is None


# --- a log of the mutations is the state ------------------------------------------------


def test_the_same_mutations_lead_to_the_same_state_with_the_same_replies() -> None:
    driver = Driver()
    _, [child] = forked(driver)
    begin(driver, 2, 1)
    append(driver, child)
    again = driver.batch(b.Append(child, i32(7)), batch_seq=4)  # no mutation
    num_mutations = len(driver.mutations)
    driver.gatekeeper.apply(again, 0)
    assert len(driver.mutations) == num_mutations
    close(driver, 0)
    driver.gatekeeper.open_session("other", 0)
    driver.confirm(last_executed_step=1)
    driver.do(b.Free([child], b.FinishReason.ABORT))
    driver.arrive("late", 3)
    close(driver, 0)
    assert ticks(driver, 0, 5_000) == ["r", "late"]
    replayed = KvMemory("boot", max_sequences=8)
    for mutation, reply in driver.mutations:
        assert repr(replayed.commit(mutation)) == repr(reply)
    assert replayed.manager is not None
    assert repr(adopted_requests(replayed.manager)) == repr(adopted_requests(driver.manager))
    assert replayed.stats() == driver.memory.stats()
