"""Quotas of tenants, pinned prefixes, and how the service was started."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import errors
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.limits import MAX_CLOCK_STEP_MS
from kvmem_svc.core.mutations import Configure, Pin, Pinned
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.tenants import FIRST_CAPACITY, Quota
from kvmem_svc.journal.load import pack_state, unpack_state
from tests.kvmem.driver import TIMES, Driver, i32, u64
from tests.kvmem.test_prefix_cache import admit, next_step, serve, start

MINE = Domain("t", "")


def limited(max_blocks: int = 0, max_sequences: int = 0, num_blocks: int = 16) -> Driver:
    driver = Driver(num_blocks=num_blocks)
    driver.gatekeeper.configure(Configure(quota=Quota(max_blocks, max_sequences)))
    return driver


def num_blocks_of(driver: Driver, tenant: str) -> int:
    number = driver.manager.tenants.numbers[tenant]
    return int(driver.manager.pool.num_blocks_of[number])


def pin(driver: Driver, num_tokens: int, domain: Domain = MINE, *, public: bool = False) -> Pinned:
    fence = driver.memory.ledger.fence()
    mutation = Pin(domain, np.arange(num_tokens, dtype=np.int32), 0, public)
    return driver.gatekeeper.pin(fence, mutation, 0)


# --- quotas -----------------------------------------------------------------------------


def test_a_tenant_gets_no_more_blocks_than_its_quota_and_others_do() -> None:
    driver = limited(max_blocks=4)
    first = start(driver, "a", 8, "t").sequence_id
    second, other = driver.arrive("b", 9, tenant="t"), driver.arrive("c", 9, tenant="u")
    refused = driver.fails(b.Admit([b.AdmitMember(second, 9)]))
    assert refused.status == OpStatus.TENANT_QUOTA
    assert "'t' has 2 blocks and needs 3 more, its quota is 4" in refused.message
    driver.do(b.Admit([b.AdmitMember(other, 9)]))
    driver.do(b.Admit([b.AdmitMember(second, 8)]))
    for op in (b.Reserve(u64(second), i32(9)), b.Append(second, i32(1, 1))):
        result = driver.fails(op)
        assert result.status == OpStatus.TENANT_QUOTA
    driver.do(b.Free([first]))
    driver.do(b.Reserve(u64(second), i32(9)))


def test_a_reserve_tells_groups_over_quota_from_groups_without_blocks() -> None:
    driver = limited(max_blocks=3, num_blocks=7)
    ids = [start(driver, name, 8, tenant).sequence_id for name, tenant in ("at", "bu", "cv")]
    op = b.Reserve(u64(*ids), i32(16, 12, 12))
    result = driver.send(op).results[0]
    assert result.status == OpStatus.NO_FREE_BLOCKS
    assert isinstance(result.value, b.Reserved)
    assert result.value.failed_groups.tolist() == [0, 2]
    assert result.value.quota_groups.tolist() == [0]
    only = driver.send(b.Reserve(u64(ids[0]), i32(16))).results[0]
    assert only.status == OpStatus.TENANT_QUOTA
    assert isinstance(only.value, b.Reserved)
    assert only.value.failed_groups.tolist() == only.value.quota_groups.tolist() == [0]


def test_members_of_one_group_are_counted_together() -> None:
    driver = limited(max_blocks=4)
    ids = [start(driver, name, 8, "t").sequence_id for name in "ab"]
    result = driver.send(b.Reserve(u64(*ids), i32(9, 8))).results[0]
    assert isinstance(result.value, b.Reserved)
    assert result.value.quota_groups.tolist() == [0]
    grouped = driver.send(b.Reserve(u64(*ids), i32(9, 8), i32(2))).results[0]
    assert isinstance(grouped.value, b.Reserved)
    assert grouped.value.quota_groups.tolist() == [0]


def test_groups_of_one_tenant_share_its_quota_within_one_reserve() -> None:
    driver = limited(max_blocks=5)
    ids = [start(driver, name, 8, "t").sequence_id for name in "ab"]
    result = driver.send(b.Reserve(u64(*ids), i32(9, 9))).results[0]  # either fits, not both
    assert isinstance(result.value, b.Reserved)
    assert result.value.quota_groups.tolist() == [1]
    assert num_blocks_of(driver, "t") == 5


def test_shared_blocks_count_once_and_cached_ones_do_not() -> None:
    driver = limited(max_blocks=4)
    serve(driver, "a", 8, "t")
    assert num_blocks_of(driver, "t") == 0
    first = start(driver, "b", 9, "t").sequence_id
    assert num_blocks_of(driver, "t") == 3
    start(driver, "c", 9, "t")  # two of them are the same
    assert num_blocks_of(driver, "t") == 4
    driver.fork(first)
    assert num_blocks_of(driver, "t") == 4
    assert driver.fails(b.Append(first, i32(5))).status == OpStatus.TENANT_QUOTA  # a copy counts
    driver.do(b.Preempt([first]))
    assert num_blocks_of(driver, "t") == 4


def test_what_is_found_counts_for_who_finds_it() -> None:
    driver = limited(max_blocks=2)
    serve(driver, "a", 8, "t")
    waiting = driver.arrive("b", 8, tenant="t")
    refused = driver.fails(b.Admit([b.AdmitMember(waiting, 9, use_prefix_cache=True)]))
    assert refused.status == OpStatus.TENANT_QUOTA


def test_a_full_hit_at_the_quota_computes_its_last_block_again() -> None:
    driver = limited(max_blocks=2)
    serve(driver, "a", 8, "t")
    held = start(driver, "b", 8, "t")
    assert held.num_computed_tokens == 4


def test_a_tenant_has_no_more_sequences_than_its_quota() -> None:
    driver = limited(max_sequences=8)
    first = start(driver, "a", 8, "t").sequence_id
    start(driver, "b", 8, "t")
    refused = driver.fails(b.Arrive("c", i32(1), tenant="t"))
    assert refused.status == OpStatus.TENANT_QUOTA
    assert "'t' has 8 sequences and wants 1 more, its quota is 8" in refused.message
    driver.arrive("c", 1, tenant="u")
    driver.do(b.Free([first]))
    driver.arrive("d", 1, tenant="t")


def test_what_a_request_may_fork_into_is_its_own_from_its_arrival_on() -> None:
    """So nobody is refused once it runs: the forward pass was not for nothing."""
    driver = limited(max_sequences=7)
    first = start(driver, "a", 8, "t").sequence_id
    assert driver.fails(b.Arrive("b", i32(1), 4, "t")).status == OpStatus.TENANT_QUOTA
    driver.arrive("c", 1, 3, "t")
    driver.do(b.Fork(first, 3))
    ended, pruned, *_ = driver.manager.requests["a"].live.values()
    driver.do(b.Free([pruned]))
    assert driver.fails(b.Arrive("d", i32(1), 1, "t")).status == OpStatus.TENANT_QUOTA
    driver.do(b.Free([ended], b.FinishReason.STOP))
    driver.arrive("d", 1, 1, "t")
    driver.do(b.Fork(driver.manager.requests["a"].live[2], 1))
    check_integrity(driver.manager)


def test_a_prompt_that_can_never_fit_the_quota_is_refused_when_it_arrives() -> None:
    driver = limited(max_blocks=2, num_blocks=32)
    refused = driver.fails(b.Arrive("a", i32(*range(9)), 1, "t"))
    assert refused.status == OpStatus.TENANT_QUOTA
    assert "the prompt needs 3 blocks, the quota of tenant 't' is 2" in refused.message
    driver.arrive("b", 8, 1, "t")
    # What has ended needs none.
    ended = [b.ArrivingCandidate(0, i32(1), b.FinishReason.STOP)]
    driver.do(b.Arrive("c", i32(*range(9)), 1, "t", candidates=ended))


def test_a_request_of_another_life_comes_with_all_its_sequences_or_not_at_all() -> None:
    driver = limited(max_sequences=2)
    candidates = [b.ArrivingCandidate(i, i32(1)) for i in range(3)]
    op = b.Arrive("a", i32(1), 3, "t", candidates=candidates)
    assert driver.fails(op).status == OpStatus.TENANT_QUOTA


def test_tenants_that_have_nothing_any_more_take_no_room() -> None:
    driver = Driver()
    for i in range(10 * FIRST_CAPACITY):
        serve(driver, f"r{i}", 3, f"tenant {i}")
    assert driver.manager.tenants.capacity <= 2 * FIRST_CAPACITY
    assert driver.memory.stats().num_tenants == 0
    ids = [driver.arrive(f"live {i}", 1, 1, f"live {i}") for i in range(8)]
    assert driver.memory.stats().num_tenants == 8
    driver.do(b.Free(ids), *(b.Confirm(f"live {i}") for i in range(8)))
    assert driver.memory.stats().num_tenants == 0


# --- pins -------------------------------------------------------------------------------


def test_a_pinned_prefix_is_not_evicted_until_it_is_let_go() -> None:
    driver = Driver()
    serve(driver, "a", 12, "t")
    assert pin(driver, 9) == Pinned(1, 8)
    assert driver.memory.stats().num_pins == 1
    assert driver.memory.levels().num_in_use_blocks == 2
    serve(driver, "b", 24, "u")
    assert driver.memory.num_cached_tokens(MINE, i32(*range(12))) == 8
    driver.gatekeeper.unpin(driver.memory.ledger.fence(), 1, 0)
    assert driver.memory.levels().num_in_use_blocks == 0
    serve(driver, "c", 32, "u")
    assert driver.memory.num_cached_tokens(MINE, i32(*range(12))) == 0
    driver.gatekeeper.unpin(driver.memory.ledger.fence(), 1, 0)  # again: it is gone


def test_nothing_cached_nothing_pinned() -> None:
    driver = Driver()
    assert pin(driver, 9) == Pinned(0, 0)
    assert driver.memory.stats().num_pins == 0


def test_pins_hold_half_the_pool_at_most_and_what_the_quota_allows() -> None:
    driver = limited(max_blocks=3, num_blocks=8)
    serve(driver, "a", 12, "t")
    assert pin(driver, 12) == Pinned(1, 12)
    serve(driver, "b", 8, "u")
    with pytest.raises(errors.NoFreeBlocks, match="1 pins hold 3 blocks"):
        pin(driver, 8, Domain("u", ""))
    tight = limited(max_blocks=1)
    tight.gatekeeper.configure(Configure())
    serve(tight, "a", 8, "t")
    tight.gatekeeper.configure(Configure(quota=Quota(max_blocks=1)))
    with pytest.raises(errors.TenantQuota, match="needs 2 more, its quota is 1"):
        pin(tight, 8)


def test_a_pin_out_of_range_is_refused() -> None:
    driver = Driver()
    fence = driver.memory.ledger.fence()
    with pytest.raises(errors.InvalidPin, match="ttl_ms is -1"):
        driver.gatekeeper.pin(fence, Pin(MINE, i32(1), -1), 0)
    with pytest.raises(errors.InvalidPin, match="tenant_bytes is 300"):
        driver.gatekeeper.pin(fence, Pin(Domain("t" * 300, ""), i32(1)), 0)


def test_pins_are_the_open_sessions_to_make() -> None:
    driver = Driver()
    stale = driver.memory.ledger.fence()
    driver.take_over()
    for call in (
        lambda: driver.gatekeeper.pin(stale, Pin(MINE, i32(1)), 0),
        lambda: driver.gatekeeper.unpin(stale, 1, 0),
    ):
        with pytest.raises(errors.StaleEpoch):
            call()


def test_a_pin_ends_with_its_ttl_which_starts_over_after_a_recovery() -> None:
    driver = Driver()
    serve(driver, "a", 8, "t")
    fence = driver.memory.ledger.fence()
    driver.gatekeeper.pin(fence, Pin(MINE, np.arange(8, dtype=np.int32), 2 * MAX_CLOCK_STEP_MS), 0)
    driver.gatekeeper.tick(MAX_CLOCK_STEP_MS)
    again = Gatekeeper(driver.memory, TIMES, recovered=True)
    for at_ms, num_pins in ((0, 1), (MAX_CLOCK_STEP_MS, 1), (2 * MAX_CLOCK_STEP_MS, 0)):
        again.tick(at_ms)
        assert driver.memory.stats().num_pins == num_pins
    driver.gatekeeper.tick(2 * MAX_CLOCK_STEP_MS)  # it is gone already


def test_a_public_prefix_is_found_by_everybody_and_only_while_it_is_pinned() -> None:
    driver = Driver(num_blocks=24)
    blocks = serve(driver, "a", 8, "t")
    assert driver.memory.num_cached_tokens(Domain("u", "s"), i32(*range(8))) == 0
    pinned = pin(driver, 8, public=True)
    table = start(driver, "b", 13, "u", "s")
    assert (table.num_computed_tokens, table.block_ids.tolist()[:2]) == (8, blocks)
    # What it computes after that is its own.
    driver.computed(table.sequence_id, 13)
    assert driver.memory.num_cached_tokens(Domain("u", "s"), i32(*range(13))) == 12
    assert driver.memory.num_cached_tokens(Domain("v", "s"), i32(*range(13))) == 8
    assert driver.memory.num_cached_tokens(MINE, i32(*range(13))) == 8
    assert start(driver, "c", 13, "u", "s").num_computed_tokens == 12
    assert start(driver, "d", 8, "v").num_computed_tokens == 7
    driver.gatekeeper.unpin(driver.memory.ledger.fence(), pinned.pin_id, 0)
    assert driver.memory.num_cached_tokens(Domain("v", ""), i32(*range(8))) == 0


def test_who_pins_what_is_public_finds_it_as_long_as_its_own_pin_holds() -> None:
    driver = Driver()
    serve(driver, "a", 8, "t")
    public = pin(driver, 8, public=True)
    mine = pin(driver, 5, Domain("u", ""))
    fence = driver.memory.ledger.fence()
    driver.gatekeeper.unpin(fence, public.pin_id, 0)
    for memory in (driver.memory, unpack_state(pack_state(driver.memory))):
        found = [memory.num_cached_tokens(Domain(who, ""), i32(*range(8))) for who in "tuv"]
        assert found == [8, 4, 0]
    driver.gatekeeper.unpin(fence, mine.pin_id, 0)
    assert driver.memory.num_cached_tokens(Domain("u", ""), i32(*range(8))) == 0
    check_integrity(driver.manager)


def test_b20_after_a_public_prefix_a_collision_leads_nobody_to_anothers_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys that do not depend on the tenant, in both directions."""
    monkeypatch.setattr(
        "kvmem_svc.core.prefix_cache.block_key", lambda parent, tokens: tokens[-16:]
    )
    driver = Driver(num_blocks=24)
    serve(driver, "a", 12, "t")
    pin(driver, 8, public=True)
    assert driver.memory.num_cached_tokens(MINE, i32(*range(12))) == 12
    assert driver.memory.num_cached_tokens(Domain("u", ""), i32(*range(12))) == 8
    serve(driver, "b", 12, "u")
    assert driver.memory.num_cached_tokens(Domain("u", ""), i32(*range(12))) == 12
    assert driver.memory.num_cached_tokens(MINE, i32(*range(12))) == 8


