"""Requests the tests have in common, and a caller that must not notice what happens beside it."""

from __future__ import annotations

import threading
from typing import Any, Self

from octavo import SamplingParams
from tests.system.models import Transformers
from tests.system.stack import Stack

BESIDE_TOKENS = 100


def token_prompt(num_tokens: int, salt: int = 0) -> tuple[int, ...]:
    """Ids below 256, without a period; another salt shares no prefix."""
    return tuple((salt * 31 + 7 * i + i * i // 5) % 256 for i in range(num_tokens))


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Exactly so many of the likeliest tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


class Bystander:
    """Streams one greedy request after another on a thread, and checks every token.

    On leaving, all of them must have been served and right, and at least one.
    """

    def __init__(self, stack: Stack, reference: Transformers) -> None:
        self._stack = stack
        self._prompt = token_prompt(20, salt=99)
        self._expected = reference.greedy(self._prompt, BESIDE_TOKENS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failures: list[str] = []
        self.num_served = 0

    def _run(self) -> None:
        with self._stack.client() as client:
            while not self._stopping.is_set() and not self.failures:
                try:
                    answer = client.generate(self._prompt, greedy(BESIDE_TOKENS), timeout_s=60)
                except Exception as error:
                    self.failures.append(repr(error))
                    return
                wrong = self._expected.disagreement(answer.candidates[0].token_ids)
                if wrong:
                    self.failures.append(wrong)
                self.num_served += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        if exc_type is None:
            assert not self.failures
            assert self.num_served
