"""The host tier: groups that leave the pool and come back, and what a takeover does to them."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import errors
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.mutations import CloseSession, Configure, Expire, PendingCopy, PendingSwap
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.tenants import Quota
from tests.kvmem.driver import Driver, i32, pairs, u64


def begin(driver: Driver, step_id: int, acknowledged: int) -> None:
    """From the next batch on this step is being prepared."""
    driver.step_id, driver.acknowledged = step_id, acknowledged


def swap_out(driver: Driver, *sequence_ids: int) -> list[tuple[int, int]]:
    """Pairs of block and host block."""
    return pairs(driver.do(b.SwapOut(sequence_ids)).swap_outs)


def swap_in_op(*members: tuple[int, int]) -> b.SwapIn:
    return b.SwapIn([b.SwapInMember(*member) for member in members])


def swap_in(driver: Driver, *members: tuple[int, int]) -> b.BatchResult:
    result = driver.do(swap_in_op(*members))
    value = result.results[0].value
    assert isinstance(value, b.SwappedIn)
    for (sequence_id, _), table in zip(members, value.tables, strict=True):
        view = driver.view(sequence_id)
        assert table.sequence_id == sequence_id
        assert table.block_ids.tolist() == view.block_ids.tolist()
        assert table.table_version == view.table_version
        assert table.num_computed_tokens == view.num_computed_tokens
    return result


def num_free(driver: Driver) -> tuple[int, int]:
    """Of the pool and of the host tier."""
    levels = driver.memory.levels()
    return levels.num_free_blocks, levels.num_free_host_blocks


def family(driver: Driver, num_tokens: int = 6) -> tuple[int, int]:
    """A sequence of so many tokens in blocks of 4, all but the last computed, and a child that
    shares its blocks."""
    parent = driver.run("family", num_tokens)
    driver.computed(parent, num_tokens - 1)
    return parent, driver.fork(parent)[0]


# --- out -------------------------------------------------------------------------------


def test_a_swapped_sequence_keeps_all_but_its_blocks() -> None:
    driver = Driver()
    running = driver.run("r", 7)
    driver.computed(running, 5, 3)
    blocks, version = driver.table(running), driver.view(running).table_version
    moved = swap_out(driver, running)
    assert sorted(block for block, _ in moved) == sorted(blocks)
    assert len({host for _, host in moved}) == 2
    view = driver.view(running)
    assert (view.status, view.num_computed_tokens, view.num_tokens) == (Status.SWAPPED, 5, 8)
    assert view.block_ids.tolist() == []
    assert view.table_version > version
    stats = driver.memory.stats()
    assert (stats.num_swapped_out_blocks, stats.num_preemptions) == (2, 1)


def test_its_blocks_are_free_when_the_step_that_reads_them_is_acknowledged() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 5, 3)
    swap_out(driver, running)
    for step_id, acknowledged, free in ((5, 4, 6), (6, 4, 6), (6, 5, 8)):
        begin(driver, step_id, acknowledged)
        driver.do()
        assert num_free(driver) == (free, 4)


def test_a_block_that_siblings_share_takes_one_host_block() -> None:
    driver = Driver()
    parent, child = family(driver)
    shared = driver.table(parent)
    assert sorted(block for block, _ in swap_out(driver, parent, child)) == sorted(shared)
    assert num_free(driver)[1] == 4


def test_a_block_that_another_one_goes_on_with_stays_in_use() -> None:
    driver = Driver()
    parent, child = family(driver)
    swap_out(driver, child)
    assert driver.memory.levels().num_in_use_blocks == 2
    assert driver.view(parent).ref_counts.tolist() == [1, 1]
    driver.do(b.Free([parent]))  # the step that reads them is not acknowledged
    assert driver.memory.levels().num_quarantined_blocks == 2


def test_a_block_that_is_to_be_copied_in_the_same_step_is_read_where_the_copy_is() -> None:
    driver = Driver()
    parent, child = family(driver)
    [(src, dst)] = pairs(driver.do(b.Append(child, i32(9))).copies)
    moved = swap_out(driver, child, parent)
    sources = [block for block, _ in moved]
    assert dst not in sources
    assert sources.count(src) == 2  # once for each of the two
    assert driver.memory.levels().num_quarantined_blocks == 3


def test_no_room_in_the_host_tier_is_a_result() -> None:
    driver = Driver(num_host_blocks=1)
    running = driver.run("r", 8)
    assert driver.fails(b.SwapOut([running])).status == OpStatus.NO_FREE_HOST_BLOCKS
    assert driver.view(running).status == Status.RUNNING


def test_without_a_host_tier_nothing_is_swapped() -> None:
    driver = Driver(num_host_blocks=0)
    refused = driver.fails(b.SwapOut([driver.run("r", 1)]))
    assert refused.status == OpStatus.NO_FREE_HOST_BLOCKS
    assert "0 of 0" in refused.message


def test_sequences_of_two_requests_are_not_swapped_together() -> None:
    driver = Driver()
    one, other = driver.run("a", 2), driver.run("b", 2)
    assert driver.fails(b.SwapOut([one, other])).status == OpStatus.INVALID_ARGUMENT
    swap_out(driver, one)
    swap_out(driver, other)
    both = swap_in_op((one, 2), (other, 2))
    assert driver.fails(both).status == OpStatus.INVALID_ARGUMENT


def test_all_members_must_be_in_the_pool() -> None:
    driver = Driver()
    parent, child = family(driver)
    swap_out(driver, child)
    assert driver.fails(b.SwapOut([parent, child])).status == OpStatus.INVALID_STATE
    assert driver.fails(swap_in_op((child, 6), (parent, 6))).status == OpStatus.INVALID_STATE


def test_results_of_a_step_in_flight_are_committed_to_a_swapped_sequence() -> None:
    driver = Driver()
    running = driver.run("r", 7)
    driver.computed(running, 3)
    swap_out(driver, running)
    driver.computed(running, 7, 9)
    view = driver.view(running)
    assert (view.num_computed_tokens, view.num_tokens) == (7, 8)
    too_far = b.Commit(u64(running), i32(1), i32(9))
    assert driver.fails(too_far).status == OpStatus.INVALID_ARGUMENT
    swap_in(driver, (running, 8))
    assert driver.view(running).num_computed_tokens == 7


# --- in --------------------------------------------------------------------------------


def test_it_comes_back_with_fresh_blocks_and_slots() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    driver.computed(running, 6)
    out = swap_out(driver, running)
    begin(driver, 2, 1)
    result = swap_in(driver, (running, 9))
    table = driver.table(running)
    assert len(table) == 3
    hosts = [host for _, host in out]
    assert pairs(result.swap_ins) == list(zip(hosts, table[:2], strict=True))
    assert not pairs(result.copies)
    view = driver.view(running)
    assert (view.status, view.num_computed_tokens) == (Status.RUNNING, 6)
    assert driver.memory.stats().num_swapped_in_blocks == 2


def test_host_blocks_are_free_when_the_step_that_reads_them_is_acknowledged() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    swap_out(driver, running)
    begin(driver, 5, 4)
    swap_in(driver, (running, 8))
    for step_id, acknowledged, free in ((5, 4, 4), (6, 4, 4), (6, 5, 6)):
        begin(driver, step_id, acknowledged)
        assert driver.do().levels.num_free_host_blocks == free


def test_what_was_shared_is_shared_again_but_for_the_block_both_will_write() -> None:
    driver = Driver()
    parent, child = family(driver, 6)  # the last token of the second block is to be computed
    swap_out(driver, parent, child)
    begin(driver, 2, 1)
    result = swap_in(driver, (parent, 6), (child, 6))
    [one, two], [other, three] = driver.table(parent), driver.table(child)
    assert one == other
    assert two != three
    assert sorted(dst for _, dst in pairs(result.swap_ins)) == sorted([one, two, three])
    assert len({src for src, _ in pairs(result.swap_ins)}) == 2
    assert driver.memory.levels().num_in_use_blocks == 3
    for sequence_id in (parent, child):  # writable: another Reserve copies nothing
        again = driver.do(b.Reserve(u64(sequence_id), i32(6)))
        assert not pairs(again.copies)


def test_only_slots_that_are_asked_for_are_made_writable() -> None:
    driver = Driver()
    parent, child = family(driver, 6)
    swap_out(driver, parent, child)
    begin(driver, 2, 1)
    swap_in(driver, (parent, 5), (child, 5))  # 5 are computed
    assert driver.table(parent) == driver.table(child)
    assert pairs(driver.do(b.Reserve(u64(parent), i32(6))).copies)


def test_a_sibling_that_stays_in_the_host_tier_comes_back_later() -> None:
    driver = Driver()
    parent, child = family(driver)
    swap_out(driver, parent, child)
    begin(driver, 2, 1)
    swap_in(driver, (parent, 6))
    assert num_free(driver)[1] == 4
    begin(driver, 3, 2)
    swap_in(driver, (child, 6))
    begin(driver, 4, 3)
    driver.do()
    assert not set(driver.table(parent)) & set(driver.table(child))
    assert num_free(driver) == (4, 6)


def test_no_free_blocks_and_quotas_are_results() -> None:
    driver = Driver(num_blocks=4)
    running = driver.run("r", 8)
    swap_out(driver, running)
    begin(driver, 2, 1)
    other = driver.run("other", 9)
    assert driver.fails(swap_in_op((running, 8))).status == OpStatus.NO_FREE_BLOCKS
    driver.do(b.Free([other]))
    driver.memory.commit(Configure(quota=Quota(max_blocks=2)))
    assert driver.fails(swap_in_op((running, 9))).status == OpStatus.TENANT_QUOTA
    swap_in(driver, (running, 8))


def test_host_blocks_do_not_count_for_a_quota() -> None:
    driver = Driver()
    driver.memory.commit(Configure(quota=Quota(max_blocks=2)))
    one = driver.run("a", 8)
    swap_out(driver, one)
    driver.run("b", 8)
    assert driver.fails(swap_in_op((one, 8))).status == OpStatus.TENANT_QUOTA


@pytest.mark.parametrize("num_slots", [0, 33])
def test_slots_that_cannot_be_are_a_mistake(num_slots: int) -> None:
    driver = Driver()
    running = driver.run("r", 8)
    swap_out(driver, running)
    refused = driver.fails(swap_in_op((running, num_slots)))
    assert refused.status == OpStatus.INVALID_ARGUMENT
    assert f"{num_slots}, it must be 1 .. 32" in refused.message


def test_out_and_in_within_one_step_is_a_copy() -> None:
    """The worker swaps in before it swaps out."""
    driver = Driver()
    running = driver.run("r", 8)
    before = driver.table(running)
    out = swap_out(driver, running)
    result = swap_in(driver, (running, 8))
    assert not pairs(result.swap_ins)
    assert pairs(result.copies) == list(zip(before, driver.table(running), strict=True))
    assert not set(before) & set(driver.table(running))
    assert len(out) == driver.manager.host.num_quarantined == 2


def test_in_and_out_within_one_step_is_both() -> None:
    """In this order, which is the worker's."""
    driver = Driver()
    running = driver.run("r", 8)
    first = swap_out(driver, running)
    begin(driver, 2, 1)
    swap_in(driver, (running, 8))
    table = driver.table(running)
    second = swap_out(driver, running)
    assert sorted(block for block, _ in second) == sorted(table)
    assert not {host for _, host in first} & {host for _, host in second}


