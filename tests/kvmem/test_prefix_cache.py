"""The prefix cache: what is found, what is never found, and in which order it goes."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import prefix_cache
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.eviction import EvictionOrder, LruQueue
from kvmem_svc.core.mutations import Configure
from kvmem_svc.core.prefix_cache import Domain
from tests.kvmem.driver import Driver, i32, pairs, u64


def admit(
    driver: Driver, sequence_id: int, num_slots: int = 1
) -> tuple[b.BlockTable, b.BatchResult]:
    member = b.AdmitMember(sequence_id, num_slots, use_prefix_cache=True)
    result = driver.do(b.Admit([member]))
    value = result.results[0].value
    assert isinstance(value, b.Admitted)
    return value.tables[0], result


def start(
    driver: Driver, name: str, num_tokens: int, tenant: str = "", salt: str = ""
) -> b.BlockTable:
    """A running sequence with slots for its prompt, of which nothing is computed by it yet."""
    sequence_id = driver.arrive(name, num_tokens, 4, tenant, salt)
    return admit(driver, sequence_id, num_tokens)[0]


def serve(
    driver: Driver, name: str, num_tokens: int, tenant: str = "", salt: str = ""
) -> list[int]:
    """A request whose prompt was computed and which has ended; its blocks."""
    table = start(driver, name, num_tokens, tenant, salt)
    driver.computed(table.sequence_id, num_tokens)
    driver.do(b.Free([table.sequence_id]), b.Confirm(name))
    return table.block_ids.tolist()


def next_step(driver: Driver) -> None:
    """The step prepared so far is issued; none is acknowledged by it."""
    driver.step_id += 1


# --- what is found ----------------------------------------------------------------------


def test_what_one_request_computed_the_next_one_finds() -> None:
    driver = Driver()
    blocks = serve(driver, "a", 10)
    assert driver.memory.levels() == b.PoolLevels(6, 2, 0, 0, 0, 8, 6)
    table = start(driver, "b", 11)
    assert table.num_computed_tokens == 8
    assert table.block_ids.tolist()[:2] == blocks[:2]
    assert driver.view(table.sequence_id).num_computed_tokens == 8
    stats = driver.memory.stats()
    assert (stats.num_prefix_lookups, stats.num_prefix_hits) == (2, 1)
    assert (stats.num_prefix_lookup_tokens, stats.num_prefix_hit_tokens) == (21, 8)
    assert (stats.num_published, stats.num_evictions) == (2, 0)


def test_what_is_looked_up_stays_where_it_is() -> None:
    driver = Driver()
    serve(driver, "a", 10)
    before = driver.state(), driver.manager.pool.cached_blocks().tolist()
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(20))) == 8
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(7))) == 4
    assert driver.memory.num_cached_tokens(Domain("t", ""), i32(*range(20))) == 0
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(0, 1, 2, 9, 4, 5, 6, 7)) == 0
    assert (driver.state(), driver.manager.pool.cached_blocks().tolist()) == before


def test_output_tokens_are_found_too_and_only_committed_ones() -> None:
    driver = Driver()
    sequence_id = start(driver, "a", 4).sequence_id
    driver.computed(sequence_id, 4, 40)
    driver.do(b.Reserve(u64(sequence_id), i32(12)))  # slots ahead are no tokens
    for computed in range(5, 9):
        driver.computed(sequence_id, computed, 36 + computed)
    known = [0, 1, 2, 3, 40, 41, 42, 43, 44]
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*known, 0, 0, 0)) == 8


def test_after_a_preemption_a_sequence_finds_what_it_had() -> None:
    driver = Driver()
    table = start(driver, "a", 10)
    driver.computed(table.sequence_id, 10, 77)
    driver.do(b.Preempt([table.sequence_id]))
    again = admit(driver, table.sequence_id, 11)[0]
    assert again.num_computed_tokens == 8
    assert again.block_ids.tolist()[:2] == table.block_ids.tolist()[:2]


def test_a_block_that_waits_for_a_step_is_found_too() -> None:
    driver = Driver()
    table = start(driver, "a", 8)
    driver.computed(table.sequence_id, 8, 9)
    next_step(driver)
    next_step(driver)
    driver.do(b.Free([table.sequence_id]))
    assert driver.memory.levels().num_quarantined_blocks == 2
    again = start(driver, "b", 9)
    assert again.num_computed_tokens == 8
    assert driver.memory.levels().num_quarantined_blocks == 0
    # Its place in the quarantine is void: the step is acknowledged, the block is in use.
    driver.acknowledged = driver.step_id - 1
    assert driver.do().levels.num_in_use_blocks == 3


def test_two_that_computed_the_same_go_on_from_one_chain() -> None:
    driver = Driver(num_blocks=12)
    first, second = start(driver, "a", 8), start(driver, "b", 12)
    assert second.num_computed_tokens == 0
    driver.computed(first.sequence_id, 8)
    driver.computed(second.sequence_id, 12)
    driver.memory.settle()
    assert driver.memory.stats().num_published == 3
    third = start(driver, "c", 13)
    assert third.num_computed_tokens == 12
    expected = [*first.block_ids.tolist(), second.block_ids.tolist()[2]]
    assert third.block_ids.tolist()[:3] == expected


def test_children_of_a_fork_are_cached_as_their_parent() -> None:
    driver = Driver()
    parent = start(driver, "a", 6).sequence_id
    driver.computed(parent, 6)
    [child] = driver.fork(parent, 1, 50, 60)
    driver.do(b.Reserve(u64(parent, child), i32(8, 8)))
    next_step(driver)
    driver.acknowledged = 1
    driver.do(b.Commit(u64(parent, child), i32(51, 61), i32(7, 7)))
    driver.do(b.Commit(u64(parent, child), i32(52, 62), i32(8, 8)))
    for last in (50, 60):
        prompt = i32(*range(6), last, last + 1)
        assert driver.memory.num_cached_tokens(Domain("", ""), prompt) == 8


def test_a_worker_that_is_new_has_nothing_cached() -> None:
    driver = Driver()
    serve(driver, "a", 8)
    driver.take_over(worker="another")
    assert driver.memory.levels().num_cached_blocks == 0
    assert start(driver, "b", 9).num_computed_tokens == 0


def test_the_same_worker_keeps_it_over_a_takeover() -> None:
    driver = Driver()
    blocks = serve(driver, "a", 8)
    driver.take_over(last_executed_step=1)
    table = start(driver, "b", 9)
    assert (table.num_computed_tokens, table.block_ids.tolist()[:2]) == (8, blocks)


def test_sequences_not_admitted_for_it_neither_find_nor_leave_anything() -> None:
    driver = Driver()
    plain = driver.run("a", 8)
    driver.computed(plain, 8)
    driver.do(b.Free([plain]))
    assert driver.memory.levels().num_cached_blocks == 0
    serve(driver, "b", 8)
    driver.run("c", 9)
    assert driver.memory.stats().num_prefix_lookups == 1


def test_members_that_share_take_what_is_cached_when_it_is_as_long() -> None:
    driver = Driver(num_blocks=16)
    serve(driver, "a", 8)
    first, second = driver.arrive("b", 9), driver.arrive("c", 10)
    result = driver.do(
        b.Admit(
            [
                b.AdmitMember(first, 9, use_prefix_cache=True),
                b.AdmitMember(second, 10, first, 2, use_prefix_cache=True),
            ]
        )
    )
    admitted = result.results[0].value
    assert isinstance(admitted, b.Admitted)
    assert [table.num_computed_tokens for table in admitted.tables] == [8, 8]
    # Nothing of the third one is cached that far: it shares, what nobody has computed yet.
    longer = driver.arrive("d", 13), driver.arrive("e", 14)
    shared = driver.do(
        b.Admit(
            [
                b.AdmitMember(longer[0], 13, use_prefix_cache=True),
                b.AdmitMember(longer[1], 14, longer[0], 3, use_prefix_cache=True),
            ]
        )
    )
    admitted = shared.results[0].value
    assert isinstance(admitted, b.Admitted)
    assert [table.num_computed_tokens for table in admitted.tables] == [8, 12]
    assert driver.table(longer[0])[:3] == driver.table(longer[1])[:3]


def test_switched_off_nothing_is_found_and_what_there_was_is_free() -> None:
    driver = Driver()
    serve(driver, "a", 8)
    live = start(driver, "b", 10)
    driver.gatekeeper.configure(Configure(use_prefix_cache=False))
    assert driver.memory.levels().num_cached_blocks == 0
    driver.computed(live.sequence_id, 10)
    driver.do(b.Free([live.sequence_id]))
    assert driver.memory.levels().num_free_blocks == 8
    assert start(driver, "c", 9).num_computed_tokens == 0


# --- b15: the full hit ------------------------------------------------------------------


def test_b15_a_full_hit_computes_one_token_in_a_block_of_its_own() -> None:
    driver = Driver()
    blocks = serve(driver, "a", 8)
    table, result = admit(driver, driver.arrive("b", 8), 8)
    assert table.num_computed_tokens == 7
    given = table.block_ids.tolist()
    assert given[0] == blocks[0]
    assert given[1] not in blocks
    assert pairs(result.copies) == [(blocks[1], given[1])]
    # What is copied is held until the step that copies it is acknowledged, then cached again.
    assert driver.memory.levels() == b.PoolLevels(5, 0, 2, 1, 0, 7, 6)
    driver.computed(table.sequence_id, 8, 9)
    driver.do(b.Free([table.sequence_id]))
    next_step(driver)
    driver.acknowledged = 1
    driver.do()
    assert driver.memory.levels() == b.PoolLevels(6, 2, 0, 0, 0, 8, 6)


def test_b15_all_of_a_group_hit_in_full_and_each_writes_to_its_own() -> None:
    driver = Driver(num_blocks=12)
    blocks = serve(driver, "a", 8)
    ids = [driver.arrive(name, 8) for name in "bcd"]
    members = [b.AdmitMember(i, 8, use_prefix_cache=True) for i in ids]
    result = driver.do(b.Admit(members))
    lasts = [driver.table(i)[1] for i in ids]
    assert len({*lasts, blocks[1]}) == 4
    assert pairs(result.copies) == [(blocks[1], last) for last in lasts]


def test_b15_without_room_for_the_copy_the_last_block_is_computed_again() -> None:
    """Whatever is cached, a prompt needs no more than its own blocks."""
    driver = Driver(num_blocks=3)
    blocks = serve(driver, "a", 8)
    driver.run("other", 4)
    table, result = admit(driver, driver.arrive("b", 8), 8)
    assert table.num_computed_tokens == 4
    assert table.block_ids.tolist() == blocks  # the last one evicted, to be filled again
    assert not pairs(result.copies)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 4


def test_b15_a_published_block_is_copied_also_for_its_only_holder() -> None:
    """A holder that says less is computed is to write again what others may find."""
    driver = Driver()
    table = start(driver, "a", 8)
    driver.computed(table.sequence_id, 8)
    driver.computed(table.sequence_id, 5)
    result = driver.do(b.Reserve(u64(table.sequence_id), i32(8)))
    published = table.block_ids.tolist()[1]
    assert pairs(result.copies) == [(published, driver.table(table.sequence_id)[1])]
    assert driver.table(table.sequence_id)[1] != published


def test_b15_the_copy_of_a_step_that_was_lost_is_the_next_ones() -> None:
    driver = Driver()
    blocks = serve(driver, "a", 8)
    table, _ = admit(driver, driver.arrive("b", 8), 8)
    confirmed = driver.take_over(last_executed_step=0)
    assert [(one.src_block_id, one.dst_block_id) for one in confirmed.pending_copies] == [
        (blocks[1], table.block_ids.tolist()[1])
    ]
    # Until then nobody else is given the source, however full the pool is.
    other = driver.arrive("c", 24)
    assert blocks[1] not in driver.manager.pool.free_blocks()
    assert driver.send(b.Admit([b.AdmitMember(other, 24)])).results[0].status == (
        OpStatus.NO_FREE_BLOCKS
    )


# --- b17: a hash is no proof -------------------------------------------------------------


def test_b17_with_a_hash_that_always_collides_nothing_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent, tokens: bytes(16))
    driver = Driver()
    serve(driver, "a", 4)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(9, 9, 9, 9)) == 0
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(0, 1, 2, 3)) == 4
    # Another tenant's first block has the same key, and the same tokens.
    assert driver.memory.num_cached_tokens(Domain("t", ""), i32(0, 1, 2, 3)) == 0
    # The newest one is found by it; the one before is free.
    serve(driver, "b", 8, "t")
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(0, 1, 2, 3)) == 0
    assert driver.memory.levels().num_cached_blocks == 1


def test_b17_the_same_tokens_after_other_ones_are_another_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys of the last tokens alone: their KV is of all tokens before them."""
    monkeypatch.setattr(prefix_cache, "block_key", lambda parent, tokens: tokens[-16:])
    driver = Driver()
    serve(driver, "a", 8)
    sequence_id = driver.do(b.Arrive("b", i32(9, 9, 9, 9, 4, 5, 6, 7, 8))).results[0].value
    assert isinstance(sequence_id, b.Arrived)
    table = admit(driver, sequence_id.sequence_id, 9)[0]
    driver.computed(table.sequence_id, 9)
    found = driver.memory.num_cached_tokens(Domain("", ""), i32(9, 9, 9, 9, 4, 5, 6, 7))
    assert found == 8
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 4


