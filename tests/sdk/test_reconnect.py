"""Whether, where and when a failed call is tried again: the policy by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest

from octavo._reconnect import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_HINTED_ADDRESSES,
    Addresses,
    Failure,
    Patience,
    Reconnect,
    Round,
)
from octavo.errors import DeadlineExceededError, OctavoError, class_of_code
from octavo.service.errors import REASONS

A, B, C = "unix:/a", "unix:/b", "unix:/c"
RETRIED = {"NOT_READY", "NOT_LEADER", "DRAINING", "KVMEM_LOST", "WORKER_LOST", "JOURNAL_FAILED"}
RETRIED_ONCE_ACCEPTED = {"QUEUE_FULL", "TENANT_QUOTA"}


def told(reason: str, holder_address: str = "", retry_after_ms: int | None = None) -> Failure:
    cls = class_of_code(REASONS[reason].code)
    error = cls("said so", reason=reason, retry_after_ms=retry_after_ms)
    return Failure(error, told=True, holder_address=holder_address)


def not_leader(holder_address: str) -> Failure:
    return told("NOT_LEADER", holder_address)


LOST = told("KVMEM_LOST")
LATE = Failure(DeadlineExceededError("late", reason="DEADLINE_EXCEEDED"))


def reconnect(
    *addresses: str, timeout_s: float = 600.0, connect_timeout_s: float = 5.0, draw: float = 0.0
) -> Reconnect:
    known = Addresses(addresses or (A,))
    return Reconnect(known, Patience(timeout_s, connect_timeout_s), 100.0, lambda: draw)


@pytest.mark.parametrize("reason", sorted(REASONS))
@pytest.mark.parametrize("accepted", [False, True])
def test_which_reasons_are_retried(reason: str, accepted: bool) -> None:
    retried = reason in RETRIED or (accepted and reason in RETRIED_ONCE_ACCEPTED)
    assert told(reason).is_retried(accepted=accepted) is retried


def test_a_stream_cut_short_is_retried_whatever_its_error() -> None:
    error = OctavoError("half", reason="INTERNAL")
    assert Failure(error, cut_short=True).is_retried(accepted=True)
    assert not Failure(error).is_retried(accepted=True)


BROKEN = Failure(class_of_code(REASONS["NOT_READY"].code)("socket closed", reason="UNAVAILABLE"))
REPLACED = told("ATTACH_REPLACED")
CUT_SHORT = Failure(OctavoError("half", reason="INTERNAL"), cut_short=True)


def test_an_attempt_that_nobody_answered_may_come_late_and_take_the_request_once() -> None:
    attempts = reconnect(A, B)
    assert attempts.after(BROKEN, accepted=False, now_s=100.0) is not None
    attempts.answered(progress=True)
    at = attempts.address
    assert attempts.after(REPLACED, accepted=True, now_s=100.0) == FIRST_BACKOFF_S / 2
    assert attempts.address == at  # it is there
    attempts.answered(progress=True)
    assert attempts.after(REPLACED, accepted=True, now_s=100.0) is None
    assert not attempts.out_of_time


@pytest.mark.parametrize("failure", [LOST, CUT_SHORT])
def test_an_attempt_that_a_server_ended_cannot_come_late(failure: Failure) -> None:
    attempts = reconnect()
    attempts.after(failure, accepted=True, now_s=100.0)
    assert attempts.after(REPLACED, accepted=True, now_s=100.0) is None


def test_an_attempt_that_a_server_replied_to_cannot_come_late() -> None:
    attempts = reconnect()
    attempts.answered(progress=True)
    attempts.after(BROKEN, accepted=True, now_s=100.0)
    assert attempts.after(REPLACED, accepted=True, now_s=100.0) is None


def test_two_with_one_secret_stop_taking_the_request_from_each_other() -> None:
    """Both lost attempts before; each replacement is told to the one that had the request."""
    rivals = [reconnect(), reconnect()]
    for rival in rivals:
        for _ in range(3):
            rival.after(BROKEN, accepted=False, now_s=100.0)
        rival.answered(progress=True)
    turns = 0
    while rivals[turns % 2].after(REPLACED, accepted=True, now_s=100.0) is not None:
        rivals[turns % 2].answered(progress=True)
        turns += 1
    assert turns == 6


def test_a_replaced_attempt_that_runs_out_of_time_says_so() -> None:
    attempts = reconnect(timeout_s=1.0)
    attempts.after(BROKEN, accepted=True, now_s=100.0)
    assert attempts.after(REPLACED, accepted=True, now_s=101.0) is None
    assert attempts.out_of_time


@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_the_backoff_starts_small_doubles_and_is_bounded(draw: float) -> None:
    attempts = reconnect(draw=draw)
    delays = [attempts.after(LOST, accepted=True, now_s=100.0) for _ in range(12)]
    assert all(delay is not None and 0 < delay <= MAX_BACKOFF_S for delay in delays)
    numbers = [delay or 0.0 for delay in delays]
    assert FIRST_BACKOFF_S / 2 <= numbers[0] <= FIRST_BACKOFF_S
    assert all(later == pytest.approx(2 * earlier) for earlier, later in pairwise(numbers[:4]))
    assert numbers[-1] >= MAX_BACKOFF_S / 2


def test_the_delay_is_drawn() -> None:
    low, high = (
        reconnect(draw=draw).after(LOST, accepted=True, now_s=100.0) for draw in (0.0, 0.9)
    )
    assert low is not None
    assert high is not None
    assert low < high


def test_several_servers_are_asked_before_the_backoff_grows() -> None:
    attempts = reconnect(A, B, C)
    asked = [attempts.address]
    delays = []
    for _ in range(6):
        delays.append(attempts.after(LOST, accepted=True, now_s=100.0))
        asked.append(attempts.address)
    assert asked == [A, B, C, A, B, C, A]
    assert delays[:3] == [FIRST_BACKOFF_S / 2] * 3
    assert delays[3:] == [FIRST_BACKOFF_S] * 3


def test_progress_starts_the_backoff_over_and_an_empty_answer_does_not() -> None:
    attempts = reconnect()
    first = attempts.after(LOST, accepted=True, now_s=100.0)
    attempts.answered(progress=False)
    second = attempts.after(LOST, accepted=True, now_s=100.0)
    attempts.answered(progress=True)
    assert first != second
    assert attempts.after(LOST, accepted=True, now_s=100.0) == first
    assert attempts.num_reconnects == 3


def test_it_goes_to_the_holder_at_once_but_not_in_a_circle_without_waiting() -> None:
    attempts = reconnect(A, B)
    assert attempts.after(not_leader(C), accepted=True, now_s=100.0) == 0.0
    assert attempts.address == C
    assert attempts.after(not_leader(A), accepted=True, now_s=100.0) == FIRST_BACKOFF_S / 2
    assert attempts.address == A
    attempts.answered(progress=True)
    assert attempts.after(not_leader(B), accepted=True, now_s=100.0) == 0.0


@pytest.mark.parametrize("hint", ["", A, "nonsense", "unix:/" + "x" * 200])
def test_a_holder_nobody_can_go_to_is_like_none(hint: str) -> None:
    attempts = reconnect(A, B)
    assert attempts.after(not_leader(hint), accepted=True, now_s=100.0) == FIRST_BACKOFF_S / 2
    assert attempts.address == B


def test_only_so_many_unknown_holders_are_believed() -> None:
    attempts = reconnect(A)
    for number in range(MAX_HINTED_ADDRESSES):
        attempts.after(not_leader(f"unix:/{number}"), accepted=True, now_s=100.0)
        assert attempts.address == f"unix:/{number}"
    attempts.after(not_leader("unix:/more"), accepted=True, now_s=100.0)
    assert attempts.address == A


@pytest.mark.parametrize(
    ("accepted", "now_s", "goes_on"),
    [(False, 104.9, True), (False, 105.0, False), (True, 699.9, True), (True, 700.0, False)],
)
def test_how_long_it_is_tried(accepted: bool, now_s: float, goes_on: bool) -> None:
    delay = reconnect().after(LOST, accepted=accepted, now_s=now_s)
    assert (delay is not None) is goes_on


def test_the_time_to_connect_is_part_of_the_whole() -> None:
    attempts = reconnect(timeout_s=1.0)
    assert attempts.time_left_s(100.25) == 0.75
    assert attempts.after(LOST, accepted=False, now_s=101.0) is None


def test_a_full_queue_is_waited_for_as_long_as_it_says() -> None:
    full = told("QUEUE_FULL", retry_after_ms=1500)
    assert reconnect().after(full, accepted=True, now_s=100.0) == 1.5
    assert reconnect().after(full, accepted=False, now_s=100.0) is None


def test_a_deadline_that_passed_unanswered_is_told_by_what_went_wrong_before() -> None:
    attempts = reconnect()
    assert attempts.told_of(LATE) is LATE
    attempts.after(LOST, accepted=True, now_s=100.0)
    assert attempts.told_of(LATE) is LOST
    attempts.answered(progress=False)
    assert attempts.told_of(LATE) is LATE


def test_the_next_call_begins_where_the_last_was_answered() -> None:
    known = Addresses([A, B, C])
    attempts = Reconnect(known, Patience(600.0, 5.0), 100.0, lambda: 0.0)
    attempts.after(LOST, accepted=False, now_s=100.0)
    attempts.answered(progress=True)
    assert known.in_turn() == [B, A, C]
    assert Reconnect(known, Patience(600.0, 5.0), 100.0, lambda: 0.0).address == B


# ---- unary calls ----


def ask(round_: Round[int], replies: dict[str, int | Failure]) -> list[str]:
    asked = []
    for address in round_:
        asked.append(address)
        reply = replies[address]
        if isinstance(reply, Failure):
            round_.failed(reply)
        else:
            round_.answered(reply)
    return asked


def new_round(*addresses: str) -> Round[int]:
    return Round(Addresses(addresses), lambda reply: reply > 0, deadline_s=110.0)


def test_the_first_settling_reply_is_taken() -> None:
    round_ = new_round(A, B, C)
    assert ask(round_, {A: LOST, B: 7}) == [A, B]
    assert round_.result() == 7


def test_a_reply_that_settles_nothing_is_kept_while_others_are_asked() -> None:
    round_ = new_round(A, B, C)
    assert ask(round_, {A: 0, B: LOST, C: -1}) == [A, B, C]
    assert round_.result() == 0


def test_what_a_server_said_is_raised_rather_than_that_another_is_not_there() -> None:
    gone = Failure(class_of_code(REASONS["NOT_READY"].code)("refused", reason="UNAVAILABLE"))
    for replies in ({A: gone, B: LOST}, {A: LOST, B: gone}):
        round_ = new_round(A, B)
        assert ask(round_, dict(replies)) == [A, B]
        with pytest.raises(OctavoError, match="said so"):
            round_.result()


def test_an_error_that_means_no_ends_the_round() -> None:
    round_ = new_round(A, B)
    assert ask(round_, {A: told("UNKNOWN_MODEL"), B: 1}) == [A]
    with pytest.raises(OctavoError, match="said so"):
        round_.result()


def test_the_holder_is_asked_next_and_nobody_twice() -> None:
    round_ = new_round(A, B, C)
    replies = {A: not_leader("unix:/d"), "unix:/d": not_leader(A), B: not_leader(C), C: 1}
    assert ask(round_, replies) == [A, "unix:/d", B, C]


def test_one_that_hangs_leaves_time_for_the_others() -> None:
    round_ = new_round(A, B)
    for address in round_:
        assert round_.timeout_s(100.0) == (5.0 if address == A else 10.0)
        round_.failed(LATE)