# --- ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [b.Free, b.Preempt])
def test_the_host_blocks_of_an_ended_sequence_wait_for_the_swap_under_way(
    op: type[b.Free | b.Preempt],
) -> None:
    driver = Driver()
    running = driver.run("r", 8)
    swap_out(driver, running)  # by step 1
    driver.do(op([running]))
    for step_id, acknowledged, free in ((1, 0, 4), (2, 0, 4), (2, 1, 6)):
        begin(driver, step_id, acknowledged)
        assert driver.do().levels.num_free_host_blocks == free
    if op is b.Preempt:
        view = driver.view(running)
        assert (view.status, view.num_computed_tokens) == (Status.WAITING, 0)
        driver.do(b.Admit([b.AdmitMember(running, 8)]))
    assert driver.memory.stats().num_preemptions == 1


def test_a_preempted_sibling_leaves_the_others_what_they_share() -> None:
    driver = Driver()
    parent, child = family(driver)
    swap_out(driver, parent, child)
    driver.do(b.Preempt([child]))
    begin(driver, 2, 1)
    driver.do()
    assert num_free(driver)[1] == 4
    swap_in(driver, (parent, 6))


def test_another_workers_pool_has_an_empty_host_tier() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    driver.computed(running, 6)
    swap_out(driver, running)
    driver.take_over(worker="worker 2")
    view = driver.view(running)
    assert (view.status, view.num_computed_tokens) == (Status.WAITING, 0)
    assert num_free(driver) == (8, 6)
    assert driver.memory.stats().num_swapped_out_blocks == 0
    driver.do(b.Admit([b.AdmitMember(running, 8)]))


