"""Parameters: bad input gets an error with the value and the range; the bounds are exact."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.params import (
    RANGES,
    InvalidRequestError,
    ModelLimits,
    SamplingParams,
    resolve,
)

LIMITS = ModelLimits(
    max_model_len=128, vocab_size=1000, num_blocks=6, block_size=16, max_num_seqs=8
)


def resolved(
    prompt: int | tuple[int, ...] = 4, max_tokens: int | None = 4, **params: object
) -> SamplingParams:
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    return resolve(
        SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        prompt_token_ids=tokens,
        limits=LIMITS,
    )


def refusal(*args: object, **kwargs: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        resolved(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, 1e300])
def test_b39_floats_outside_their_range(name: str, value: float) -> None:
    error = refusal(**{name: value})
    assert error.reason == "INVALID_PARAMETER"
    assert name in error.message
    assert str(value) in error.message
    assert str(RANGES[name]) in error.message


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0.0, 100.0),
        ("top_p", 1e-8, 1.0),
        ("min_p", 0.0, 1.0),
        ("top_k", -1, 2**31 - 1),
        ("seed", 0, 2**64 - 1),
        ("n", 1, 8),
        ("first_sample_index", 0, 2**31 - 1),
    ],
)
def test_b36_b39_bounds_are_allowed(name: str, low: float, high: float) -> None:
    for value in (low, high):
        given: dict[str, Any] = {name: value}
        assert getattr(resolved(**given), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.0), ("top_k", -2), ("n", 0), ("n", 9), ("n", 65), ("seed", -1), ("seed", 2**64)],
)
def test_b39_one_beyond_is_refused(name: str, value: float) -> None:
    error = refusal(**{name: value})
    assert f"{name} is {value}" in error.message


def test_max_tokens_bounds() -> None:
    assert "max_tokens is 0" in refusal(max_tokens=0).message
    assert resolved(max_tokens=1).max_tokens == 1
    assert resolved(prompt=28, max_tokens=100).max_tokens == 100
    assert "at most 100" in refusal(prompt=28, max_tokens=101).message
    assert resolved(prompt=28, max_tokens=None).max_tokens == 100


def test_min_tokens_above_max_tokens() -> None:
    assert "[0, 4]" in refusal(min_tokens=5).message


@pytest.mark.parametrize(("length", "fits"), [(95, True), (96, True), (97, False)])
def test_b40_prompt_against_the_pool(length: int, fits: bool) -> None:
    if fits:
        resolved(prompt=length)
    else:
        error = refusal(prompt=length)
        assert error.reason == "PROMPT_EXCEEDS_POOL"
        assert "7 KV blocks; the pool has 6" in error.message


@pytest.mark.parametrize(("length", "fits"), [(127, True), (128, False), (129, False)])
def test_b33_prompt_against_the_model(length: int, fits: bool) -> None:
    limits = replace(LIMITS, num_blocks=100)

    def attempt() -> SamplingParams:
        return resolve(
            SamplingParams(),
            max_tokens=1,
            prompt_token_ids=tuple(range(length)),
            limits=limits,
        )

    if fits:
        assert attempt().max_tokens == 1
    else:
        with pytest.raises(InvalidRequestError) as caught:
            attempt()
        assert caught.value.reason == "PROMPT_TOO_LONG"
        assert "at most 127" in caught.value.message


def test_empty_prompt() -> None:
    assert refusal(prompt=()).reason == "EMPTY_PROMPT"


@pytest.mark.parametrize("token", [-1, 1000, 2**31 - 1])
def test_b34_foreign_token_ids(token: int) -> None:
    error = refusal(prompt=(1, token, 2))
    assert error.reason == "TOKEN_OUT_OF_VOCABULARY"
    assert f"prompt_token_ids[1] is {token}" in error.message
    assert "0 to 999" in error.message
    assert refusal(stop_token_ids=(token,)).reason == "TOKEN_OUT_OF_VOCABULARY"


def test_stop_strings() -> None:
    assert resolved(stop=("x",) * 16).stop == ("x",) * 16
    assert "17 stop strings" in refusal(stop=("x",) * 17).message
    assert "0 characters" in refusal(stop=("",)).message
    assert "257 characters" in refusal(stop=("x" * 257,)).message
