"""Arrive of requests that another life of the memory service knew; and scheduler_state."""

from __future__ import annotations

import dataclasses

import pytest

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.views import AdoptedSequence, adopted_requests
from tests.kvmem.driver import Driver, i32, u64

STOP, LENGTH = b.FinishReason.STOP, b.FinishReason.LENGTH
PROMPT = i32(1, 2, 3)


def again(*candidates: b.ArrivingCandidate, name: str = "r") -> b.Arrive:
    return b.Arrive(name, PROMPT, 4, candidates=candidates)


def candidate(
    number: int, *output: int, reason: int = 0, state: bytes = b""
) -> b.ArrivingCandidate:
    return b.ArrivingCandidate(number, i32(*output), reason, state)


def arrived(driver: Driver, op: b.Arrive) -> b.Arrived:
    value = driver.do(op).results[0].value
    assert isinstance(value, b.Arrived)
    return value


def adopted(driver: Driver) -> dict[int, AdoptedSequence]:
    [request] = adopted_requests(driver.manager)
    return {one.candidate: one for one in request.sequences}


def test_a_request_comes_back_with_what_its_candidates_had() -> None:
    driver = Driver()
    value = arrived(
        driver,
        again(
            candidate(2, 7, 8, state=b"12345678"),
            candidate(0, 9, reason=STOP, state=b"score"),
            candidate(3),
        ),
    )
    ids = value.candidate_sequence_ids
    assert value.sequence_id == ids[0]
    assert len(set(ids)) == 3
    found = adopted(driver)
    assert [found[number].sequence_id for number in (2, 0, 3)] == ids
    assert [found[number].output_token_ids.tolist() for number in (2, 0, 3)] == [[7, 8], [9], []]
    assert [found[number].scheduler_state for number in (2, 0, 3)] == [b"12345678", b"score", b""]
    statuses = [found[number].status for number in (2, 0, 3)]
    assert statuses == [Status.WAITING, Status.FINISHED, Status.WAITING]
    assert found[0].finish_reason == STOP
    assert driver.memory.levels().num_free_sequences == 6
    # It goes on as any other: blocks, a fork into the number that is free, an end.
    driver.do(b.Admit([b.AdmitMember(ids[0], 5), b.AdmitMember(ids[2], 3)]))
    assert driver.view(driver.fork(ids[0])[0]).candidate == 1
    assert driver.fails(b.Free([ids[1]])).status == OpStatus.INVALID_STATE
    assert driver.fails(b.Arrive("r", PROMPT)).status == OpStatus.ALREADY_EXISTS


def test_one_whose_candidates_have_all_ended_needs_no_room() -> None:
    driver = Driver(rows=1)
    driver.arrive("other", 2)
    value = arrived(driver, again(candidate(0, 5, reason=STOP), candidate(1, reason=LENGTH)))
    assert [one.prompt_token_ids.tolist() for one in adopted_requests(driver.manager)][1] == [
        1,
        2,
        3,
    ]
    another = arrived(driver, again(candidate(0, reason=STOP), name="s"))
    assert another.sequence_id not in value.candidate_sequence_ids
    driver.do(b.Confirm("r"), b.Confirm("s"))
    assert not driver.manager.sequences.finished


def test_all_candidates_arrive_or_none() -> None:
    driver = Driver(rows=3)
    driver.arrive("other", 2)
    three = again(candidate(0), candidate(1), candidate(2))
    assert driver.fails(three).status == OpStatus.NO_FREE_SEQUENCES
    arrived(driver, again(candidate(0), candidate(1), candidate(2, reason=STOP)))
    assert driver.memory.levels().num_free_sequences == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([candidate(4)], "candidate 4 is not in 0 .. 3"),
        ([candidate(1), candidate(0), candidate(1)], "candidate 1 is named twice"),
        ([candidate(1, -1)], "token id -1 is negative"),
        ([candidate(1, *range(31))], "candidate 1 has 34 tokens, at most 33 are possible"),
        ([candidate(1, *range(31), reason=STOP)], "candidate 1 has 34 tokens"),
        ([candidate(1, reason=9)], "candidate 1: there is no finish_reason 9"),
        ([candidate(1, state=b"x" * 4097)], "scheduler_state of candidate 1 has 4097 bytes"),
    ],
)
def test_a_candidate_that_cannot_be_refuses_the_request(
    bad: list[b.ArrivingCandidate], says: str
) -> None:
    driver = Driver()
    result = driver.fails(again(candidate(2, 5, state=b"x" * 4096), *bad))
    assert result.status == OpStatus.INVALID_ARGUMENT
    assert says in result.message
    longest = again(candidate(0, *range(30)), candidate(1, *range(30), reason=STOP))
    assert len(arrived(driver, longest).candidate_sequence_ids) == 2


