"""Bad input fails that request alone, with a sentence that helps; nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from octavo import (
    AlreadyExistsError,
    Client,
    InvalidArgumentError,
    Message,
    NotFoundError,
    OctavoError,
    SamplingParams,
)
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.system.models import Transformers
from tests.system.requests import Bystander, greedy, token_prompt
from tests.system.stack import Stack

MODEL_LEN = 512  # of the tiny model
SMALL_POOL_TOKENS = 480


def sampled(**params: Any) -> Callable[[Client], object]:
    return lambda client: client.generate((1, 2, 3), SamplingParams(**params))


def prompted(*token_ids: int, max_tokens: int = 1) -> Callable[[Client], object]:
    return lambda client: client.generate(token_ids, greedy(max_tokens))


REFUSED = {
    "empty prompt": (prompted(), "0 tokens"),
    "negative id": (prompted(1, -5), "-5"),
    "id of the vocabulary's size": (prompted(1, 2, 10**6), "1000000"),
    "max_tokens 0": (sampled(max_tokens=0), "max_tokens is 0"),
    "temperature NaN": (sampled(temperature=math.nan), "temperature is nan"),
    "temperature infinite": (sampled(temperature=math.inf), "[0.0, 100.0]"),
    "temperature negative": (sampled(temperature=-0.1), "temperature is -0.1"),
    "top_p 0": (sampled(top_p=0.0), "(0.0, 1.0]"),
    "top_k -2": (sampled(top_k=-2), "top_k is -2"),
    "min_p above 1": (sampled(min_p=1.5), "min_p is 1.5"),
    "n 0": (sampled(n=0), "n is 0"),
    "n 65": (sampled(n=65), "n is 65"),
    "17 stops": (sampled(stop=tuple("abcdefghijklmnopq")), "17 stop strings"),
    "stop id": (sampled(stop_token_ids=(10**6,)), "stop_token_ids[0] is 1000000"),
    "min over max": (sampled(max_tokens=2, min_tokens=3), "min_tokens is 3"),
    "prompt of the model's length": (prompted(*token_prompt(MODEL_LEN)), f"attends to {MODEL_LEN}"),
    "prompt over it": (prompted(*token_prompt(MODEL_LEN + 1)), f"{MODEL_LEN + 1} tokens"),
    "prompt + max_tokens over it": (
        prompted(*token_prompt(MODEL_LEN - 1), max_tokens=2),
        "may be at most 1 here",
    ),
}


def test_b33_b34_b36_b39_bad_input_is_refused_and_nobody_else_notices(
    tiny: Stack, tiny_reference: Transformers
) -> None:
    with Bystander(tiny, tiny_reference), tiny.client() as client:
        for name, (ask, said) in REFUSED.items():
            with pytest.raises(InvalidArgumentError) as caught:
                ask(client)
            assert said in caught.value.message, (name, caught.value.message)
    tiny.wait_until_empty()


def test_b33_one_token_fits_after_the_longest_prompt(tiny: Stack) -> None:
    with tiny.client() as client:
        answer = client.generate(token_prompt(MODEL_LEN - 1), greedy(1))
    assert len(answer.candidates[0].token_ids) == 1


def test_b40_a_prompt_over_the_pool(small: Stack) -> None:
    with small.client() as client:
        with pytest.raises(InvalidArgumentError, match="the pool has 30") as caught:
            client.generate(token_prompt(SMALL_POOL_TOKENS + 1), greedy(1))
        assert caught.value.reason == "PROMPT_EXCEEDS_POOL"
        assert client.generate(token_prompt(SMALL_POOL_TOKENS), greedy(1)).candidates
    small.wait_until_empty()


def test_b02_two_live_requests_with_one_id(tiny: Stack, tiny_reference: Transformers) -> None:
    expected = tiny_reference.greedy(token_prompt(9), 200)
    with tiny.client() as client:
        stream = client.stream(token_prompt(9), greedy(200), request_id="twice")
        tokens = list(next(stream).candidates)
        with pytest.raises(AlreadyExistsError, match="twice"):
            client.generate((1, 2), greedy(2), request_id="twice")
        for chunk in stream:
            tokens.extend(chunk.candidates)
        received = tuple(token for candidate in tokens for token in candidate.token_ids)
        assert not expected.disagreement(received)
        # Delivered and gone: the name is free again.
        tiny.wait_until_empty()
        assert client.generate((1, 2), greedy(2), request_id="twice").candidates


def test_unknown_model_and_unknown_request(tiny: Stack) -> None:
    stub = inference_pb2_grpc.InferenceStub(tiny.channel())
    request = inference_pb2.GenerateRequest(model="gpt-99", prompt="x")
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=10))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert "gpt-99" in caught.value.details()  # type: ignore[attr-defined]
    with tiny.client() as client:
        assert client.abort("nobody") is False
    assert issubclass(NotFoundError, OctavoError)


def test_b32_chat_without_a_template(tiny: Stack) -> None:
    with tiny.client() as client, pytest.raises(InvalidArgumentError, match="no chat template"):
        client.chat([Message("user", "hello")])


def test_a_request_with_nothing_in_it(tiny: Stack) -> None:
    stub = inference_pb2_grpc.InferenceStub(tiny.channel())
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(inference_pb2.GenerateRequest(), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
