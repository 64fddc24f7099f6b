"""What cannot be served fails alone, with the value and the range, and nobody else notices."""

from __future__ import annotations

import math
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from octavo import (
    AlreadyExistsError,
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    Message,
    OctavoError,
    OverloadedError,
    SamplingParams,
)
from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from tests.system.models import TINY_MAX_MODEL_LEN, TINY_VOCAB_SIZE, Transformers
from tests.system.requests import Bystander, greedy, token_prompt
from tests.system.stack import Stack

PROMPT = token_prompt(10, salt=7)
LENGTH = TINY_MAX_MODEL_LEN


@pytest.fixture(scope="module", autouse=True)
def bystander(small: Stack, tiny_reference: Transformers) -> Iterator[Bystander]:
    """Somebody who streams all through this module and must not notice."""
    with Bystander(small, tiny_reference) as bystander:
        yield bystander
    small.wait_until_empty()


@pytest.fixture
def client(small: Stack) -> Iterator[Client]:
    with small.client() as client:
        yield client


def refusal(call: Callable[[], object], kind: type[OctavoError]) -> OctavoError:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return raised.value


# ---- prompts ----


@pytest.mark.parametrize(
    ("prompt", "params", "reason", "named"),
    [
        ([], {}, "EMPTY_PROMPT", ["0 tokens", "at least 1"]),
        ("", {}, "EMPTY_PROMPT", ["0 tokens", "at least 1"]),
        ([1, -1], {}, "TOKEN_OUT_OF_VOCABULARY", ["[1] is -1", "0 to 299"]),
        ([TINY_VOCAB_SIZE], {}, "TOKEN_OUT_OF_VOCABULARY", ["[0] is 300", "0 to 299"]),
        ([2**31 - 1], {}, "TOKEN_OUT_OF_VOCABULARY", ["2147483647", "0 to 299"]),
        ([-(2**31)], {}, "TOKEN_OUT_OF_VOCABULARY", ["-2147483648", "0 to 299"]),
        (token_prompt(LENGTH), {}, "PROMPT_TOO_LONG", ["512 tokens", "at most 511"]),
        (token_prompt(LENGTH + 1), {}, "PROMPT_TOO_LONG", ["513 tokens", "at most 511"]),
        ("x" * (LENGTH + 1), {}, "PROMPT_TOO_LONG", ["513 tokens", "at most 511"]),
        (token_prompt(400), {"max_tokens": 113}, "PROMPT_TOO_LONG", ["400", "113", "at most 112"]),
        (token_prompt(LENGTH - 1), {"max_tokens": 2}, "PROMPT_TOO_LONG", ["511", "at most 1 "]),
        # 30 blocks of 16: 480 tokens.
        (token_prompt(481), {"max_tokens": 1}, "PROMPT_EXCEEDS_POOL", ["481", "31", "30", "480"]),
    ],
)
def test_b33_b34_b40_prompts(
    client: Client, prompt: Any, params: dict[str, Any], reason: str, named: list[str]
) -> None:
    error = refusal(lambda: client.generate(prompt, SamplingParams(**params)), InvalidArgumentError)
    assert error.reason == reason
    for words in named:
        assert words in error.message


def test_the_longest_prompts_that_fit(tiny: Stack, client: Client) -> None:
    """One token below the model's length, and exactly the whole pool."""
    with tiny.client() as roomy:
        answer = roomy.generate(token_prompt(LENGTH - 1), SamplingParams(ignore_eos=True))
        assert len(answer.candidates[0].token_ids) == 1
    answer = client.generate(token_prompt(480), greedy(1))
    assert len(answer.candidates[0].token_ids) == 1


# ---- parameters ----