# --- scheduler_state --------------------------------------------------------------------


def words(driver: Driver, sequence_ids: list[int], *values: int) -> b.Commit:
    """A Commit of no tokens with a word for each."""
    computed = [driver.view(i).num_computed_tokens for i in sequence_ids]
    none = [0] * len(sequence_ids)
    return b.Commit(u64(*sequence_ids), i32(), i32(*computed), i32(*none), state_words=u64(*values))


def test_a_word_is_the_scheduler_state_as_8_little_endian_bytes() -> None:
    driver = Driver()
    first, second, third = driver.run("a", 2), driver.arrive("b", 2), driver.run("c", 2)
    driver.do(words(driver, [second, first], 0, 2**63 + 1))
    assert driver.scheduler_state(second) == bytes(8)  # zero is a word too
    assert driver.scheduler_state(first) == b"\x01" + bytes(6) + b"\x80"
    assert driver.scheduler_state(third) == b""


def test_words_and_long_states_replace_each_other() -> None:
    driver = Driver()
    running = driver.run("a", 2)
    long = b.Commit(u64(running), i32(), i32(2), i32(0), [(running, b"much longer")])
    driver.do(long)
    driver.do(words(driver, [running], 5))
    assert driver.scheduler_state(running) == b"\x05" + bytes(7)
    driver.do(long)
    assert driver.scheduler_state(running) == b"much longer"
    driver.do(dataclasses.replace(long, state_words=u64(6)))  # in one op the long one counts
    assert driver.scheduler_state(running) == b"much longer"
    driver.do(dataclasses.replace(long, states=[(running, b"")]))
    assert driver.scheduler_state(running) == b""
    assert not driver.manager.sequences.long_states


def test_a_state_ends_with_its_sequence() -> None:
    driver = Driver(rows=2)
    first, second = driver.run("a", 2), driver.run("b", 2)
    driver.do(words(driver, [first], 5))
    driver.do(b.Commit(u64(second), i32(), i32(2), i32(0), [(second, b"longer")]))
    driver.do(b.Free([first, second], STOP))
    kept = [driver.manager.sequences.finished[i].scheduler_state for i in (first, second)]
    assert kept == [b"\x05" + bytes(7), b"longer"]
    assert driver.scheduler_state(driver.arrive("c", 1)) == b""
    assert driver.scheduler_state(driver.arrive("d", 1)) == b""


def test_a_fork_hands_the_state_down_or_gives_each_its_own_word() -> None:
    driver = Driver()
    parent = driver.run("a", 2)
    driver.do(words(driver, [parent], 5))
    [heir] = driver.fork(parent)
    assert driver.scheduler_state(heir) == driver.scheduler_state(parent) == b"\x05" + bytes(7)
    value = driver.do(b.Fork(parent, 2, state_words=u64(1, 2, 3))).results[0].value
    assert isinstance(value, b.Forked)
    states = [driver.scheduler_state(i)[0] for i in (parent, *value.child_sequence_ids)]
    assert states == [1, 2, 3]
    assert driver.scheduler_state(heir)[0] == 5


def test_words_that_are_too_few_or_too_many_are_refused() -> None:
    driver = Driver()
    parent = driver.run("a", 2)
    for op in (words(driver, [parent], 1, 2), b.Fork(parent, 1, state_words=u64(1))):
        result = driver.fails(op)
        assert result.status == OpStatus.INVALID_ARGUMENT
        assert "state_words" in result.message