# --- b18: published after the step that filled it ---------------------------------------


def test_b18_a_block_is_found_only_once_the_step_that_fills_it_is_done() -> None:
    driver = Driver()
    first = start(driver, "a", 9)
    assert start(driver, "b", 9).num_computed_tokens == 0  # in the same batch's step
    next_step(driver)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(9))) == 0
    driver.computed(first.sequence_id, 5)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(9))) == 4


def test_b18_what_was_shared_while_it_is_computed_is_not_published_by_who_shares() -> None:
    driver = Driver()
    first, second = driver.arrive("a", 9), driver.arrive("b", 10)
    members = [
        b.AdmitMember(first, 9, use_prefix_cache=True),
        b.AdmitMember(second, 10, first, 2, use_prefix_cache=True),
    ]
    driver.do(b.Admit(members))
    driver.computed(second, 8, 77)  # says no more than what it was given
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 0
    driver.computed(second, 9)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 8


def test_b18_a_block_that_a_step_is_yet_to_copy_is_not_published() -> None:
    """Its holder has computed all of it, in the block that it is copied from."""
    driver = Driver()
    parent = start(driver, "a", 8).sequence_id
    next_step(driver)
    [child] = driver.fork(parent)
    driver.do(b.Reserve(u64(child), i32(8)))
    copied = driver.table(child)
    assert not set(copied) & set(driver.table(parent))
    driver.acknowledged = 1
    driver.computed(child, 8)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 0
    driver.computed(parent, 8)
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 8
    next_step(driver)
    driver.acknowledged = 2
    assert start(driver, "b", 9).block_ids.tolist()[:2] == driver.table(parent)