def test_a_worker_cannot_declare_another_host_tier() -> None:
    driver = Driver()
    driver.geometry = b.PoolGeometry(8, 4, 32, num_host_blocks=7)
    with pytest.raises(errors.InvalidGeometry, match="num_host_blocks=7"):
        driver.confirm()


# --- the prefix cache ------------------------------------------------------------------


def cached_run(driver: Driver, name: str, num_tokens: int) -> int:
    sequence_id = driver.arrive(name, num_tokens)
    driver.do(b.Admit([b.AdmitMember(sequence_id, num_tokens, use_prefix_cache=True)]))
    return sequence_id


def num_cached_tokens(driver: Driver, num_tokens: int) -> int:
    domain = driver.manager.requests["r"].domain
    return driver.memory.num_cached_tokens(domain, np.arange(num_tokens, dtype=np.int32))


def test_what_is_cached_stays_so() -> None:
    driver = Driver()
    running = cached_run(driver, "r", 9)
    begin(driver, 2, 1)
    driver.computed(running, 8)
    assert num_cached_tokens(driver, 9) == 8
    swap_out(driver, running)
    assert num_cached_tokens(driver, 9) == 8
    begin(driver, 3, 2)
    driver.do()
    assert driver.memory.levels().num_cached_blocks == 2


