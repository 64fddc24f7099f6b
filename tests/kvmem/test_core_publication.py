"""Publication is put off: no step waits for it, and nothing else can tell."""

from __future__ import annotations

from kvmem_svc.core import batch as b
from kvmem_svc.core import state
from tests.kvmem.driver import Driver, i32, u64


def running(driver: Driver, name: str, num_tokens: int) -> tuple[int, int]:
    """A sequence admitted with the prefix cache, and how many of its tokens were cached."""
    sequence_id = driver.arrive(name, num_tokens)
    member = b.AdmitMember(sequence_id, num_tokens, use_prefix_cache=True)
    value = driver.do(b.Admit([member])).results[0].value
    assert isinstance(value, b.Admitted)
    return sequence_id, value.tables[0].num_computed_tokens


def commit(sequence_id: int, num_computed: int, token: int = 9) -> b.Commit:
    """One token, the steps before it executed as far as `num_computed`."""
    return b.Commit(u64(sequence_id), i32(token), i32(num_computed))


def reserve(sequence_id: int, num_slots: int) -> b.Reserve:
    return b.Reserve(u64(sequence_id), i32(num_slots))


def num_published(driver: Driver) -> int:
    return len(driver.manager.pool.cache.index)


def test_a_step_does_not_wait_for_it() -> None:
    driver = Driver()
    sequence_id, _ = running(driver, "a", 8)
    driver.do(commit(sequence_id, 8), reserve(sequence_id, 9))
    assert num_published(driver) == 0
    driver.memory.settle()
    assert num_published(driver) == 2
    driver.memory.settle()
    assert num_published(driver) == 2


def test_the_next_batch_finds_what_the_one_before_it_filled() -> None:
    driver = Driver()
    sequence_id, _ = running(driver, "a", 8)
    driver.do(commit(sequence_id, 8))
    driver.arrive("b", 8)
    assert num_published(driver) == 2
    assert running(driver, "c", 9)[1] == 8


def test_what_the_same_batch_gives_back_is_published_first() -> None:
    driver = Driver()
    sequence_id, _ = running(driver, "a", 8)
    driver.do(commit(sequence_id, 8), b.Free([sequence_id], b.FinishReason.STOP))
    driver.step_id, driver.acknowledged = 2, 1
    driver.do()
    assert driver.memory.levels().num_cached_blocks == 2
    assert running(driver, "b", 9)[1] == 8


def test_two_commits_of_one_batch_publish_each_block_once() -> None:
    driver = Driver()
    sequence_id, _ = running(driver, "a", 8)
    driver.do(commit(sequence_id, 4), commit(sequence_id, 8))
    driver.memory.settle()
    assert num_published(driver) == 2
    assert driver.manager.sequences.chained_len.max() == 8


def test_when_it_is_settled_makes_no_difference() -> None:
    """Neither to the state nor to any reply; with a pool so small that blocks are evicted."""
    late, early = Driver(num_blocks=6), Driver(num_blocks=6)
    for driver in (late, early):
        for token, name in enumerate(("a", "b", "c", "d")):
            sequence_id, _ = running(driver, name, 8)
            for num_computed in range(8, 17):
                driver.do(
                    commit(sequence_id, num_computed, token), reserve(sequence_id, num_computed + 1)
                )
                driver.step_id += 1
                driver.acknowledged = driver.step_id - 1
                if driver is early:
                    driver.memory.settle()
            driver.do(b.Free([sequence_id], b.FinishReason.STOP), b.Confirm(name))
    assert late.manager.pool.num_evictions > 0
    assert str(late.mutations) == str(early.mutations)
    assert str(state.dump(late.memory)) == str(state.dump(early.memory))


def test_it_comes_before_whatever_the_next_batch_evicts() -> None:
    late, early = Driver(num_blocks=3), Driver(num_blocks=3)
    for driver in (late, early):
        first, _ = running(driver, "a", 4)
        driver.do(commit(first, 4), b.Free([first], b.FinishReason.STOP))
        driver.step_id, driver.acknowledged = 2, 1
        second, num_cached = running(driver, "b", 3)
        assert num_cached == 0
        driver.do(reserve(second, 4))
        driver.do(commit(second, 3, token=3))
        driver.do(commit(second, 4))  # it has filled a block as the first one's, which is cached
        if driver is early:
            driver.memory.settle()
        driver.do(reserve(second, 12))  # and that one is evicted
        assert driver.manager.pool.num_evictions == 1
    assert str(state.dump(late.memory)) == str(state.dump(early.memory))
