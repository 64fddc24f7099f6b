"""The load under chaos: callers that compare every answer with the undisturbed one.

What each kind of request answers is found out before the chaos begins, one after the other and
with nobody else there; sampling draws from the request's own seed, so that it must answer the
same in any company and whatever dies.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from octavo import AsyncClient, Generation, OctavoError, SamplingParams

REQUEST_TIMEOUT_S = 180.0
# Ids that are plain text in every vocabulary, the smallest too.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 33, 255
# Some letters, and the first merges of a byte-level tokenizer, which are frequent words.
STOP_TOKEN_IDS = (*range(64, 80), *range(258, 290))


@dataclass(frozen=True)
class Shape:
    """One kind of request."""

    prompt: tuple[int, ...]
    params: SamplingParams


def make_shapes(count: int, draw: random.Random) -> list[Shape]:
    """Greedy and seeded, one candidate or three, of many lengths, ended by length or by a
    stop token."""
    shapes = []
    for number in range(count):
        num_prompt, num_output = draw.randint(8, 96), draw.randint(24, 96)
        stops = draw.random() < 0.25
        params = SamplingParams(
            temperature=0.0 if number % 2 == 0 else draw.uniform(0.5, 1.2),
            seed=draw.getrandbits(32),
            n=3 if number % 4 == 1 else 1,
            max_tokens=num_output,
            min_tokens=num_output // 2 if stops else None,
            stop_token_ids=STOP_TOKEN_IDS if stops else (),
            ignore_eos=True,
        )
        prompt = tuple(draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_prompt))
        shapes.append(Shape(prompt, params))
    return shapes


def outcome(answer: Generation) -> list[tuple[object, ...]]:
    """What of an answer must not depend on what happens."""
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.matched_stop) for c in answer.candidates
    ]


@dataclass
class Load:
    """Callers that send one request after the other until they are told to stop."""

    client: AsyncClient
    shapes: Sequence[Shape]
    draw: random.Random
    expected: dict[Shape, Generation] = field(default_factory=dict)
    num_requests: int = 0
    num_tokens: int = 0
    # One sentence for each request that failed, or whose answer is another one.
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # When tokens came, of a clock that never goes back.
    arrivals_s: list[float] = field(default_factory=list)
    _stopping: bool = False
    _callers: list[asyncio.Task[None]] = field(default_factory=list)

    async def learn(self, on_progress: Callable[[], None]) -> None:
        """Find out what each shape answers when nothing happens."""
        for shape in self.shapes:
            self.expected[shape] = await self.client.generate(shape.prompt, shape.params)
            on_progress()

    def start(self, num_callers: int) -> None:
        self._callers = [asyncio.create_task(self._call()) for _ in range(num_callers)]

    async def finish(self) -> None:
        """Let everybody end what they wait for, and stop."""
        self._stopping = True
        await asyncio.gather(*self._callers)

    async def _call(self) -> None:
        while not self._stopping:
            shape = self.draw.choice(self.shapes)
            self.num_requests += 1
            try:
                answer = await self._stream(shape)
            except OctavoError as error:
                self.lost.append(f"{type(error).__name__} {error.reason}: {error}")
                continue
            if outcome(answer) != outcome(self.expected[shape]):
                self.wrong.append(f"{shape.params}: {answer} is not {self.expected[shape]}")

    async def _stream(self, shape: Shape) -> Generation:
        stream = self.client.stream(shape.prompt, shape.params, timeout_s=REQUEST_TIMEOUT_S)
        async with stream as chunks:
            async for chunk in chunks:
                count = sum(len(candidate.token_ids) for candidate in chunk.candidates)
                if count:
                    self.num_tokens += count
                    self.arrivals_s.append(time.monotonic())
            return chunks.generation()

    def end_of_silence_s(self, since_s: float) -> float:
        """When the longest silence ended that any later arrival has ended."""
        place = bisect_right(self.arrivals_s, since_s)
        times_s = [since_s, *self.arrivals_s[place:]]
        return max(pairwise(times_s), key=lambda pair: pair[1] - pair[0])[1]

    async def wait_until_flowing(self, num_arrivals: int, timeout_s: float) -> bool:
        """Until that many more pieces came; False when they do not."""
        wanted, deadline_s = len(self.arrivals_s) + num_arrivals, time.monotonic() + timeout_s
        while len(self.arrivals_s) < wanted:
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(0.005)
        return True