def test_a_worker_that_is_new_has_nothing_pinned() -> None:
    driver = Driver()
    serve(driver, "a", 8, "t")
    pin(driver, 8, public=True)
    driver.take_over(worker="another")
    assert driver.memory.stats().num_pins == 0
    assert driver.memory.num_cached_tokens(Domain("u", ""), i32(*range(8))) == 0


# --- the state --------------------------------------------------------------------------


def test_all_of_it_is_in_a_snapshot() -> None:
    driver = limited(max_blocks=6, max_sequences=5, num_blocks=10)
    serve(driver, "a", 12, "t")
    serve(driver, "b", 8, "u", "s")
    pin(driver, 8, public=True)
    live = start(driver, "c", 13, "v").sequence_id
    next_step(driver)
    next_step(driver)
    driver.computed(live, 13)
    driver.do(b.Free([driver.run("d", 4)]))
    packed = pack_state(driver.memory)
    again = unpack_state(packed)
    assert pack_state(again) == packed
    assert again.configuration == driver.memory.configuration
    for memory in (driver.memory, again):
        assert memory.num_cached_tokens(Domain("v", ""), i32(*range(13))) == 12
        assert memory.num_cached_tokens(Domain("w", ""), i32(*range(13))) == 8
        assert memory.num_cached_tokens(Domain("u", "s"), i32(*range(13))) == 8
    assert again.stats() == driver.memory.stats()