def test_blocks_are_published_again_once_they_are_swapped_in() -> None:
    driver = Driver(num_blocks=4)
    running = cached_run(driver, "r", 8)
    begin(driver, 2, 1)
    driver.computed(running, 8, 8)
    swap_out(driver, running)
    begin(driver, 3, 2)
    driver.do()
    driver.do(b.Free([driver.run("evicting", 16)]))
    assert num_cached_tokens(driver, 9) == 0
    swap_in(driver, (running, 9))
    begin(driver, 4, 2)
    driver.computed(running, 9, 9)  # of a step before: that of the swap-in is under way
    assert num_cached_tokens(driver, 9) == 0
    begin(driver, 5, 3)
    driver.do(b.Append(running, i32(1)))
    assert num_cached_tokens(driver, 9) == 8


# --- takeovers -------------------------------------------------------------------------


def test_a_swap_out_that_was_never_made_is_handed_over() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 2, 1)
    out = swap_out(driver, running)
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_swap_outs == tuple(PendingSwap(*pair) for pair in out)
    assert driver.confirm(last_executed_step=1) == confirmed
    assert driver.memory.levels().num_quarantined_blocks == 2
    begin(driver, 3, 2)
    driver.do()
    assert num_free(driver) == (8, 4)
    assert driver.confirm(2).pending_swap_outs == ()
    swap_in(driver, (running, 8))


def test_a_swap_out_that_was_made_is_not() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 2, 1)
    swap_out(driver, running)
    confirmed = driver.take_over(last_executed_step=2)
    assert confirmed.pending_swap_outs == ()
    assert num_free(driver) == (8, 4)


