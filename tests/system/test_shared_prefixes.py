"""The prefix cache in the whole stack: what is found, for whom, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, Generation, Message, SamplingParams
from tests.system.requests import greedy
from tests.system.stack import Stack

BLOCK_SIZE = 16
KEYS = {"one": "key-of-the-first-tenant", "two": "key-of-the-second-tenant"}
LETTER = "Dear house, " + ", ".join(f"ream {i} of paper is in the press" for i in range(30)) + "."


def output(answer: Generation) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and log-probabilities, which have the same bits wherever the KV came from."""
    return [(c.token_ids, c.cumulative_logprob) for c in answer.candidates]


def test_b17_two_turns_of_a_chat(demo: Stack) -> None:
    """The second computes its own tokens only, generated ones of the first turn included, and says
    what it says without a cache."""
    first_turn = [Message("user", f"Sum up this letter: {LETTER}")]
    with demo.client() as client:
        first = client.chat(first_turn, greedy(40), cache_salt="warm")
        reply = first.candidates[0]
        second_turn = [
            *first_turn,
            Message("assistant", reply.text),
            Message("user", "Say it in French."),
        ]
        warm = client.chat(second_turn, greedy(40), cache_salt="warm")
        cold = client.chat(second_turn, greedy(40), cache_salt="cold")
        again = client.chat(second_turn, greedy(40), cache_salt="warm")
    assert first.num_cached_tokens == 0
    assert cold.num_cached_tokens == 0
    assert output(warm) == output(cold) == output(again)
    # All that had KV, in whole blocks: the first turn's prompt and the reply.
    known = first.num_prompt_tokens + len(reply.token_ids) - 1
    assert warm.num_cached_tokens is not None
    assert warm.num_cached_tokens >= first.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert warm.num_cached_tokens > known - 2 * BLOCK_SIZE
    # The whole prompt was there by then, and one token of it is always computed.
    assert again.num_cached_tokens == min(
        warm.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, warm.num_prompt_tokens - 1
    )
    demo.wait_until_empty()


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that tells its callers apart."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.touch(mode=0o600)
    file.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
    with Stack(
        model=tiny_model,
        num_blocks=64,
        scheduler=(f"--api-keys={file}",),
    ) as stack:
        yield stack


def test_b22_another_tenants_prompt_shortens_nothing(guarded: Stack) -> None:
    prompt = [1 + i % 60 for i in range(100)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, n=2)
    cached: dict[str, list[int | None]] = {}
    outputs = []
    for _ in range(2):
        for tenant, key in KEYS.items():
            with Client(guarded.address, api_key=key) as client:
                answer = client.generate(prompt, params)
            cached.setdefault(tenant, []).append(answer.num_cached_tokens)
            outputs.append(output(answer))
    assert cached == {"one": [0, 96], "two": [0, 96]}
    assert all(one == outputs[0] for one in outputs)
    guarded.wait_until_empty()
