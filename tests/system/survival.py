"""Sixteen streams in the middle of decoding, each with the answer it had when nothing happened.

Half of them are RPCs of their own, the other half share one stream.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from octavo import AsyncClient, Client, Generation, SamplingParams
from octavo.types import Candidate, Chunk
from tests.system.requests import token_prompt
from tests.system.stack import PATIENCE_S, STANDBY, Stack, wait_until

NUM_STREAMS = 16
# Tokens of each candidate by which its stream is well under way, and how long it then is still.
TOKENS_BEFORE = 10
MAX_TOKENS = 120
# Of the scheduler's session: a pause is to be longer, and a busy machine's hiccups shorter.
LEASE_TTL_MS = 1000
STREAM_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Shape:
    """One kind of request."""

    prompt: tuple[int, ...]
    params: SamplingParams


def shapes(count: int, max_tokens: int, length_step: int = 7) -> list[Shape]:
    """Greedy and seeded ones, one candidate or three, that end by length or by a stop token."""
    made = []
    for number in range(count):
        is_greedy = number % 2 == 0
        ends_early = number % 4 == 3
        params = SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=number,
            n=3 if number % 8 in (2, 5) else 1,
            max_tokens=max_tokens,
            ignore_eos=True,
            min_tokens=max_tokens * 3 // 4 if ends_early else None,
            stop_token_ids=tuple(range(32)) if ends_early else (),
        )
        made.append(Shape(token_prompt(20 + length_step * number, salt=number), params))
    return made


def undisturbed(stack: Stack, several: Sequence[Shape]) -> dict[Shape, Generation]:
    """What each answers when it runs alone and nothing dies."""
    with stack.client() as client:
        return {shape: client.generate(shape.prompt, shape.params) for shape in several}


def outcome(candidates: Sequence[Candidate]) -> list[tuple[object, ...]]:
    """What of an answer must not depend on what happens. Scores are summed in another order
    after some deaths, so they are compared with a tolerance elsewhere."""
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.matched_stop) for c in candidates]


class _Stream:
    """One stream, read on a thread or as a task of its own."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        # Tokens of each candidate so far, and when the newest came.
        self.num_tokens: dict[int, int] = {}
        self.newest_s = 0.0
        self.ended = False

    def read(self, client: Client) -> Generation:
        shape = self.shape
        with client.stream(shape.prompt, shape.params, timeout_s=STREAM_TIMEOUT_S) as chunks:
            for chunk in chunks:
                self._take(chunk)
            self.ended = True
            return chunks.generation()

    async def read_async(self, client: AsyncClient) -> Generation:
        shape = self.shape
        async with client.stream(shape.prompt, shape.params, timeout_s=STREAM_TIMEOUT_S) as chunks:
            async for chunk in chunks:
                self._take(chunk)
            self.ended = True
            return chunks.generation()

    def _take(self, chunk: Chunk) -> None:
        for candidate in chunk.candidates:
            before = self.num_tokens.get(candidate.index, 0)
            self.num_tokens[candidate.index] = before + len(candidate.token_ids)
        self.newest_s = time.monotonic()

    @property
    def is_under_way(self) -> bool:
        counts = self.num_tokens.values()
        return len(counts) == (self.shape.params.n or 1) and min(counts) >= TOKENS_BEFORE


class Streams:
    """Streams that are all in the middle of decoding when the block of `running` begins."""

    def __init__(self, client: Client, several: Sequence[Shape], pool: ThreadPoolExecutor) -> None:
        chosen = [several[number % len(several)] for number in range(NUM_STREAMS)]
        self._streams = [_Stream(shape) for shape in chosen]
        half = NUM_STREAMS // 2
        self._results: list[Future[Generation]] = [
            pool.submit(stream.read, client) for stream in self._streams[:half]
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncClient(client.addresses)
        self._results += [
            asyncio.run_coroutine_threadsafe(stream.read_async(self._client), self._loop)
            for stream in self._streams[half:]
        ]

    def close(self) -> None:
        """End those that share a stream, if they go on."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_until_under_way(self) -> None:
        wait_until(
            lambda: all(stream.is_under_way for stream in self._streams) or self._any_ended(),
            "all streams decode",
        )
        assert not self._any_ended(), "a stream had ended before the others were under way"

    def wait_until_they_go_on(self) -> None:
        """Until one of them has received something that was sent from now on, for sure."""
        asked_s = time.monotonic() + 0.2
        wait_until(
            lambda: any(s.ended or s.newest_s > asked_s for s in self._streams), "they go on"
        )

    def _any_ended(self) -> bool:
        return any(result.done() for result in self._results)

    def check(self, expected: Mapping[Shape, Generation]) -> None:
        """Wait for all; each must be what it was when nothing happened."""
        wrong = []
        for number, (stream, result) in enumerate(zip(self._streams, self._results, strict=True)):
            answer, wanted = result.result(), expected[stream.shape]
            if outcome(answer.candidates) != outcome(wanted.candidates):
                wrong.append(f"stream {number} ({stream.shape.params}): {answer} is not {wanted}")
            for got, candidate in zip(answer.candidates, wanted.candidates, strict=True):
                difference = abs(got.cumulative_logprob - candidate.cumulative_logprob)
                if difference > 1e-3:
                    wrong.append(f"stream {number}: the scores differ by {difference}")
        assert not wrong, "\n".join(wrong)


@contextmanager
def running(
    stack: Stack, expected: Mapping[Shape, Generation], addresses: Sequence[str] = ()
) -> Iterator[Streams]:
    """Streams under way; on leaving, all must come out right and leave the pool empty."""
    with (
        Client(addresses or stack.address) as client,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        streams = Streams(client, list(expected), pool)
        try:
            streams.wait_until_under_way()
            yield streams
            streams.check(expected)
        except BaseException:
            client.close()  # ends the threads' streams
            raise
        finally:
            streams.close()
    stack.wait_until_empty()


def make_whole(stack: Stack) -> None:
    """The stack as it was at first, whatever a test has left of it."""
    for link in stack.links.values():
        link.heal()
    for name in list(stack.processes):
        stack.go_on(name)
    if STANDBY in stack.processes:
        stack.kill(STANDBY)
    missing = [name for name in ("kvmem", "worker", "scheduler") if name not in stack.processes]
    if missing:
        stack.start(*missing)
    stack.wait_until_serving()