@pytest.mark.parametrize("end", ["before", "after"])
def test_b04_nothing_of_a_swap_out_that_is_handed_over_is_used_before_it_is_made(end: str) -> None:
    """Its sequence ends, before the takeover or after."""
    driver = Driver(num_blocks=2, num_host_blocks=2)
    running = driver.run("r", 8)
    begin(driver, 2, 1)
    out = swap_out(driver, running)
    begin(driver, 3, 1)
    driver.do(*([b.Free([running])] if end == "before" else []))
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_swap_outs == tuple(PendingSwap(*pair) for pair in out)
    begin(driver, 3, 2)
    if end == "after":
        driver.do(b.Free([running]))
    driver.do()
    assert num_free(driver) == (0, 0)
    begin(driver, 4, 3)
    driver.do()
    assert num_free(driver) == (2, 2)


@pytest.mark.parametrize("end", ["before", "after"])
def test_b04_nothing_of_a_swap_in_that_is_handed_over_is_used_before_it_is_made(end: str) -> None:
    driver = Driver(num_blocks=2, num_host_blocks=2)
    running = driver.run("r", 8)
    out = swap_out(driver, running)
    begin(driver, 2, 1)
    swap_in(driver, (running, 8))
    expected = tuple(
        PendingSwap(host, block)
        for (_, host), block in zip(out, driver.table(running), strict=True)
    )
    begin(driver, 3, 1)
    driver.do(*([b.Free([running])] if end == "before" else []))
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_swap_ins == expected
    begin(driver, 3, 2)
    if end == "after":
        driver.do(b.Free([running]))
    driver.do()
    assert num_free(driver) == (0, 0)
    begin(driver, 4, 3)
    driver.do()
    assert num_free(driver) == (2, 2)


def test_a_swap_in_of_what_was_never_swapped_out_is_a_copy() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    before = driver.table(running)
    begin(driver, 2, 1)
    out = swap_out(driver, running)
    begin(driver, 3, 1)
    swap_in(driver, (running, 8))
    after = driver.table(running)
    confirmed = driver.take_over(last_executed_step=1)
    assert confirmed.pending_swap_ins == ()
    assert confirmed.pending_swap_outs == tuple(PendingSwap(*pair) for pair in out)
    assert confirmed.pending_copies == tuple(
        PendingCopy(src, dst, running) for src, dst in zip(before, after, strict=True)
    )
    begin(driver, 3, 2)
    driver.do()
    assert driver.memory.levels().num_quarantined_blocks == 2
    assert driver.manager.host.num_quarantined == 2


def test_a_new_holder_that_swaps_in_at_once_is_given_copies() -> None:
    """The swap-out it took over is of the same step."""
    driver = Driver()
    running = driver.run("r", 8)
    before = driver.table(running)
    begin(driver, 2, 1)
    swap_out(driver, running)
    driver.take_over(last_executed_step=1)
    result = swap_in(driver, (running, 8))
    assert pairs(result.copies) == list(zip(before, driver.table(running), strict=True))
    assert not pairs(result.swap_ins)


def test_a_swap_out_of_what_was_never_copied_reads_where_the_copy_would_have() -> None:
    driver = Driver()
    parent, child = family(driver)
    begin(driver, 2, 1)
    [(src, dst)] = pairs(driver.do(b.Append(child, i32(9))).copies)
    begin(driver, 3, 1)
    out = dict(swap_out(driver, child))
    assert dst in out
    confirmed = driver.take_over(last_executed_step=1)
    # Nobody holds the destination of the copy any more.
    assert confirmed.pending_copies == ()
    assert PendingSwap(src, out[dst]) in confirmed.pending_swap_outs
    driver.do(b.Free([parent]))
    begin(driver, 3, 2)
    driver.do()
    assert src in driver.manager.pool.quarantined_blocks().tolist()


def test_pending_swaps_stay_over_a_second_takeover() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    begin(driver, 2, 1)
    swap_out(driver, running)
    confirmed = driver.take_over(last_executed_step=1)
    assert driver.take_over(last_executed_step=1) == confirmed


def test_expired_requests_give_their_host_blocks_back() -> None:
    driver = Driver()
    running = driver.run("r", 8)
    swap_out(driver, running)
    begin(driver, 2, 1)
    driver.do()
    driver.memory.commit(CloseSession())
    driver.memory.commit(Expire(["r"]))
    check_integrity(driver.manager)
    assert driver.manager.host.num_quarantined == 2
    driver.take_over(last_executed_step=2)
    assert num_free(driver) == (8, 6)
