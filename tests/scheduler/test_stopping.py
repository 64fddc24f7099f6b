"""Stop strings and finish reasons: nothing leaks, nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.stopping import FinishReason, StopChecker, StopStrings


class Letters:
    """A text stream whose token ids are code points; a negative one holds back a byte."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        if token_id < 0:
            self._held = "?"
            return ""
        return chr(token_id)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def expected_text(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Cut at the stop string that is complete first; among those, the one that begins first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    text=st.text(alphabet="abc", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=20),
)
def test_b29_where_the_pieces_are_cut_does_not_matter(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopStrings(tuple(stops))
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, found = "", None
    for start, end in itertools.pairwise(bounds):
        more, found = finder.push(text[start:end])
        shown += more
        if found:
            break
    if not found:
        shown += finder.flush()
    assert (shown, found is not None) == expected_text(text, tuple(stops))


@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_b29_nothing_of_a_stop_string_is_ever_shown(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopStrings(tuple(stops))
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for start, end in itertools.pairwise(bounds):
        more, found = finder.push(text[start:end])
        shown += more
        assert not any(stop in shown for stop in stops)
        if found:
            assert text.startswith(shown + found)
            return
    assert shown + finder.flush() == text
    assert not any(stop in text for stop in stops)


def checker(eos: tuple[int, ...] = (0,), **params: object) -> StopChecker:
    return StopChecker(SamplingParams(**{"max_tokens": 100, **params}), eos, Letters())  # type: ignore[arg-type]


def test_eos_ends_without_text() -> None:
    judge = checker()
    assert judge.judge(ord("a")).text == "a"
    last = judge.judge(0)
    assert (last.text, last.finish_reason, last.matched_stop) == ("", FinishReason.STOP, None)


def test_ignore_eos_goes_on_until_max_tokens() -> None:
    judge = checker(ignore_eos=True, max_tokens=3, eos=(ord("x"),))
    assert judge.judge(ord("x")).finish_reason is None
    assert judge.judge(ord("y")).finish_reason is None
    assert judge.judge(ord("z")).finish_reason is FinishReason.LENGTH


def test_stop_token_id_is_reported() -> None:
    last = checker(stop_token_ids=(7,)).judge(7)
    assert (last.finish_reason, last.matched_stop, last.text) == (FinishReason.STOP, 7, "")


def test_b38_min_tokens_counts_output_tokens_for_every_kind_of_stop() -> None:
    judge = checker(min_tokens=3, stop_token_ids=(7,), stop=("bb",))
    assert judge.judge(0).finish_reason is None
    assert judge.judge(7).finish_reason is None
    assert judge.judge(0).finish_reason is FinishReason.STOP


def test_stop_string_before_min_tokens_is_plain_text() -> None:
    judge = checker(min_tokens=3, stop=("ab",))
    shown = [judge.judge(ord(c)) for c in "abxab"]
    assert [j.finish_reason for j in shown[:4]] == [None] * 4
    assert shown[4].finish_reason is FinishReason.STOP
    assert "".join(j.text for j in shown) == "abx"


def test_b29_held_text_is_flushed_at_the_end() -> None:
    judge = checker(stop=("abc",), max_tokens=2)
    assert judge.judge(ord("a")).text == ""
    last = judge.judge(ord("b"))
    assert (last.text, last.finish_reason) == ("ab", FinishReason.LENGTH)


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_b30_unfinished_bytes_are_flushed_at_the_end(stops: tuple[str, ...]) -> None:
    judge = checker(stop=stops, max_tokens=2)
    assert judge.judge(ord("a")).text == "a"
    assert judge.judge(-1).text == "?"


def test_held_text_comes_out_when_a_sequence_is_ended() -> None:
    judge = checker(stop=("abc",))
    judge.judge(ord("a"))
    assert judge.end() == "a"


def test_held_text_comes_out_before_an_end_of_sequence_token() -> None:
    judge = checker(stop=("abc",))
    judge.judge(ord("a"))
    last = judge.judge(0)
    assert (last.text, last.finish_reason, last.matched_stop) == ("a", FinishReason.STOP, None)


@pytest.mark.parametrize("last_token", [0, 7, None])
def test_b29_a_stop_string_that_the_held_bytes_complete_is_not_shown(
    last_token: int | None,
) -> None:
    """Bytes may be held until the very end, whatever that is."""
    judge = checker(stop=("a?",), stop_token_ids=(7,))
    assert judge.judge(ord("x")).text == "x"
    assert judge.judge(ord("a")).text == ""
    assert judge.judge(-1).text == ""
    if last_token is None:
        assert judge.end() == ""
        return
    last = judge.judge(last_token)
    assert (last.text, last.finish_reason, last.matched_stop) == ("", FinishReason.STOP, "a?")