FLOATS = {
    "temperature": [math.nan, math.inf, -math.inf, -0.1, -1e-300, 100.1, 1e300],
    "top_p": [math.nan, math.inf, 0.0, -0.5, 1.0000001],
    "min_p": [math.nan, -math.inf, -1e-9, 1.0000001],
}
INTEGERS = {
    "top_k": [-2, -(2**31)],
    "n": [0, 65, 2**32 - 1],
    "max_tokens": [0, 2**31, 2**32 - 1],
    "min_tokens": [2**31, 17],
    "first_sample_index": [2**31],
}
RANGES = {
    "temperature": "[0.0, 100.0]",
    "top_p": "(0.0, 1.0]",
    "min_p": "[0.0, 1.0]",
    "top_k": "[-1, 2147483647]",
    "n": "[1, 64]",
    "max_tokens": "[1, 2147483647]",
    "first_sample_index": "[0, 2147483647]",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in {**FLOATS, **INTEGERS}.items() for value in values],
)
def test_b39_values_out_of_range(client: Client, name: str, value: float) -> None:
    params = SamplingParams(**{"max_tokens": 16, name: value})  # type: ignore[arg-type]
    error = refusal(lambda: client.generate(PROMPT, params), InvalidArgumentError)
    assert error.reason == "INVALID_PARAMETER"
    assert f"{name} is {value}" in error.message
    assert RANGES.get(name, "[0, ") in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("n", -1),
        ("max_tokens", -1),
        ("top_k", 2**31),
        ("top_k", "4"),
    ],
)
def test_values_the_wire_cannot_carry(client: Client, name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    error = refusal(lambda: client.generate(PROMPT, params), InvalidArgumentError)
    assert error.reason == "INVALID_PARAMETER"
    assert f"{name} is {value!r}" in error.message


@pytest.mark.parametrize(
    ("params", "reason", "named"),
    [
        ({"n": 17}, "INVALID_PARAMETER", ["n is 17", "at most 16"]),
        ({"stop": [str(i) for i in range(17)]}, "INVALID_PARAMETER", ["17 stop", "at most 16"]),
        ({"stop": ["ok", ""]}, "INVALID_PARAMETER", ["0 characters", "1 to 256"]),
        ({"stop": "x" * 257}, "INVALID_PARAMETER", ["257 characters", "1 to 256"]),
        ({"stop_token_ids": range(65)}, "INVALID_PARAMETER", ["65 stop token", "at most 64"]),
        ({"stop_token_ids": [300]}, "TOKEN_OUT_OF_VOCABULARY", ["[0] is 300", "0 to 299"]),
        ({"stop_token_ids": [5, -1]}, "TOKEN_OUT_OF_VOCABULARY", ["[1] is -1", "0 to 299"]),
    ],
)
def test_candidates_and_stops(
    client: Client, params: dict[str, Any], reason: str, named: list[str]
) -> None:
    call = lambda: client.generate(PROMPT, SamplingParams(max_tokens=4, **params))  # noqa: E731
    error = refusal(call, InvalidArgumentError)
    assert error.reason == reason
    for words in named:
        assert words in error.message


def test_values_at_the_ends_of_their_ranges_are_served(client: Client) -> None:
    ends = [
        {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0, "seed": 2**64 - 1},
        {"temperature": 0.0, "top_k": -1, "top_p": 1e-300, "min_p": 1.0, "seed": 0},
        {"temperature": 1e-300, "first_sample_index": 2**31 - 1, "n": 16, "min_tokens": 3},
        {"stop": ["\N{PILE OF POO}" * 256] * 16, "stop_token_ids": [0] * 64, "min_tokens": 3},
    ]
    for params in ends:
        answer = client.generate(PROMPT, SamplingParams(**params, max_tokens=3, ignore_eos=True))
        assert {len(candidate.token_ids) for candidate in answer.candidates} == {3}


# ---- calls ----


def test_b02_a_second_live_request_with_one_id(
    client: Client, tiny_reference: Transformers
) -> None:
    with client.stream(PROMPT, greedy(200), request_id="twice") as first:
        next(first)
        for _ in range(3):
            error = refusal(
                lambda: client.generate(PROMPT, greedy(2), request_id="twice"),
                AlreadyExistsError,
            )
            assert error.reason == "REQUEST_EXISTS"
            assert "twice" in error.message
        for _ in first:
            pass
        reference = tiny_reference.greedy(PROMPT, 200)
        assert reference.disagreement(first.generation().candidates[0].token_ids) is None
    # It has ended, so its name is free.
    assert len(client.generate(PROMPT, greedy(2), request_id="twice").candidates) == 1


def test_b32_chat_without_a_template(client: Client) -> None:
    for call in (
        lambda: client.chat("Hello"),
        lambda: client.tokenize([Message("user", "Hello")]),
    ):
        error = refusal(call, InvalidArgumentError)
        assert error.reason == "NO_CHAT_TEMPLATE"
        assert "Generate" in error.message
    assert not client.model().has_chat_template


def test_a_request_id_too_long(client: Client) -> None:
    longest = "é" * 128
    assert client.generate(PROMPT, greedy(1), request_id=longest).request_id == longest
    error = refusal(
        lambda: client.generate(PROMPT, greedy(1), request_id=longest + "x"), InvalidArgumentError
    )
    assert "257 bytes" in error.message
    assert "256" in error.message


def test_a_deadline_too_short(client: Client) -> None:
    for timeout_s in (0.0, 0.05):
        refusal(
            lambda timeout_s=timeout_s: client.generate(PROMPT, greedy(400), timeout_s=timeout_s),
            DeadlineExceededError,
        )


def test_abort_of_nobody(client: Client) -> None:
    assert client.abort("nobody") is False
    assert client.abort("") is False


def test_a_message_over_the_size_limit(client: Client, small: Stack) -> None:
    text = "x" * (16 * 1024 * 1024 + 1)
    error = refusal(lambda: client.generate(text, greedy(1)), OverloadedError)
    assert "16777216" in error.message
    # Not the client's own limit alone: one without any is refused by the server.
    with grpc.insecure_channel(small.address, [("grpc.max_send_message_length", -1)]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(prompt=text), timeout=30
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_long_text_is_tokenized_while_others_are_served(client: Client) -> None:
    """Megabytes take seconds to tokenize; short requests come and go meanwhile."""
    refused = threading.Event()
    errors: list[OctavoError] = []

    def long_one() -> None:
        try:
            client.generate("to be refused " * 250_000, greedy(1))
        except OctavoError as error:
            errors.append(error)
        finally:
            refused.set()

    thread = threading.Thread(target=long_one)
    thread.start()
    num_served = 0
    while not refused.is_set():
        client.generate(PROMPT, greedy(1))
        num_served += 1
    thread.join()
    assert [error.reason for error in errors] == ["PROMPT_TOO_LONG"]
    # A handful may be served while the text is on its way; not dozens.
    assert num_served > 30


# ---- below the SDK ----


def raw_error(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    told = ServiceError.from_rpc_error(raised.value)
    return raised.value.code(), told.reason if told else ""


def test_raw_calls(small: Stack) -> None:
    stub = inference_pb2_grpc.InferenceStub(small.channel())
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    empty = stub.Generate(pb.GenerateRequest(), timeout=10)
    assert raw_error(empty) == (invalid, "EMPTY_PROMPT")
    no_chat = stub.Chat(pb.ChatRequest(), timeout=10)
    assert raw_error(no_chat) == (invalid, "INVALID_PARAMETER")
    other_model = stub.Generate(pb.GenerateRequest(model="gpt-9", prompt="x"), timeout=10)
    assert raw_error(other_model) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")


def test_calls_that_are_not_protobuf(small: Stack) -> None:
    channel = small.channel()
    for garbage in (b"\xff" * 100, b"\x0a\x05\xc3\x28\xa0\xa1\xff", secrets.token_bytes(4096)):
        call = channel.unary_stream("/octavo.v1.Inference/Generate")(garbage, timeout=10)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    call = channel.unary_unary("/octavo.v1.Inference/Nothing")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: octavo\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x04\x01\x04\0\0\0\x01\xff\xff\xff\xff",
        b"\x16\x03\x01\x02\x00\x01\x00",
        bytes(range(256)) * 1000,
        b"",
    ],
    ids=["http1", "bad frames", "bad headers", "tls", "bytes", "nothing"],
)
def test_junk_on_the_socket(small: Stack, junk: bytes) -> None:
    path = small.address.removeprefix("unix:")
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
            try:
                connection.sendall(junk)
            except OSError:
                continue  # refused while it was being sent
    with small.client() as client:
        assert client.health().serving


def test_the_bystander_has_noticed_nothing(small: Stack, bystander: Bystander) -> None:
    """Last in this module: everything above went by while it streamed."""
    assert not bystander.failures
    assert bystander.num_served > 3
    assert small.is_serving()
