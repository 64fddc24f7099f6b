"""Many callers at once in a pool too small for them, a third of whom leave at random moments."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from octavo import (
    AsyncClient,
    FinishReason,
    Generation,
    NotFoundError,
    OverloadedError,
    SamplingParams,
)
from tests.system.models import Transformers
from tests.system.requests import greedy, token_prompt
from tests.system.stack import Stack

NUM_CLIENTS = 32
REQUESTS_EACH = 2
WAYS_TO_LEAVE = ("break", "cancel", "abort")


@dataclass(frozen=True)
class Errand:
    """One request, and how its caller leaves it: after so many chunks, or at a moment."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    leave: str | None
    num_chunks: int
    after_s: float


def errand(draw: random.Random, name: str, leave: str | None) -> Errand:
    max_tokens = draw.randint(10, 80)
    if draw.random() < 0.5:
        params = greedy(max_tokens)
    else:
        params = SamplingParams(
            temperature=draw.choice([0.5, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=draw.randrange(2**64),
            n=draw.randint(1, 3),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    length = draw.choice([1, 3, 15, 16, 17, 40, 64, 100, 120])
    prompt = token_prompt(length, salt=draw.randint(0, 50))
    return Errand(name, prompt, params, leave, draw.randint(0, 20), draw.random() * 0.5)


async def run(client: AsyncClient, todo: Errand) -> Generation | None:
    """The whole answer, or None when the caller left before its end."""
    if todo.leave == "break":
        return await run_and_break(client, todo)
    task = asyncio.create_task(client.generate(todo.prompt, todo.params, request_id=todo.name))
    if todo.leave is not None:
        await asyncio.sleep(todo.after_s)
    if todo.leave == "cancel":
        task.cancel()
    elif todo.leave == "abort":
        await client.abort(todo.name)
    # It may have been complete, and on its way, when its caller left.
    left = {"cancel": asyncio.CancelledError, "abort": NotFoundError}.get(todo.leave or "", ())
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, Generation):
        return result
    assert isinstance(result, left), (todo, result)
    return None


async def run_and_break(client: AsyncClient, todo: Errand) -> Generation | None:
    async with client.stream(todo.prompt, todo.params, request_id=todo.name) as chunks:
        count = 0
        async for _ in chunks:
            count += 1
            if count > todo.num_chunks:
                return None
        return chunks.generation()


async def one_client(address: str, errands: list[Errand]) -> list[Generation | None]:
    async with AsyncClient(address) as client:
        return [await run(client, todo) for todo in errands]


def check_complete(todo: Errand, answer: Generation) -> None:
    assert len(answer.candidates) == (todo.params.n or 1)
    for candidate in answer.candidates:
        assert candidate.finish_reason is FinishReason.LENGTH
        assert len(candidate.token_ids) == todo.params.max_tokens


@pytest.mark.parametrize("seed", [29, 30])
def test_survivors_are_their_solo_runs_and_nothing_is_left(
    small: Stack, tiny_reference: Transformers, seed: int
) -> None:
    draw = random.Random(seed)
    leaving = [*WAYS_TO_LEAVE * (NUM_CLIENTS // 9), *[None] * NUM_CLIENTS][:NUM_CLIENTS]
    draw.shuffle(leaving)
    errands = [
        [errand(draw, f"{seed}-{i}-{j}", leave) for j in range(REQUESTS_EACH)]
        for i, leave in enumerate(leaving)
    ]

    async def everybody() -> list[list[Generation | None]]:
        return await asyncio.gather(*(one_client(small.address, each) for each in errands))

    preemptions_before = small.pool_stats().num_preemptions
    answers = asyncio.run(everybody())
    stats = small.wait_until_empty()
    assert stats.num_preemptions > preemptions_before

    served = [
        (todo, answer)
        for each, replies in zip(errands, answers, strict=True)
        for todo, answer in zip(each, replies, strict=True)
        if answer is not None
    ]
    assert len(served) < NUM_CLIENTS * REQUESTS_EACH
    assert {todo.leave for todo, _ in served} >= {None}
    with small.client() as client:
        for todo, answer in served:
            check_complete(todo, answer)
            if todo.params.temperature == 0:
                reference = tiny_reference.greedy(todo.prompt, todo.params.max_tokens or 0)
                assert reference.disagreement(answer.candidates[0].token_ids) is None, todo
            else:
                alone = client.generate(todo.prompt, todo.params)
                for got, wanted in zip(answer.candidates, alone.candidates, strict=True):
                    assert (got.token_ids, got.text) == (wanted.token_ids, wanted.text), todo
                    difference = got.cumulative_logprob - wanted.cumulative_logprob
                    assert abs(difference) < 1e-3 * len(got.token_ids)
    for todo in (todo for each in errands for todo in each if todo.leave is None):
        assert any(todo is other for other, _ in served), f"{todo} was not served"
    small.wait_until_empty()


def test_more_callers_than_may_wait(small: Stack, tiny_reference: Transformers) -> None:
    """The queue has a bound: who comes too late is told to come again, the others are served."""
    prompt = token_prompt(20, salt=41)
    expected = tiny_reference.greedy(prompt, 8)

    async def one(client: AsyncClient) -> Generation | OverloadedError:
        try:
            return await client.generate(prompt, greedy(8))
        except OverloadedError as error:
            return error

    async def everybody() -> list[Generation | OverloadedError]:
        async with AsyncClient(small.address) as client:
            return await asyncio.gather(*(one(client) for _ in range(300)))

    outcomes = asyncio.run(everybody())
    refused = [each for each in outcomes if isinstance(each, OverloadedError)]
    served = [each for each in outcomes if isinstance(each, Generation)]
    assert refused
    assert len(served) >= 64
    for error in refused:
        assert error.reason == "QUEUE_FULL"
        assert error.retry_after_ms
        assert "at most 64" in error.message
    for answer in served:
        assert expected.disagreement(answer.candidates[0].token_ids) is None
    small.wait_until_empty()
