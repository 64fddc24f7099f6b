"""Where an answer ends: max_tokens, min_tokens, end-of-sequence and stop ids."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import FinishReason, SamplingParams
from tests.system.models import TINY_EOS, TINY_MAX_MODEL_LEN, TINY_NUM_TOKENS, Transformers
from tests.system.requests import greedy, token_prompt
from tests.system.stack import Stack

PROMPT = token_prompt(30, salt=5)


def sampled(seed: int, **more: Any) -> SamplingParams:
    # Nearly uniform over 258 ids, so that a stop id comes soon.
    fields: dict[str, Any] = {"temperature": 100.0, "seed": seed, "max_tokens": 400, **more}
    return SamplingParams(**fields)


@pytest.mark.parametrize("n", [1, 3, 64])
def test_max_tokens_one(tiny: Stack, n: int) -> None:
    with tiny.client() as client:
        answer = client.generate(PROMPT, SamplingParams(max_tokens=1, n=n, seed=4, ignore_eos=True))
        singles = [
            client.generate(
                PROMPT,
                SamplingParams(max_tokens=1, seed=4, first_sample_index=i, ignore_eos=True),
            ).candidates[0]
            for i in range(min(n, 3))
        ]
    assert len(answer.candidates) == n
    for candidate in answer.candidates:
        assert len(candidate.token_ids) == 1
        assert candidate.finish_reason is FinishReason.LENGTH
    assert [c.token_ids for c in answer.candidates[: len(singles)]] == [
        s.token_ids for s in singles
    ]
    tiny.wait_until_empty()


def test_max_tokens_absent_is_what_the_models_length_leaves(tiny: Stack) -> None:
    with tiny.client() as client:
        answer = client.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    assert len(answer.candidates[0].token_ids) == TINY_MAX_MODEL_LEN - len(PROMPT)
    assert answer.candidates[0].finish_reason is FinishReason.LENGTH


def test_an_end_of_sequence_token_ends_it_unless_ignored(tiny: Stack) -> None:
    with tiny.client() as client:
        ended = client.generate(PROMPT, sampled(1)).candidates[0]
        ignored = client.generate(PROMPT, sampled(1, ignore_eos=True)).candidates[0]
    assert ended.finish_reason is FinishReason.STOP
    assert ended.matched_stop is None
    assert ended.token_ids[-1] == TINY_EOS
    assert TINY_EOS not in ended.token_ids[:-1]
    # The same draws, and on past the end.
    assert ignored.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert len(ignored.token_ids) == 400
    assert ignored.finish_reason is FinishReason.LENGTH


def test_a_stop_token_id_ends_it_and_is_named(tiny: Stack, tiny_reference: Transformers) -> None:
    reference = tiny_reference.greedy(PROMPT, 64).token_ids
    stop = reference[20]
    expected = reference[: reference.index(stop) + 1]
    with tiny.client() as client:
        params = greedy(64, stop_token_ids=[stop, reference[-1]])
        candidate = client.generate(PROMPT, params).candidates[0]
    assert candidate.token_ids == expected
    assert candidate.finish_reason is FinishReason.STOP
    assert candidate.matched_stop == stop
    # The id that ended it is no part of the text.
    decoded = tiny_reference.tokenizer.decode(expected[:-1], skip_special_tokens=True)
    assert candidate.text == decoded


@pytest.mark.parametrize("min_tokens", [1, 7, 40])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b38_no_stop_id_before_min_tokens(tiny: Stack, min_tokens: int, ignore_eos: bool) -> None:
    stops = list(range(64))
    ids = {*stops} if ignore_eos else {*stops, TINY_EOS}
    with tiny.client() as client:
        params = sampled(2, n=4, stop_token_ids=stops, ignore_eos=ignore_eos, min_tokens=min_tokens)
        answer = client.generate(PROMPT, params)
        without = client.generate(PROMPT, sampled(2, n=4, stop_token_ids=stops))
    for candidate in answer.candidates:
        assert len(candidate.token_ids) > min_tokens
        assert not ids & set(candidate.token_ids[:-1])
        assert candidate.token_ids[-1] in ids
        assert candidate.finish_reason is FinishReason.STOP
    # One id in four is a stop, so without the minimum some end before it.
    assert min(len(candidate.token_ids) for candidate in without.candidates) <= min_tokens + 1
    tiny.wait_until_empty()


def test_min_tokens_holds_back_stop_strings_too(tiny: Stack, tiny_reference: Transformers) -> None:
    reference = tiny_reference.greedy(PROMPT, 64)
    text = tiny_reference.tokenizer.decode(reference.token_ids)
    early = next(char for char in text[:20] if char.isascii() and char.isprintable())
    with tiny.client() as client:
        at_once = client.generate(PROMPT, greedy(64, stop=early)).candidates[0]
        later = client.generate(PROMPT, greedy(64, stop=early, min_tokens=40)).candidates[0]
    assert at_once.finish_reason is FinishReason.STOP
    assert len(at_once.token_ids) < 40 <= len(later.token_ids)
    assert later.text.startswith(at_once.text + early)


def test_b34_no_id_beyond_the_tokenizer_is_drawn(tiny: Stack) -> None:
    with tiny.client() as client:
        answer = client.generate(PROMPT, sampled(3, n=16, max_tokens=100, ignore_eos=True))
        drawn = {token for candidate in answer.candidates for token in candidate.token_ids}
        # It can be read: the model has an embedding for it.
        client.generate((TINY_NUM_TOKENS, TINY_NUM_TOKENS + 1), greedy(2))
    assert max(drawn) < TINY_NUM_TOKENS
    assert len(drawn) > 200


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_p": 1e-8},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": 1e-7},
    ],
    ids=str,
)
def test_b36_the_narrowest_filters_are_greedy(
    tiny: Stack, tiny_reference: Transformers, params: dict[str, Any]
) -> None:
    reference = tiny_reference.greedy(PROMPT, 64)
    with tiny.client() as client:
        answer = client.generate(
            PROMPT, SamplingParams(**params, seed=1, max_tokens=64, ignore_eos=True)
        )
    assert reference.disagreement(answer.candidates[0].token_ids) is None


@pytest.mark.parametrize("params", [{"top_k": 0}, {"top_k": -1}, {"top_k": 300}, {"top_p": 1.0}])
def test_b36_filters_that_filter_nothing(tiny: Stack, params: dict[str, Any]) -> None:
    with tiny.client() as client:
        plain = client.generate(PROMPT, sampled(9, max_tokens=50, ignore_eos=True))
        same = client.generate(PROMPT, sampled(9, max_tokens=50, ignore_eos=True, **params))
    assert same.candidates[0].token_ids == plain.candidates[0].token_ids
