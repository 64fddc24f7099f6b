"""Drawing tokens from logits, one row at a time and each row on its own.

The order is temperature, top_k, top_p, min_p: logits are divided by the temperature; the top_k
largest stay; of those, the smallest set whose share of their probability reaches top_p; of
those, the tokens at least min_p times as probable as the most probable one. What stays is
renormalised. Equal logits count as ordered by token id, the lower first.

A draw is a function of the row's logits, the sampling parameters and (seed, sample_index,
position) alone: no state, no neighbours. The random number comes from Philox4x64-10, a
counter-based generator (Salmon et al., 2011), keyed by (seed, sample_index), at counter
position + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_worker.step import F32, I32, Sampling

# Ids within this of the largest logit (after the temperature), so with at least e^-8 of the
# largest probability, are sorted first: nearly every draw is decided among them.
HEAD_GAP = 8.0

# Outside these a float32 quotient loses its meaning; within them a smaller temperature is greedy
# to the last bit and a larger one uniform.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


class NonFiniteLogitsError(ArithmeticError):
    """A row of logits holds nothing that could be drawn: NaN or -inf everywhere."""


def sample(
    logits: F32,
    samplings: Sequence[Sampling],
    positions: npt.NDArray[np.int64],
    num_samples: I32,
    num_token_ids: int,
) -> tuple[I32, F32]:
    """Draw num_samples[r] tokens from each row r of `logits`, sample indices counting up.

    logits: float32[R, V], left as they are. positions: int64[R], of the token being drawn in its
    sequence. Ids from `num_token_ids` on (a head padded beyond the tokenizer) are never drawn.
    Returns ids int32[sum(num_samples)] and their log-probabilities under the row's unmodified
    logits, float32. Raises NonFiniteLogitsError.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    for given, sampling, position, count in zip(
        logits, samplings, positions.tolist(), num_samples.tolist(), strict=True
    ):
        row, normaliser = _normalised(given)
        drawable = _drawable(row, num_token_ids, sampling, position)
        drawn = _draw(drawable, sampling, position, count)
        token_ids.extend(drawn)
        logprobs.extend(float(row[token_id]) - normaliser for token_id in drawn)
    return np.array(token_ids, np.int32), np.array(logprobs, np.float32)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The random number of one draw, in [0, 1) with 53 bits."""
    generator = np.random.Philox(
        key=np.array([seed, sample_index], np.uint64),
        counter=np.array([position, 0, 0, 0], np.uint64),
    )
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def _normalised(row: F32) -> tuple[F32, float]:
    """The row with its NaNs never drawn and its infinities finite, and log(sum(exp(row)))."""
    largest = row.max()
    if not np.isfinite(largest):
        bound = float(np.finfo(np.float32).max)
        row = np.nan_to_num(row, nan=-np.inf, posinf=bound, neginf=-np.inf)
        largest = row.max()
        if largest == -np.inf:
            raise NonFiniteLogitsError("every logit of a row is NaN or -inf")
    with np.errstate(over="ignore"):
        total = np.exp(row - largest).sum()
    return row, float(largest) + float(np.log(total))


def _drawable(row: F32, num_token_ids: int, sampling: Sampling, position: int) -> F32:
    """The first `num_token_ids`, those that must not be drawn at this position at -inf."""
    if sampling.masked_token_ids and position < sampling.masked_before_position:
        row = row.copy()
        row[list(sampling.masked_token_ids)] = -np.inf
    row = row[:num_token_ids]
    if row.max() == -np.inf:
        raise NonFiniteLogitsError("no token is left to draw: all are masked or have no chance")
    return row


def _draw(row: F32, sampling: Sampling, position: int, count: int) -> list[int]:
    """`count` ids from `row`, whose -inf entries are never drawn."""
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return [int(row.argmax())] * count
    temperature = np.float32(np.clip(sampling.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE))
    with np.errstate(over="ignore", under="ignore"):
        scaled = (row - row.max()) / temperature
        weights = np.exp(scaled)
    numbers = np.array(
        [uniform(sampling.seed, sampling.sample_index + j, position) for j in range(count)]
    )
    kept = _kept(scaled, weights, sampling, float(numbers.max()))
    # Rounding may push a number onto the end, and ids of weight 0 stand at the end.
    last = np.searchsorted(kept.cumulative, kept.cumulative[-1], side="left")
    picks = np.searchsorted(kept.cumulative, numbers * kept.total, side="right")
    return kept.ids[np.minimum(picks, last)].tolist()


@dataclass(frozen=True)
class _Kept:
    """What may be drawn, most probable first; possibly only a head long enough for the draw.

    ids: int64[K]; cumulative: float64[K], running sum of their weights; total: that of all.
    """

    ids: npt.NDArray[np.int64]
    cumulative: npt.NDArray[np.float64]
    total: float


def _kept(scaled: F32, weights: F32, sampling: Sampling, largest_number: float) -> _Kept:
    """The ids that top_k, top_p and min_p leave: always a prefix of the sorted row.

    Without top_k, the head of the row is sorted first. It is enough when the prefix ends in it,
    or when nothing is filtered and the draw falls into it; else the row is sorted whole, with the
    same outcome.
    """
    if 0 < sampling.top_k < scaled.size:
        kth = scaled.size - sampling.top_k
        ids = _sorted_ids(scaled, float(np.partition(scaled, kth)[kth]))[: sampling.top_k]
        return _filtered(ids, weights, None, sampling)
    row_total = float(weights.sum())
    filters = sampling.top_p < 1.0 or sampling.min_p > 0.0
    for lowest in (-HEAD_GAP, -np.inf):
        ids = _sorted_ids(scaled, lowest)
        kept = _filtered(ids, weights, row_total, sampling)
        if filters:
            is_decided = kept.ids.size < ids.size
        else:
            is_decided = largest_number * row_total < kept.cumulative[-1]
        if is_decided or ids.size == scaled.size:
            return kept
    raise AssertionError("unreachable: the last round sorts the whole row")


def _filtered(
    ids: npt.NDArray[np.intp], weights: F32, total: float | None, sampling: Sampling
) -> _Kept:
    """What top_p (a share of `total`, of these ids' weight when None) and min_p leave of `ids`.

    All of them when neither ends among these, which then have `total` in common with the rest.
    """
    sorted_weights = weights[ids]
    cumulative = np.cumsum(sorted_weights, dtype=np.float64)
    total = float(cumulative[-1]) if total is None else total
    num_kept = ids.size
    if sampling.top_p < 1.0:
        reached = int(np.searchsorted(cumulative, sampling.top_p * total, side="left"))
        num_kept = min(num_kept, reached + 1)
    if sampling.min_p > 0.0:
        probable = sorted_weights >= sampling.min_p * sorted_weights[0]
        num_kept = min(num_kept, int(np.count_nonzero(probable)))
    if num_kept < ids.size:
        total = float(cumulative[num_kept - 1])
    return _Kept(ids[:num_kept], cumulative[:num_kept], total)


def _sorted_ids(scaled: F32, lowest: float) -> npt.NDArray[np.intp]:
    """Ids of the entries >= `lowest` by descending entry, equal ones by ascending id.

    `scaled` is at most 0, so the bits of its absolute value order it; with the id in the low half
    a plain sort of integers does the rest, many times faster than a stable argsort.
    """
    ids = np.flatnonzero(scaled >= lowest)
    keys = np.abs(scaled[ids]).view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)
