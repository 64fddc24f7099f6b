"""Decoding strategies: how many tokens a row draws, and what becomes of them.

Parallel sampling (paper §4.4): the prompt is computed once; its last row draws the first
token of every candidate, and the candidates fork there, sharing all blocks of the prompt.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from scheduler_svc.core.sequence import Sequence


class Extend(NamedTuple):
    """The sequence takes one token."""

    sequence: Sequence
    token_id: int
    logprob: float


class ForkInto(NamedTuple):
    """The sequence takes token_ids[0]; each further token makes one child."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class DecodingStrategy(Protocol):
    """What a finished row means for the sequence it belongs to."""

    def num_samples(self, sequence: Sequence) -> int: ...

    def decide(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> Extend | ForkInto: ...


class ParallelSampling:
    """n candidates of one prompt (n = 1: plain sampling; temperature 0: greedy)."""

    def num_samples(self, sequence: Sequence) -> int:
        return 1 if sequence.group.forked else sequence.group.request.params.n

    def decide(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> Extend | ForkInto:
        if len(token_ids) == 1:
            return Extend(sequence, token_ids[0], logprobs[0])
        return ForkInto(sequence, token_ids, logprobs)
