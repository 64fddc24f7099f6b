"""At the door and in the queue: deadlines, priorities, what can never fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import AsyncClient, Client, DeadlineExceededError, OctavoError
from tests.system.models import TINY_WORKER
from tests.system.requests import greedy, token_prompt
from tests.system.stack import Stack

LONG = greedy(400)
SHORT = greedy(3)


@pytest.fixture(scope="module")
def narrow(tiny_model: Path) -> Iterator[Stack]:
    """One sequence runs at a time."""
    with Stack(
        model=tiny_model,
        num_blocks=128,
        worker=TINY_WORKER,
        scheduler=("--max-num-seqs=1",),
    ) as stack:
        yield stack


def requests_of(client: Client) -> set[str]:
    return {request.request_id for request in client.list_requests()}


def wait_for(client: Client, expected: set[str]) -> None:
    deadline_s = time.monotonic() + 20
    while requests_of(client) != expected:
        assert time.monotonic() < deadline_s, requests_of(client)
        time.sleep(0.05)


def test_a_deadline_that_passes_in_the_queue(narrow: Stack) -> None:
    with (
        narrow.client() as client,
        client.stream(token_prompt(8), LONG, request_id="runs") as running,
    ):
        next(iter(running))
        with pytest.raises(DeadlineExceededError):
            client.generate(token_prompt(8, salt=1), SHORT, request_id="waits", timeout_s=0.5)
        wait_for(client, {"runs"})
    narrow.wait_until_empty()


def test_an_urgent_request_overtakes(narrow: Stack) -> None:
    """Both arrive while the worker is in the middle of the step that the first one runs in."""

    async def first_tokens() -> list[str]:
        order: list[str] = []
        async with AsyncClient(narrow.address) as client:

            async def ask(name: str, salt: int, priority: int = 0) -> None:
                stream = client.stream(
                    token_prompt(8, salt=salt), greedy(50), request_id=name, priority=priority
                )
                async with stream as chunks:
                    async for chunk in chunks:
                        if chunk.candidates and name not in order:
                            order.append(name)

            async def begin(name: str, salt: int, priority: int = 0) -> None:
                tasks.append(asyncio.create_task(ask(name, salt, priority)))
                while len(await client.list_requests()) < len(tasks):
                    await asyncio.sleep(0.01)

            tasks: list[asyncio.Task[None]] = []
            narrow.pause("worker")
            try:
                await begin("first", 1)
                await begin("usual", 2)
                await begin("urgent", 3, priority=1)
            finally:
                narrow.go_on("worker")
            await asyncio.gather(*tasks)
        return order

    assert asyncio.run(first_tokens()) == ["first", "urgent", "usual"]
    with narrow.client() as client, pytest.raises(OctavoError, match=r"priority is 9.*-8.*8"):
        client.generate(token_prompt(4), SHORT, priority=9)


def test_what_can_never_fit_is_refused_at_once(narrow: Stack) -> None:
    with narrow.client() as client, client.stream(token_prompt(8), LONG) as running:
        next(iter(running))
        with pytest.raises(OctavoError) as refused:
            client.generate([1] * 600, SHORT)
        assert refused.value.reason == "PROMPT_TOO_LONG"
    narrow.wait_until_empty()