# --- b19, b21, b10: eviction ------------------------------------------------------------


def test_b19_an_evicted_block_is_not_found_before_it_is_filled_again() -> None:
    driver = Driver(num_blocks=2)
    serve(driver, "a", 8)
    other = driver.arrive("b", 8, tenant="t")
    assert admit(driver, other, 8)[0].num_computed_tokens == 0
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 0
    driver.computed(other, 8)
    assert driver.memory.num_cached_tokens(Domain("t", ""), i32(*range(8))) == 8
    assert driver.memory.stats().num_evictions == 2


def test_b21_a_warm_full_pool_and_the_same_prompt_again() -> None:
    driver = Driver(num_blocks=4)
    blocks = serve(driver, "a", 16)
    assert driver.memory.levels().num_cached_blocks == 4
    # One more token than is cached: the new block is none of those that were found.
    waiting = driver.arrive("b", 17)
    result = driver.fails(b.Admit([b.AdmitMember(waiting, 17, use_prefix_cache=True)]))
    assert result.status == OpStatus.NO_FREE_BLOCKS
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(16))) == 16
    table = start(driver, "c", 13)
    assert (table.num_computed_tokens, table.block_ids.tolist()) == (12, blocks)
    assert driver.memory.stats().num_evictions == 1


def test_b21_what_any_member_found_is_held_before_anything_is_evicted() -> None:
    driver = Driver(num_blocks=7)
    mine = serve(driver, "a", 8, "t")
    serve(driver, "b", 16)
    first, second = driver.arrive("c", 8), driver.arrive("d", 9, tenant="t")
    members = [b.AdmitMember(i, n, use_prefix_cache=True) for i, n in ((first, 9), (second, 9))]
    result = driver.do(b.Admit(members)).results[0].value
    assert isinstance(result, b.Admitted)
    # The first one's copy evicts; what the second one found was there longest.
    assert [table.num_computed_tokens for table in result.tables] == [7, 8]
    assert driver.table(second)[:2] == mine


