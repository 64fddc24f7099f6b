"""Text as it is streamed: the chunks joined are the full decode, and stop strings never leak."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from octavo import AsyncClient, Candidate, Client, FinishReason, Message, SamplingParams
from tests.system.models import Transformers
from tests.system.requests import greedy
from tests.system.stack import Stack

pytestmark = pytest.mark.model

PROMPTS = (
    "👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 the family emoji again: 👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 and once more: 👩‍👩‍👧‍👦",
    "春眠不觉晓,处处闻啼鸟。夜来风雨声,花落知多少。春眠不觉晓,处处闻啼鸟。",
    "안녕하세요. 만나서 반갑습니다. 안녕하세요. 만나서 반갑습니다. 안녕하세요.",
    "def f(x):\n    if x:\n        return  {'a':   1}\n\ndef f(x):\n    if x:\n",
)


@pytest.fixture
def client(demo: Stack) -> Iterator[Client]:
    with demo.client() as client:
        yield client
    demo.wait_until_empty()


def streamed(client: Client, prompt: str, params: SamplingParams) -> dict[int, Candidate]:
    """The candidates of a stream, having checked that its chunks joined are their text."""
    texts: dict[int, list[str]] = {}
    with client.stream(prompt, params) as chunks:
        for part in itertools.chain.from_iterable(chunk.candidates for chunk in chunks):
            texts.setdefault(part.index, []).append(part.text)
        answer = chunks.generation()
    for candidate in answer.candidates:
        assert "".join(texts[candidate.index]) == candidate.text
    return {candidate.index: candidate for candidate in answer.candidates}


async def stream_all(
    address: str, requests: list[tuple[str, SamplingParams]]
) -> list[tuple[str, Candidate]]:
    """Every candidate of requests that are streamed at once, with its chunks joined."""

    async def one(client: AsyncClient, prompt: str, params: SamplingParams) -> Any:
        texts: dict[int, str] = {}
        async with client.stream(prompt, params) as chunks:
            async for chunk in chunks:
                for part in chunk.candidates:
                    texts[part.index] = texts.get(part.index, "") + part.text
        answer = chunks.generation()
        return [(texts[candidate.index], candidate) for candidate in answer.candidates]

    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(one(client, *request) for request in requests))
    return list(itertools.chain.from_iterable(answers))


def test_b30_chunks_joined_are_the_full_decode(demo: Stack, demo_reference: Transformers) -> None:
    wild = SamplingParams(temperature=1.5, seed=5, n=3, max_tokens=40, ignore_eos=True)
    requests = [(prompt, params) for prompt in PROMPTS for params in (wild, greedy(40))]
    candidates = asyncio.run(stream_all(demo.address, requests))
    assert len(candidates) == len(PROMPTS) * 4
    for joined, candidate in candidates:
        decoded = demo_reference.tokenizer.decode(
            candidate.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert joined == candidate.text == decoded
    # The test would be empty otherwise: characters of several tokens do come.
    assert any(
        len(candidate.token_ids) > len(candidate.text) and not candidate.text.isascii()
        for _, candidate in candidates
    )
    demo.wait_until_empty()


def test_b29_stop_strings_across_tokens(client: Client, demo_reference: Transformers) -> None:
    """Strings that begin inside one token and end inside another, wherever they stand."""
    prompt = "Once upon a time, in a small village by the sea, there lived"
    whole = client.generate(prompt, greedy(24)).candidates[0]
    decode = demo_reference.tokenizer.decode
    ends = [len(decode(whole.token_ids[: i + 1])) for i in range(24)]
    # Around the border between tokens i and i + 1: two characters before it, two after.
    stops = {whole.text[ends[i] - 2 : ends[i] + 2] for i in range(1, 20, 4)}
    for stop in stops:
        answer = streamed(client, prompt, greedy(24, stop=stop))[0]
        assert answer.text == whole.text[: whole.text.index(stop)], repr(stop)
        assert answer.finish_reason is FinishReason.STOP
        assert answer.matched_stop == stop
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_b29_what_is_held_back_is_shown_when_no_stop_comes(client: Client) -> None:
    """The end of the text is the beginning of a stop string that never comes."""
    prompt = "Once upon a time, in a small village by the sea, there lived"
    whole = client.generate(prompt, greedy(24)).candidates[0]
    tail = whole.text[-6:]
    answer = streamed(client, prompt, greedy(24, stop=[tail + "§", tail[-1] + "§"]))[0]
    assert answer.text == whole.text
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.matched_stop is None


def test_b29_the_stop_that_is_complete_first_wins(client: Client) -> None:
    prompt = "Once upon a time, in a small village by the sea, there lived"
    whole = client.generate(prompt, greedy(24)).candidates[0]
    inner, outer = whole.text[20:24], whole.text[18:30]
    answer = streamed(client, prompt, greedy(24, stop=[outer, inner, "never"]))[0]
    first = whole.text.index(inner)
    assert answer.matched_stop == inner
    assert answer.text == whole.text[:first]


def test_stop_strings_end_each_candidate_on_its_own(client: Client) -> None:
    prompt = "The three most important rules of a good library are"
    params = {"temperature": 1.0, "seed": 11, "n": 4, "max_tokens": 32, "ignore_eos": True}
    whole = client.generate(prompt, SamplingParams(**params)).candidates
    stopped = streamed(client, prompt, SamplingParams(**params, stop=[".", "\n"]))
    for candidate in whole:
        ends = [at for stop in (".", "\n") if (at := candidate.text.find(stop)) >= 0]
        expected = candidate.text[: min(ends)] if ends else candidate.text
        assert stopped[candidate.index].text == expected
    assert {candidate.finish_reason for candidate in stopped.values()} >= {FinishReason.STOP}


def test_a_chat_is_its_templates_completion(client: Client, demo_reference: Transformers) -> None:
    messages = [Message("user", "Reply with one word: the capital of France?")]
    token_ids = client.tokenize(messages)
    turns = [{"role": message.role, "content": message.content} for message in messages]
    expected = demo_reference.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert list(token_ids) == list(expected)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    chat = client.chat(messages, params).candidates[0]
    completion = client.generate(token_ids, params).candidates[0]
    assert chat == completion
    assert "Paris" in chat.text
    # What is held back for a stop string that never comes is shown at that end too.
    held = replace(params, stop=[chat.text[-1] + "§"])
    assert client.generate(token_ids, held).candidates[0] == completion
    # It ends by itself, with a token that is no part of the text.
    assert chat.finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in chat.text
