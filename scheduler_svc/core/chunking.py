"""Chunked prefill: how the tokens of a step are shared out among prompts that are computed.

First come, first served; but a part is kept for short ones, so that a prompt behind a very long one
does not wait for all of it. What nobody else can use goes to the first again.
"""

from __future__ import annotations

from collections.abc import Sequence

# Of the tokens that prompts get in a step, when there is more than one of them.
SHARE_OF_SHORT_PROMPTS = 0.25


def reserved_for_short(num_tokens: int, num_prompts: int) -> int:
    """Tokens of `num_tokens` that the first comers leave to others."""
    return int(num_tokens * SHARE_OF_SHORT_PROMPTS) if num_prompts > 1 else 0


def first_shares(wanted: Sequence[int], num_tokens: int, num_reserved: int) -> list[int]:
    """Tokens for each prompt that wants so many, in order of arrival; at most `num_tokens` in all.

    `num_reserved` of them go only to prompts that they complete, the shortest first.
    """
    shares = hand_out(wanted, [0] * len(wanted), num_tokens - num_reserved)
    left = num_tokens - sum(shares)
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i] - shares[i]):
        missing = wanted[i] - shares[i]
        if missing > left:
            break
        shares[i] += missing
        left -= missing
    return shares


def hand_out(wanted: Sequence[int], shares: Sequence[int], num_tokens: int) -> list[int]:
    """The shares with `num_tokens` more, in order of arrival, as far as they are wanted."""
    result = []
    for want, share in zip(wanted, shares, strict=True):
        more = min(want - share, num_tokens)
        result.append(share + more)
        num_tokens -= more
    return result
