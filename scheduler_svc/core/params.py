"""Sampling parameters: their ranges as data, and the one place where they are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MAX_CANDIDATES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
UINT64_MAX = 2**64 - 1
INT32_MAX = 2**31 - 1


class InvalidRequestError(ValueError):
    """A request that cannot be served as asked. `reason` is a key of the error table."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Range:
    """An allowed interval; `low_open`: the low end itself is not allowed."""

    low: float
    high: float
    default: float | int | None
    meaning: str
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        if math.isnan(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low}, {self.high}]"


RANGES: dict[str, Range] = {
    "temperature": Range(0.0, 100.0, 1.0, "0 is greedy; below 1e-6 counts as 0"),
    "top_k": Range(-1, INT32_MAX, 0, "0, -1 or more than the vocabulary: all tokens"),
    "top_p": Range(0.0, 1.0, 1.0, "mass of the most likely tokens kept", low_open=True),
    "min_p": Range(0.0, 1.0, 0.0, "least probability, relative to the likeliest token"),
    "seed": Range(0, UINT64_MAX, None, "drawn at arrival when absent"),
    "n": Range(1, MAX_CANDIDATES, 1, "candidates for the one prompt"),
    "first_sample_index": Range(0, INT32_MAX, 0, "sample index of candidate 0"),
    "max_tokens": Range(1, INT32_MAX, None, "absent: all that the model's length leaves"),
    "min_tokens": Range(0, INT32_MAX, 0, "no stop id or stop string counts before"),
}

PRIORITY = Range(-8, 8, 0, "each step counts as having come 32 requests earlier")


@dataclass(frozen=True)
class SamplingParams:
    """How a request is decoded. Built by `resolve`, so every field is within its range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    first_sample_index: int = 0
    max_tokens: int = 1
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class ModelLimits:
    """What a request is checked against. Lengths in tokens."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int


def check_ranges(params: SamplingParams) -> None:
    """Raises InvalidRequestError naming the first value outside its range, and the range."""
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value not in allowed:
            raise InvalidRequestError(
                "INVALID_PARAMETER", f"{name} is {value}; it must be in {allowed}"
            )
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"min_tokens is {params.min_tokens}; it must be in [0, {params.max_tokens}],"
            " the last being max_tokens",
        )


def check_stops(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError for too many, too long or empty stops, or a foreign id."""
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"{len(params.stop)} stop strings were given; at most {MAX_STOP_STRINGS} are allowed",
        )
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                "INVALID_PARAMETER",
                f"a stop string has {len(text)} characters; it must have 1 to"
                f" {MAX_STOP_STRING_CHARS}",
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"{len(params.stop_token_ids)} stop token ids were given; at most"
            f" {MAX_STOP_TOKEN_IDS} are allowed",
        )
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)


def check_vocabulary(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequestError naming the first id that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        at, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{name}[{at}] is {token}; this model's token ids are 0 to {vocab_size - 1}",
        )


def resolve(
    params: SamplingParams,
    *,
    max_tokens: int | None,
    prompt_token_ids: tuple[int, ...],
    limits: ModelLimits,
) -> SamplingParams:
    """Check a request whole and fill in `max_tokens`.

    Raises InvalidRequestError; the message names the value and what is allowed.
    """
    num_prompt_tokens = len(prompt_token_ids)
    if not num_prompt_tokens:
        raise InvalidRequestError(
            "EMPTY_PROMPT", "the prompt has 0 tokens; it must have at least 1"
        )
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            "PROMPT_TOO_LONG",
            f"the prompt has {num_prompt_tokens} tokens; this model attends to"
            f" {limits.max_model_len}, so a prompt may have at most {limits.max_model_len - 1}",
        )
    # Not before: its cost grows with the prompt.
    check_vocabulary("prompt_token_ids", prompt_token_ids, limits.vocab_size)
    params = replace(params, max_tokens=room if max_tokens is None else max_tokens)
    check_ranges(params)
    check_stops(params, limits.vocab_size)
    if params.max_tokens > room:
        raise InvalidRequestError(
            "PROMPT_TOO_LONG",
            f"{num_prompt_tokens} prompt tokens + max_tokens {params.max_tokens} exceed the"
            f" model's length of {limits.max_model_len}; max_tokens may be at most {room} here",
        )
    if params.n > limits.max_num_seqs:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"n is {params.n}; this scheduler runs at most {limits.max_num_seqs} sequences",
        )
    blocks_needed = -(-num_prompt_tokens // limits.block_size)
    if blocks_needed > limits.num_blocks:
        raise InvalidRequestError(
            "PROMPT_EXCEEDS_POOL",
            f"the prompt of {num_prompt_tokens} tokens needs {blocks_needed} KV blocks; the pool"
            f" has {limits.num_blocks} ({limits.num_blocks * limits.block_size} tokens)",
        )
    return params