def test_b10_a_block_that_is_held_is_never_evicted() -> None:
    driver = Driver(num_blocks=4)
    held = start(driver, "a", 8)
    driver.computed(held.sequence_id, 8)
    serve(driver, "b", 12)
    for name in "cdef":
        serve(driver, name, 7, "t")
        assert driver.table(held.sequence_id) == held.block_ids.tolist()
    assert driver.memory.num_cached_tokens(Domain("", ""), i32(*range(8))) == 8


def test_the_ends_of_what_was_used_longest_ago_go_first() -> None:
    driver = Driver(num_blocks=6)
    first, second = serve(driver, "a", 12), serve(driver, "b", 12, "t")
    queue = driver.manager.pool.cached_blocks
    assert queue().tolist() == [*first[::-1], *second[::-1]]
    serve(driver, "c", 9)  # the first two of the first one, used again: its end made room
    # Of what was found one block is protected, which is a quarter of the pool.
    assert queue().tolist() == [*second[::-1], first[1], first[0]]
    assert driver.manager.pool._evictable.protected.blocks().tolist() == first[:1]
    serve(driver, "d", 4, "u")
    assert driver.memory.num_cached_tokens(Domain("t", ""), i32(*range(12))) == 12
    serve(driver, "e", 4, "v")
    assert driver.memory.num_cached_tokens(Domain("t", ""), i32(*range(12))) == 8


