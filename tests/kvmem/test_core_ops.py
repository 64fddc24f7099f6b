"""The ops, one behaviour a test."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core import views
from kvmem_svc.core.batch import FinishReason, OpStatus
from kvmem_svc.core.errors import InvariantViolation
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.sequences import TRANSITIONS, Status
from tests.kvmem.driver import Driver, i32, pairs, u64

# --- requests ---------------------------------------------------------------------------


def test_b02_second_live_request_with_one_id_is_refused_and_the_first_unaffected() -> None:
    memory = Driver()
    first = memory.run("same", 6)
    refused = memory.fails(b.Arrive("same", i32(9)))
    assert refused.status == OpStatus.ALREADY_EXISTS
    assert "'same'" in refused.message
    memory.do(b.Append(first, i32(7)))


def test_b02_the_id_is_taken_until_the_request_is_confirmed() -> None:
    memory = Driver()
    first = memory.run("same", 6)
    memory.do(b.Free([first], FinishReason.STOP))
    assert memory.fails(b.Arrive("same", i32(9))).status == OpStatus.ALREADY_EXISTS
    memory.do(b.Confirm("same"))
    assert memory.arrive("same", 3) != first


@pytest.mark.parametrize(
    ("op", "named"),
    [
        (b.Arrive("r", i32()), "0 tokens"),
        (b.Arrive("r", np.zeros(33, np.int32)), "33 tokens"),
        (b.Arrive("r", i32(1, -2, 3)), "-2"),
        (b.Arrive("r", i32(1), 0), "num_candidates is 0"),
        (b.Arrive("r", i32(1), 65), "num_candidates is 65"),
        (b.Arrive("", i32(1)), "request_id_bytes is 0"),
        (b.Arrive("x" * 257, i32(1)), "request_id_bytes is 257"),
        (b.Arrive("r", i32(1), request_spec=bytes(65537)), "request_spec_bytes is 65537"),
    ],
)
def test_b39_arrive_out_of_range_names_the_value(op: b.Arrive, named: str) -> None:
    result = Driver().fails(op)
    assert result.status == OpStatus.INVALID_ARGUMENT
    assert named in result.message


def test_b33_the_longest_prompt_the_model_takes_arrives() -> None:
    memory = Driver(max_model_len=32)
    assert len(memory.tokens(memory.arrive("r", 32))) == 32


def test_arrivals_are_numbered_over_the_life_of_the_memory_service() -> None:
    memory = Driver()
    numbers = []
    for name in ("a", "b"):
        value = memory.do(b.Arrive(name, i32(1))).results[0].value
        assert isinstance(value, b.Arrived)
        numbers.append(value.arrival_number)
    assert numbers == [1, 2]


def test_sequence_ids_are_never_given_twice_and_rows_are_limited() -> None:
    memory = Driver(rows=2)
    seen = set()
    for turn in range(3):
        ids = [memory.arrive(f"{turn}.{i}", 1) for i in range(2)]
        result = memory.fails(b.Arrive("more", i32(1)))
        assert result.status == OpStatus.NO_FREE_SEQUENCES
        memory.do(b.Free(ids))
        seen |= set(ids)
    assert len(seen) == 6


def test_unconfirmed_records_are_bounded() -> None:
    memory = Driver(rows=2)
    for turn in range(8):
        memory.do(b.Free([memory.arrive(f"{turn}", 1)]))
    assert memory.fails(b.Arrive("more", i32(1))).status == OpStatus.NO_FREE_SEQUENCES
    memory.do(b.Confirm("0"))
    memory.arrive("more", 1)


def test_confirm_needs_every_sequence_to_have_ended() -> None:
    memory = Driver()
    parent = memory.run("r", 5)
    [child] = memory.fork(parent)
    memory.do(b.Free([parent], FinishReason.STOP))
    refused = memory.fails(b.Confirm("r"))
    assert refused.status == OpStatus.INVALID_STATE
    assert str(child) in refused.message
    memory.do(b.Free([child], FinishReason.STOP), b.Confirm("r"))
    assert memory.fails(b.Confirm("r")).status == OpStatus.UNKNOWN_REQUEST


# --- admission --------------------------------------------------------------------------


def test_admit_shares_full_blocks_and_counts_them_as_computed() -> None:
    memory = Driver()
    first = memory.run("a", 10)
    second = memory.arrive("b", 9)
    result = memory.do(b.Admit([b.AdmitMember(second, 9, first, 2)]))
    assert memory.table(second)[:2] == memory.table(first)[:2]
    assert memory.table(second)[2] not in memory.table(first)
    assert memory.view(second).num_computed_tokens == 8
    assert memory.view(first).ref_counts.tolist() == [2, 2, 1]
    assert result.levels.num_in_use_blocks == 4


def test_admit_may_share_from_an_earlier_member() -> None:
    memory = Driver()
    first, second = memory.arrive("a", 8), memory.arrive("b", 8)
    memory.do(b.Admit([b.AdmitMember(first, 8), b.AdmitMember(second, 8, first, 1)]))
    assert memory.table(first)[0] == memory.table(second)[0]


def test_b41_admit_is_all_or_nothing() -> None:
    memory = Driver(num_blocks=3)
    first, second = memory.arrive("a", 8), memory.arrive("b", 8)
    result = memory.fails(b.Admit([b.AdmitMember(first, 8), b.AdmitMember(second, 8)]))
    assert result.status == OpStatus.NO_FREE_BLOCKS
    assert "4 blocks are needed, 3 are free" in result.message


@pytest.mark.parametrize("case", ["tokens", "tenant", "too many", "itself", "later", "waiting"])
def test_b20_admit_refuses_to_share_what_is_not_the_same(case: str) -> None:
    memory = Driver()
    first = memory.run("a", 8)
    second = memory.arrive("b", 8, tenant="other" if case == "tenant" else "")
    third = memory.arrive("c", 8)
    if case == "tokens":
        memory.do(b.Free([second]))
        other = b.Arrive("d", i32(0, 1, 2, 3, 9, 9, 9, 9))
        value = memory.do(other).results[0].value
        assert isinstance(value, b.Arrived)
        second = value.sequence_id
    num_shared = 3 if case == "too many" else 2
    source = {"itself": second, "later": third, "waiting": third}.get(case, first)
    members = [b.AdmitMember(second, 12, source, num_shared)]
    if case == "later":
        members.append(b.AdmitMember(third, 12))
    expected = OpStatus.INVALID_ARGUMENT
    if case in ("later", "waiting", "itself"):
        expected = OpStatus.INVALID_STATE  # the source is not running
    assert memory.fails(b.Admit(members)).status == expected


def test_admit_shares_no_more_than_the_source_has_in_blocks_and_in_tokens() -> None:
    memory = Driver(num_blocks=16)
    short = memory.run("few blocks", 8, num_slots=4)
    long = memory.run("few tokens", 8, num_slots=12)
    waiting = memory.arrive("r", 8)
    refused = memory.fails(b.Admit([b.AdmitMember(waiting, 8, short, 2)]))
    assert "it has 1" in refused.message
    refused = memory.fails(b.Admit([b.AdmitMember(waiting, 12, long, 3)]))
    assert "first 12 tokens are not the same" in refused.message


@pytest.mark.parametrize("num_slots", [0, 33])
def test_admit_refuses_slots_out_of_range(num_slots: int) -> None:
    memory = Driver()
    waiting = memory.arrive("a", 8)
    refused = memory.fails(b.Admit([b.AdmitMember(waiting, num_slots)]))
    assert refused.status == OpStatus.INVALID_ARGUMENT
    assert str(num_slots) in refused.message


# --- slots ------------------------------------------------------------------------------


def test_reserve_adds_blocks_at_the_end_and_reports_them_as_deltas() -> None:
    memory = Driver()
    first, second = memory.run("a", 4), memory.run("b", 6)
    result = memory.do(b.Reserve(u64(first, second), i32(12, 8)))
    deltas = result.deltas
    assert deltas.sequence_ids.tolist() == [first, first]
    assert deltas.table_indices.tolist() == [1, 2]
    assert deltas.block_ids.tolist() == memory.table(first)[1:]
    assert deltas.table_versions.tolist() == [2, 2]
    assert len(memory.table(second)) == 2


def test_reserve_copies_a_shared_block_once_and_the_last_holder_writes_in_place() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    [child] = memory.fork(parent, 1, 7, 8)
    shared = memory.table(parent)
    result = memory.do(b.Reserve(u64(parent, child), i32(7, 7)))
    [(src, dst)] = pairs(result.copies)
    assert src == shared[1]
    assert memory.table(parent) == [shared[0], dst]
    assert memory.table(child) == shared
    assert memory.view(parent).ref_counts.tolist() == [2, 1]
    assert result.deltas.table_indices.tolist() == [1]


def test_reserve_copies_for_one_sibling_while_others_keep_the_block() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    first, second = memory.fork(parent, 2)
    memory.computed(second, 6, 9)
    result = memory.do(b.Reserve(u64(second), i32(7)))
    assert len(pairs(result.copies)) == 1
    assert memory.view(first).ref_counts.tolist() == [3, 2]


def test_reserve_copies_shared_blocks_that_were_reserved_ahead_too() -> None:
    memory = Driver()
    parent = memory.run("a", 6, num_slots=12)
    memory.computed(parent, 6)
    [child] = memory.fork(parent)
    result = memory.do(b.Reserve(u64(child), i32(10)))
    assert [src for src, _ in pairs(result.copies)] == memory.table(parent)[1:]
    assert memory.table(child)[0] == memory.table(parent)[0]


def test_b15_a_full_shared_prefix_is_not_written_in_place() -> None:
    memory = Driver()
    first, second = memory.run("a", 8), memory.arrive("b", 8)
    memory.do(b.Admit([b.AdmitMember(second, 8, first, 2)]))
    memory.computed(second, 7)  # the last prompt token is computed again
    result = memory.do(b.Reserve(u64(second), i32(8)))
    [(src, dst)] = pairs(result.copies)
    assert src == memory.table(first)[1]
    assert memory.table(second)[1] == dst


def test_reserve_without_a_write_copies_nothing() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    [child] = memory.fork(parent)
    assert not pairs(memory.do(b.Reserve(u64(parent, child), i32(6, 3))).copies)


def test_copies_of_one_step_never_chain() -> None:
    memory = Driver(num_blocks=16)
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    source = memory.table(parent)[1]
    children = memory.fork(parent, 1)
    copied = pairs(memory.do(b.Reserve(u64(parent), i32(7))).copies)
    grandchildren = memory.fork(parent, 1)
    copied += pairs(memory.do(b.Reserve(u64(*grandchildren, *children), i32(7, 7))).copies)
    assert [src for src, _ in copied] == [source, source]
    assert len({dst for _, dst in copied}) == 2
    memory.step_id += 1
    more = memory.fork(grandchildren[0], 1)
    later = pairs(memory.do(b.Reserve(u64(*more), i32(7))).copies)
    assert [src for src, _ in later] == [copied[1][1]]


def test_b41_each_group_gets_all_its_blocks_or_none() -> None:
    memory = Driver(num_blocks=6, rows=4)
    ids = [memory.run(name, 4) for name in "abcd"]
    result = memory.send(b.Reserve(u64(*ids), i32(8, 12, 8, 4), i32(2, 1, 1)))
    reserved = result.results[0]
    assert reserved.status == OpStatus.NO_FREE_BLOCKS
    assert isinstance(reserved.value, b.Reserved)
    assert reserved.value.failed_groups.tolist() == [0]
    assert [len(memory.table(i)) for i in ids] == [1, 1, 2, 1]
    assert result.levels.num_free_blocks == 1


def test_a_failed_group_keeps_sharing_so_a_later_one_must_copy() -> None:
    memory = Driver(num_blocks=4)
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    [child] = memory.fork(parent)
    result = memory.send(b.Reserve(u64(parent, child), i32(20, 7)))
    assert isinstance(result.results[0].value, b.Reserved)
    assert result.results[0].value.failed_groups.tolist() == [0]
    assert len(pairs(result.copies)) == 1
    assert memory.view(child).ref_counts.tolist() == [2, 1]


def test_after_a_group_copied_the_last_holder_needs_no_block() -> None:
    memory = Driver(num_blocks=4)
    parent, other = memory.run("a", 6), memory.run("b", 4)
    memory.computed(parent, 6)
    [child] = memory.fork(parent)
    result = memory.send(b.Reserve(u64(other, parent, child), i32(12, 7, 7)))
    assert isinstance(result.results[0].value, b.Reserved)
    assert result.results[0].value.failed_groups.tolist() == [0]
    assert len(pairs(result.copies)) == 1


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [((8,), ()), ((33, 4), ()), ((-1, 4), ()), ((4, 4), (1,)), ((4, 4), (0, 2)), ((4, 4), (3, -1))],
)
def test_reserve_refuses_what_does_not_add_up(slots: tuple, sizes: tuple) -> None:
    memory = Driver()
    ids = u64(memory.run("a", 4), memory.run("b", 4))
    refused = memory.fails(b.Reserve(ids, i32(*slots), i32(*sizes)))
    assert refused.status == OpStatus.INVALID_ARGUMENT


def test_append_without_blocks_changes_nothing() -> None:
    memory = Driver(num_blocks=2)
    running = memory.run("a", 8)
    assert memory.fails(b.Append(running, i32(1))).status == OpStatus.NO_FREE_BLOCKS


def test_append_takes_earlier_tokens_for_computed_and_copies_what_is_shared() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    [child] = memory.fork(parent)
    result = memory.do(b.Append(child, i32(7)))
    assert len(pairs(result.copies)) == 1
    assert memory.view(child).num_computed_tokens == 6
    assert memory.tokens(child) == [0, 1, 2, 3, 4, 5, 7]
    assert memory.tokens(parent) == [0, 1, 2, 3, 4, 5]


# --- commit -----------------------------------------------------------------------------


def test_commit_takes_several_tokens_each_and_states() -> None:
    memory = Driver()
    first, second = memory.run("a", 4), memory.run("b", 6)
    state = (second, b"score")
    ids, counts = u64(second, first), i32(0, 3)
    memory.do(b.Commit(ids, i32(7, 8, 9), i32(6, 4), counts, [state]))
    assert memory.tokens(first) == [0, 1, 2, 3, 7, 8, 9]
    assert memory.view(second).num_computed_tokens == 6
    assert (memory.scheduler_state(first), memory.scheduler_state(second)) == (b"", b"score")


def test_commit_reaches_a_preempted_sequence_and_one_token_past_the_model() -> None:
    memory = Driver(max_model_len=8)
    running = memory.run("a", 8)
    memory.do(b.Preempt([running]))
    memory.computed(running, 0, 5)
    refused = memory.fails(b.Commit(u64(running), i32(6), i32(0)))
    assert "would have 10 tokens, at most 9" in refused.message


@pytest.mark.parametrize(
    ("tokens", "computed", "counts"),
    [
        ((1, 2), (4,), ()),
        ((1,), (4, 4), ()),
        ((-1, 2), (4, 4), ()),
        ((1, 2), (5, 4), ()),  # more than there are slots
        ((1, 2), (-1, 4), ()),
        ((1, 2, 3), (4, 4), (1, 1)),
        ((1, 2), (4, 4), (3, -1)),
        ((1, 2), (4, 4), (2,)),
    ],
)
def test_commit_refuses_what_does_not_add_up(tokens: tuple, computed: tuple, counts: tuple) -> None:
    memory = Driver()
    ids = u64(memory.run("a", 4), memory.run("b", 4))
    refused = memory.fails(b.Commit(ids, i32(*tokens), i32(*computed), i32(*counts)))
    assert refused.status == OpStatus.INVALID_ARGUMENT


def test_commit_refuses_a_state_over_the_limit() -> None:
    memory = Driver()
    running = memory.run("a", 4)
    op = b.Commit(u64(running), i32(1), i32(4), states=[(running, bytes(4097))])
    assert "4097 bytes" in memory.fails(op).message


def test_a_column_that_its_caller_changes_afterwards_is_looked_up_anew() -> None:
    memory = Driver()
    first, second = memory.run("a", 4), memory.run("b", 4)
    ids = u64(first)
    memory.do(b.Commit(ids, i32(7), i32(4)))
    ids[0] = second
    memory.do(b.Commit(ids, i32(8), i32(4)))
    assert (memory.tokens(first)[-1], memory.tokens(second)[-1]) == (7, 8)


# --- forks ------------------------------------------------------------------------------


def test_b25_fork_without_rows_leaves_no_half_fork() -> None:
    memory = Driver(rows=2)
    parent = memory.run("a", 6)
    refused = memory.fails(b.Fork(parent, 2, i32(1, 2, 3)))
    assert refused.status == OpStatus.NO_FREE_SEQUENCES
    memory.fork(parent, 1, 1, 2)


def test_fork_needs_no_free_blocks() -> None:
    memory = Driver(num_blocks=2)
    parent = memory.run("a", 6)
    assert memory.memory.levels().num_free_blocks == 0
    children = memory.fork(parent, 3)
    assert memory.view(parent).ref_counts.tolist() == [4, 4]
    assert [memory.view(child).candidate for child in children] == [1, 2, 3]
    assert {memory.view(child).table_version for child in children} == {1}


def test_fork_with_tokens_gives_parent_and_children_one_each() -> None:
    memory = Driver()
    parent = memory.run("a", 2)
    memory.do(b.Commit(u64(parent), i32(), i32(2), i32(0), [(parent, b"scores")]))
    first, second = memory.fork(parent, 2, 7, 8, 9)
    assert {memory.scheduler_state(i) for i in (parent, first, second)} == {b"scores"}
    ends = [memory.tokens(i)[-1] for i in (parent, first, second)]
    assert ends == [7, 8, 9]


def test_fork_above_num_candidates_is_refused() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    memory.fork(parent, 2)
    refused = memory.fails(b.Fork(parent, 2))
    assert refused.status == OpStatus.INVALID_ARGUMENT
    assert "1 free candidate" in refused.message


def test_b23_a_pruned_beam_gives_its_number_back_and_a_finished_one_keeps_it() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    pruned, kept, _ = memory.fork(parent, 3)
    memory.do(b.Free([pruned]), b.Free([kept], FinishReason.STOP))
    [child] = memory.fork(parent)
    assert memory.view(child).candidate == 1
    assert memory.fails(b.Fork(parent, 1)).status == OpStatus.INVALID_ARGUMENT
    assert memory.fails(b.Free([pruned])).status == OpStatus.UNKNOWN_SEQUENCE
    assert memory.view(kept).finish_reason == FinishReason.STOP


# --- ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("forked", [False, True])
def test_b06_a_second_free_is_an_error_and_counts_stay_exact(forked: bool) -> None:
    memory = Driver()
    sequence_id = memory.run("a", 6)
    if forked:
        [sequence_id] = memory.fork(sequence_id)
    memory.do(b.Free([sequence_id], FinishReason.STOP))
    refused = memory.fails(b.Free([sequence_id], FinishReason.STOP))
    assert refused.status == OpStatus.INVALID_STATE
    assert f"sequence {sequence_id} is already finished" in refused.message
    assert memory.memory.levels().num_in_use_blocks == (2 if forked else 0)


def test_b06_one_free_that_names_a_sequence_twice_is_an_error() -> None:
    memory = Driver()
    running = memory.run("a", 6)
    assert memory.fails(b.Free([running, running])).status == OpStatus.INVALID_ARGUMENT


def test_b03_all_children_are_freed_at_once() -> None:
    memory = Driver(rows=9)
    family = [memory.run("a", 6)]
    family += memory.fork(family[0], 3)
    memory.do(b.Free(family, FinishReason.ABORT), b.Confirm("a"))
    assert memory.memory.levels().num_free_blocks == 8
    assert memory.memory.levels().num_free_sequences == 9


def test_b01_a_request_freed_before_admission_leaves_nothing() -> None:
    memory = Driver()
    before = memory.state()
    waiting = memory.arrive("a", 6)
    memory.do(b.Free([waiting], FinishReason.ABORT), b.Confirm("a"))
    assert memory.state() == before


def test_b13_preempt_takes_all_or_none_and_keeps_tokens() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    [child] = memory.fork(parent, 1, 7, 8)
    waiting = memory.arrive("b", 3)
    assert memory.fails(b.Preempt([parent, child, waiting])).status == OpStatus.INVALID_STATE
    memory.do(b.Preempt([parent, child]))
    assert memory.memory.levels().num_free_blocks == 8
    assert memory.tokens(child)[-1] == 8
    assert memory.view(child).num_computed_tokens == 0
    version = memory.view(child).table_version
    memory.do(b.Admit([b.AdmitMember(parent, 7), b.AdmitMember(child, 7, parent, 1)]))
    assert memory.view(child).table_version > version


@pytest.mark.parametrize("op", sorted(set(TRANSITIONS) - {"share from"}))
@pytest.mark.parametrize("status", list(Status))
def test_an_op_in_a_state_not_in_the_table_is_refused(op: str, status: Status) -> None:
    memory = Driver()
    sequence_id = memory.arrive("a", 6)
    if status != Status.WAITING:
        memory.do(b.Admit([b.AdmitMember(sequence_id, 6)]))
    if status == Status.FINISHED:
        memory.do(b.Free([sequence_id]))
    if status == Status.SWAPPED:
        memory.do(b.SwapOut([sequence_id]))
    ops: dict[str, b.Op] = {
        "admit": b.Admit([b.AdmitMember(sequence_id, 6)]),
        "commit": b.Commit(u64(sequence_id), i32(1), i32(0)),
        "reserve": b.Reserve(u64(sequence_id), i32(7)),
        "append": b.Append(sequence_id, i32(1)),
        "fork": b.Fork(sequence_id, 1),
        "preempt": b.Preempt([sequence_id]),
        "swap out": b.SwapOut([sequence_id]),
        "swap in": b.SwapIn([b.SwapInMember(sequence_id, 6)]),
        "free": b.Free([sequence_id]),
    }
    after = TRANSITIONS[op].get(status)
    if after is None:
        assert memory.fails(ops[op]).status == OpStatus.INVALID_STATE
    else:
        memory.do(ops[op])
        assert memory.view(sequence_id).status == after


def test_a_mistaken_op_leaves_the_others_of_its_batch_alone() -> None:
    memory = Driver()
    running = memory.run("a", 4)
    result = memory.send(
        b.Free([99]), b.Append(running, i32(7)), b.Fork(running, 9), b.Append(running, i32(8))
    )
    assert [one.status for one in result.results] == [
        OpStatus.UNKNOWN_SEQUENCE,
        OpStatus.OK,
        OpStatus.INVALID_ARGUMENT,
        OpStatus.OK,
    ]
    assert memory.tokens(running)[-2:] == [7, 8]


# --- quarantine -------------------------------------------------------------------------


def test_b04_a_freed_block_waits_for_the_newest_step_that_was_issued() -> None:
    memory = Driver(num_blocks=2)
    running = memory.run("a", 8)
    memory.step_id = 5
    memory.do(b.Free([running]))
    waiting = memory.arrive("b", 8)
    admit = b.Admit([b.AdmitMember(waiting, 8)])
    for memory.acknowledged in (1, 3):
        assert memory.send(admit).results[0].status == OpStatus.NO_FREE_BLOCKS
        assert memory.memory.levels().num_quarantined_blocks == 2
    memory.acknowledged = 4
    memory.do(admit)


def test_b04_a_preempted_block_waits_too() -> None:
    memory = Driver()
    running = memory.run("a", 8)
    memory.step_id = 3
    assert memory.do(b.Preempt([running])).levels.num_quarantined_blocks == 2


def test_b04_a_block_is_free_at_once_when_no_step_is_in_flight() -> None:
    memory = Driver(num_blocks=2)
    running, waiting = memory.run("a", 8), memory.arrive("b", 8)
    memory.step_id, memory.acknowledged = 5, 4
    memory.do(b.Free([running]), b.Admit([b.AdmitMember(waiting, 8)]))


def test_b04_both_ends_of_a_copy_wait_for_the_step_that_makes_it() -> None:
    memory = Driver()
    parent = memory.run("a", 6)
    memory.computed(parent, 6)
    [child] = memory.fork(parent)
    memory.step_id, memory.acknowledged = 5, 4
    memory.do(b.Reserve(u64(child), i32(7)))
    levels = memory.do(b.Free([parent, child])).levels
    assert (levels.num_free_blocks, levels.num_quarantined_blocks) == (6, 2)
    memory.step_id, memory.acknowledged = 6, 5
    assert memory.do().levels.num_free_blocks == 8


def test_a_step_that_will_never_be_issued_may_be_acknowledged() -> None:
    memory = Driver()
    running = memory.run("a", 8)
    memory.step_id = 5
    memory.do(b.Free([running]))
    memory.acknowledged = 5
    assert memory.do().levels.num_free_blocks == 8


def test_b10_a_block_that_somebody_holds_is_never_handed_out() -> None:
    memory = Driver(num_blocks=3)
    parent = memory.run("a", 8)
    [child] = memory.fork(parent)
    memory.do(b.Free([parent]))
    held = memory.table(child)
    other = memory.arrive("b", 8)
    admit = b.Admit([b.AdmitMember(other, 8)])
    assert memory.fails(admit).status == OpStatus.NO_FREE_BLOCKS
    one = b.Admit([b.AdmitMember(other, 4)])
    memory.do(one)
    assert not set(memory.table(other)) & set(held)


def test_b10_handing_out_a_block_with_references_is_a_bug_that_stops_everything() -> None:
    memory = Driver()
    memory.do(b.Free([memory.run("a", 8)]))
    memory.manager.pool.ref_counts[0] = 1
    waiting = (
        memory.gatekeeper.apply(memory.batch(b.Arrive("b", i32(*range(8)))), 0).results[0].value
    )
    assert isinstance(waiting, b.Arrived)
    with pytest.raises(AssertionError, match="still has references"):
        memory.gatekeeper.apply(memory.batch(b.Admit([b.AdmitMember(waiting.sequence_id, 8)])), 0)


# --- views ----------------------------------------------------------------------------


def test_views_stop_at_what_a_message_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Driver()
    ids = [memory.run(name, 8) for name in "abc"]
    monkeypatch.setattr(views, "MAX_VIEWED_BLOCKS", 4)
    shown, truncated = views.sequence_views(memory.manager, [], "", 100)
    assert ([view.sequence_id for view in shown], truncated) == (ids[:2], True)
    monkeypatch.setattr(views, "MAX_VIEWED_BLOCKS", 6)
    assert not views.sequence_views(memory.manager, [], "", 100)[1]


# --- the books --------------------------------------------------------------------------


def corrupt_free_list(memory: Driver) -> None:
    memory.manager.pool._put_back(i32(0))


def corrupt_ref_count(memory: Driver) -> None:
    memory.manager.pool.ref_counts[0] += 1


def corrupt_table(memory: Driver) -> None:
    memory.manager.sequences.tables[0, 0] = memory.manager.sequences.tables[0, 1]


def corrupt_count(memory: Driver) -> None:
    memory.manager.pool.num_in_use -= 1


def corrupt_length(memory: Driver) -> None:
    memory.manager.sequences.num_computed[0] = 30


def corrupt_sharing(memory: Driver) -> None:
    memory.manager.sequences.may_share[:] = False


def corrupt_record(memory: Driver) -> None:
    memory.manager.requests.clear()


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (corrupt_free_list, "is not 8"),
        (corrupt_count, "is not 8"),
        (corrupt_ref_count, "block 0 has ref_count 3 and 2"),
        (corrupt_table, "miscounted"),
        (corrupt_length, "more computed than slots"),
        (corrupt_sharing, "does not know it"),
        (corrupt_record, "different live sequences"),
    ],
)
def test_b08_books_that_do_not_balance_are_noticed(corrupt, says: str) -> None:
    memory = Driver()
    memory.fork(memory.run("a", 8))
    corrupt(memory)
    with pytest.raises(InvariantViolation, match=says):
        check_integrity(memory.manager)


def test_b08_levels_are_checked_with_every_batch() -> None:
    memory = Driver()
    memory.run("a", 8)
    corrupt_count(memory)
    with pytest.raises(InvariantViolation, match="is not 8"):
        memory.gatekeeper.apply(memory.batch(), 0)


def test_b08_everything_is_checked_when_the_memory_falls_idle() -> None:
    memory = Driver()
    running = memory.run("a", 8)
    corrupt_ref_count(memory)
    memory.gatekeeper.apply(memory.batch(b.Append(running, i32(1))), 0)
    with pytest.raises(InvariantViolation, match="block 0 has ref_count 1 and 0"):
        memory.gatekeeper.apply(memory.batch(b.Free([running])), 0)