def test_the_order_of_eviction_is_in_a_snapshot() -> None:
    """On probation, protected, and found but in use or waiting for a step."""
    driver = Driver(num_blocks=16)
    serve(driver, "a", 12, "t")
    serve(driver, "b", 9, "t")
    serve(driver, "c", 8, "u")
    live = start(driver, "d", 9, "u").sequence_id
    pool = driver.manager.pool
    assert pool._evictable.protected.num_blocks
    again = unpack_state(pack_state(driver.memory))
    assert pack_state(again) == pack_state(driver.memory)
    assert again.manager is not None
    other = again.manager.pool
    assert other.cached_blocks().tolist() == pool.cached_blocks().tolist()
    protected = [one._evictable.protected.blocks().tolist() for one in (pool, other)]
    assert protected[0] == protected[1]
    assert other._evictable.was_found[driver.table(live)[:2]].all()
    check_integrity(again.manager)


def test_how_it_was_started_is_a_mutation_only_where_it_differs() -> None:
    driver = Driver()
    driver.gatekeeper.configure(Configure())
    before = len(driver.mutations)
    driver.gatekeeper.configure(Configure(quota=Quota(3)))
    driver.gatekeeper.configure(Configure(quota=Quota(3)))
    assert len(driver.mutations) == before + 1
    driver.take_over(worker="another")
    assert driver.fails(b.Arrive("b", i32(*range(13)))).status == OpStatus.TENANT_QUOTA
    waiting = driver.arrive("a", 12)
    assert driver.fails(b.Admit([b.AdmitMember(waiting, 13)])).status == OpStatus.TENANT_QUOTA
    assert admit(driver, driver.arrive("b", 4), 4)[0].num_computed_tokens == 0