def test_a_queue_of_stale_entries_stays_short() -> None:
    """Used again and again, a few blocks take no more room than they need."""
    stamps = np.zeros(100, np.int64)
    queue = LruQueue(stamps)
    blocks = np.arange(100, dtype=np.int32)
    for stamp in range(1, 1_000):
        stamps[blocks] = stamp
        queue.add(stamp, blocks)
        if stamp < 999:
            queue.remove(100)
    assert queue.blocks().tolist() == blocks.tolist()
    assert queue._num_queued < 5_000
    [(stamp, first)] = queue.take(3)
    assert (stamp, first.tolist()) == (999, [0, 1, 2])


def test_what_was_found_goes_after_what_was_not_up_to_a_quarter_of_the_pool() -> None:
    stamps = np.zeros(8, np.int64)
    order = EvictionOrder(stamps)
    order.was_found[[0, 1, 2]] = True
    for stamp, blocks in enumerate((i32(0), i32(1, 4), i32(2), i32(5)), 1):
        stamps[blocks] = stamp
        order.add(stamp, blocks)
    # 0 was found, and is one too many: it is as if it were used when it lost its place.
    assert order.blocks().tolist() == [4, 0, 5, 1, 2]
    assert order.take(4).tolist() == [4, 0, 5, 1]
    assert order.num_blocks == 1
    order.remove(i32(2))
    assert order.num_blocks == 0


# --- b20: domains -------------------------------------------------------------------------


@pytest.mark.parametrize("other", [("t", ""), ("", "s"), ("t", "s")])
def test_b20_another_tenant_or_salt_finds_nothing_and_loses_nothing(other: tuple[str, str]) -> None:
    driver = Driver(num_blocks=16)
    serve(driver, "a", 8)
    assert start(driver, "b", 9, *other).num_computed_tokens == 0
    assert start(driver, "c", 9).num_computed_tokens == 8
    own = serve(driver, "d", 9, "u", "s")
    assert start(driver, "e", 9, "u", "s").block_ids.tolist()[:2] == own[:2]


def test_b20_tenant_and_salt_are_not_run_together() -> None:
    driver = Driver(num_blocks=16)
    serve(driver, "a", 8, "ab", "c")
    assert start(driver, "b", 9, "a", "bc").num_computed_tokens == 0


def test_b20_a_running_sequence_is_not_shared_with_another_salt() -> None:
    driver = Driver()
    first = start(driver, "a", 8).sequence_id
    other = driver.arrive("b", 9, salt="s")
    result = driver.fails(b.Admit([b.AdmitMember(other, 9, first, 2)]))
    assert result.status == OpStatus.INVALID_ARGUMENT
    assert "another cache_salt" in result.message
