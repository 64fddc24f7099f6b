"""Thousands of mixed requests on a pool ten times too small for those in flight.

Lengths, candidates, sampling and shared prefixes are drawn; a quarter is left or aborted after a
drawn number of messages, some are refused. OCTAVO_SOAK_REQUESTS says how many there are.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo import (
    AsyncClient,
    FinishReason,
    Generation,
    InvalidArgumentError,
    NotFoundError,
    OctavoError,
    OverloadedError,
    SamplingParams,
)
from tests.system.models import TINY_MAX_MODEL_LEN, TINY_WORKER
from tests.system.requests import token_prompt
from tests.system.stack import Stack

NUM_REQUESTS = int(os.environ.get("OCTAVO_SOAK_REQUESTS", "2000"))
SEED = 77
NUM_IN_FLIGHT = 320
# With so many of them waiting, which may happen now and then, who comes is told to come again.
MAX_WAITING = 314
BLOCK_SIZE = 16
NUM_BLOCKS, NUM_HOST_BLOCKS = 160, 24
NUM_SOLO = 100
PREFIXES = [token_prompt(48, salt=1000 + number) for number in range(4)]


@dataclass(frozen=True)
class Errand:
    """A request. leave: how its caller leaves it, if it does, after so many messages.
    is_refused: it can never be served."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    leave: str | None
    num_chunks: int
    is_refused: bool = False

    @property
    def num_blocks(self) -> int:
        """What it holds at its end: the prompt's once, the output's of each candidate."""
        num_outputs = (self.params.n or 1) * (self.params.max_tokens or 0)
        return -(-len(self.prompt) // BLOCK_SIZE) + -(-num_outputs // BLOCK_SIZE)


def errand(draw: random.Random, number: int) -> Errand:
    tail = token_prompt(draw.choice([1, 3, 15, 16, 17, 40, 64]), salt=number)
    prompt = draw.choice(PREFIXES) + tail if draw.random() < 0.5 else tail
    is_refused = draw.random() < 0.02
    if is_refused:
        prompt = token_prompt(TINY_MAX_MODEL_LEN + draw.randint(0, 50))
    is_greedy = draw.random() < 0.5
    params = SamplingParams(
        temperature=0.0 if is_greedy else draw.choice([0.5, 1.0]),
        top_p=draw.choice([1.0, 0.9]),
        seed=draw.randrange(2**63),
        n=draw.choice([1, 1, 2, 3]),
        max_tokens=draw.randint(1, 40) if draw.random() < 0.75 else draw.randint(100, 200),
        ignore_eos=True,
    )
    leave = draw.choice(["break", "abort"]) if draw.random() < 0.25 else None
    return Errand(f"soak-{number}", prompt, params, leave, draw.randint(0, 30), is_refused)


@dataclass(frozen=True)
class Left:
    """Its caller had left it before its end."""


Outcome = Generation | OctavoError | Left


async def run(client: AsyncClient, todo: Errand) -> Outcome:
    stream = client.stream(todo.prompt, todo.params, request_id=todo.name, timeout_s=600)
    try:
        async with stream as chunks:
            num_chunks = 0
            async for _ in chunks:
                num_chunks += 1
                if num_chunks == todo.num_chunks + 1 and todo.leave == "break":
                    return Left()
                if num_chunks == todo.num_chunks + 1 and todo.leave == "abort":
                    await client.abort(todo.name)
            return chunks.generation()
    except OctavoError as error:
        return Left() if isinstance(error, NotFoundError) and todo.leave == "abort" else error


async def run_all(address: str, errands: list[Errand]) -> list[Outcome]:
    """In their order, NUM_IN_FLIGHT at a time."""
    turn = asyncio.Semaphore(NUM_IN_FLIGHT)

    async with AsyncClient(address) as client:

        async def one(todo: Errand) -> Outcome:
            async with turn:
                return await run(client, todo)

        return await asyncio.gather(*map(one, errands))


@pytest.fixture(scope="module")
def crowded(tiny_model: Path) -> Iterator[Stack]:
    with Stack(
        model=tiny_model,
        num_blocks=NUM_BLOCKS,
        worker=(*TINY_WORKER, f"--num-host-blocks={NUM_HOST_BLOCKS}"),
        scheduler=("--preemption=auto", f"--max-waiting={MAX_WAITING}"),
    ) as stack:
        yield stack


@pytest.mark.timeout(900)
def test_thousands_of_requests_in_a_pool_ten_times_too_small(crowded: Stack) -> None:
    draw = random.Random(SEED)
    errands = [errand(draw, number) for number in range(NUM_REQUESTS)]
    served = [todo for todo in errands if not todo.is_refused]
    needed = NUM_IN_FLIGHT * sum(todo.num_blocks for todo in served) / len(served)
    assert needed >= 10 * NUM_BLOCKS

    outcomes = asyncio.run(run_all(crowded.address, errands))
    stats = crowded.wait_until_empty()
    counts = Counter(type(outcome).__name__ for outcome in outcomes)
    print(counts, stats)
    assert stats.levels.num_free_host_blocks == NUM_HOST_BLOCKS
    assert stats.num_preemptions > 0
    assert stats.num_swapped_out_blocks > 0

    survivors = []
    for todo, outcome in zip(errands, outcomes, strict=True):
        match outcome:
            case Generation():
                check_complete(todo, outcome)
                survivors.append((todo, outcome))
            case InvalidArgumentError():
                assert todo.is_refused
                assert outcome.reason == "PROMPT_TOO_LONG"
            case OverloadedError():
                assert outcome.reason == "QUEUE_FULL"
                assert outcome.retry_after_ms
            case Left():
                assert todo.leave
            case _:
                raise AssertionError((todo, outcome))
    assert sum(todo.is_refused for todo in errands) == counts["InvalidArgumentError"]
    assert len(survivors) > NUM_REQUESTS // 2
    check_alone(crowded, draw.sample(survivors, min(NUM_SOLO, len(survivors))))
    crowded.wait_until_empty()


def check_complete(todo: Errand, answer: Generation) -> None:
    assert len(answer.candidates) == todo.params.n
    for candidate in answer.candidates:
        assert candidate.finish_reason is FinishReason.LENGTH, (todo, candidate)
        assert len(candidate.token_ids) == todo.params.max_tokens


def check_alone(stack: Stack, answers: list[tuple[Errand, Generation]]) -> None:
    """What was answered in the crowd is what is answered when there is none."""
    with stack.client() as client:
        for todo, answer in answers:
            alone = client.generate(todo.prompt, todo.params)
            for got, wanted in zip(answer.candidates, alone.candidates, strict=True):
                assert (got.token_ids, got.text) == (wanted.token_ids, wanted.text), todo
