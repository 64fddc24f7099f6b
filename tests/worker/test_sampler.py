"""Draws: against a naive sampler, in distribution, and at the edges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.sampler import NonFiniteLogitsError, sample, uniform
from model_worker.step import Sampling


def draw(
    logits: np.ndarray, sampling: Sampling, position: int = 5, count: int = 1, limit: int = 0
) -> list[int]:
    row = np.asarray(logits, np.float32)[None]
    ids, logprobs = sample(
        row, [sampling], np.array([position]), np.array([count], np.int32), limit or row.shape[1]
    )
    assert np.isfinite(logprobs).all()
    return ids.tolist()


def naive_probabilities(logits: list[float], sampling: Sampling) -> list[tuple[int, float]]:
    """(id, probability) of what may be drawn, most probable first, by the documented order."""
    scaled = [x / sampling.temperature for x in logits]
    largest = max(scaled)
    weights = [math.exp(x - largest) for x in scaled]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < sampling.top_k < len(logits):
        order = order[: sampling.top_k]
    total = math.fsum(weights[i] for i in order)
    nucleus, mass = [], 0.0
    for i in order:
        nucleus.append(i)
        mass += weights[i] / total
        if sampling.top_p < 1.0 and mass >= sampling.top_p:
            break
    kept = [i for i in nucleus if weights[i] >= sampling.min_p * weights[nucleus[0]]]
    total = math.fsum(weights[i] for i in kept)
    return [(i, weights[i] / total) for i in kept]


def naive_draw(logits: list[float], sampling: Sampling, number: float) -> set[int]:
    """Ids that inverting the distribution at `number` may give, allowing for rounding."""
    allowed = set()
    for slack in (1 - 1e-6, 1 + 1e-6) if sampling.top_p < 1.0 else (1.0,):
        mass = 0.0
        nearly = replace(sampling, top_p=sampling.top_p * slack)
        for token_id, probability in naive_probabilities(logits, nearly):
            if mass - 1e-5 <= number <= mass + probability + 1e-5:
                allowed.add(token_id)
            mass += probability
    return allowed


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-60, 60).map(lambda x: x / 4), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0, 50.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 41, 10**6]),
    top_p=st.sampled_from([1e-8, 0.1, 0.5, 0.9, 0.99999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
)
def test_every_draw_is_one_the_naive_sampler_allows(
    logits, temperature, top_k, top_p, min_p, seed, position
):
    sampling = Sampling(temperature, top_k, top_p, min_p, seed=seed, sample_index=3)
    drawn = draw(np.array(logits), sampling, position, count=3)
    for j, token_id in enumerate(drawn):
        assert token_id in naive_draw(logits, sampling, uniform(seed, 3 + j, position))


def test_a_large_row_sorted_in_part_equals_one_sorted_whole():
    """Draws decided in the head of the row and draws that need all of it."""
    rng = np.random.default_rng(0)
    for spread in (0.3, 2.0, 6.0):
        logits = (rng.standard_normal(2000) * spread).astype(np.float32)
        for sampling in (
            Sampling(1.0),
            Sampling(0.5, top_p=0.7),
            Sampling(1.0, top_p=0.9999),
            Sampling(1.5, min_p=1e-6),
            Sampling(1.0, top_k=1500, top_p=0.95),
        ):
            for position in range(8):
                number = uniform(0, 0, position)
                assert draw(logits, sampling, position)[0] in naive_draw(
                    logits.tolist(), sampling, number
                )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(1.0, top_p=0.999),
        Sampling(1.0, min_p=1e-5),
        Sampling(1.0, top_k=4000),
    ],
)
def test_a_tail_far_below_the_head_is_drawn_as_often_as_its_mass(sampling):
    """One id at e^9 times the weight of each of 5000 others, which have 38 % among them."""
    logits = np.zeros(5001, np.float32)
    logits[7] = 9.0
    drawn = [draw(logits, sampling, position)[0] for position in range(400)]
    expected = 1 - dict(naive_probabilities(logits.tolist(), sampling))[7]
    share = sum(token_id != 7 for token_id in drawn) / 400
    assert abs(share - expected) < 0.1  # four standard deviations
    assert len(set(drawn)) > 100


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5, top_k=4),
        Sampling(2.0, top_p=0.8),
        Sampling(1.0, min_p=0.2),
        Sampling(1.3, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
def test_frequencies_follow_the_distribution(sampling):
    """Chi-square over 4000 positions with fixed seeds; far beyond its 99.99 % point fails."""
    logits = [1.0, 0.2, 2.0, -1.0, 1.0, 0.0, 1.7, -3.0]
    expected = dict(naive_probabilities(logits, sampling))
    drawn = [draw(np.array(logits), sampling, position)[0] for position in range(4000)]
    counts = np.bincount(drawn, minlength=len(logits))
    assert {i for i in range(len(logits)) if counts[i]} <= expected.keys()
    chi_square = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in expected.items())
    # 99.99 % points of chi-square for 1 .. 7 degrees of freedom.
    points = [15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]
    assert chi_square < points[len(expected) - 2]


def test_uniform_numbers_are_uniform_and_independent_of_every_key():
    axes = [
        [uniform(1, 0, position) for position in range(4000)],
        [uniform(1, index, 9) for index in range(4000)],
        [uniform(seed, 0, 9) for seed in range(4000)],
    ]
    for numbers in axes:
        assert 0.0 <= min(numbers) < max(numbers) < 1.0
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 50.8  # 99.99 % point for 19
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.06


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10 (Salmon et al., 2011, §3.3) in plain integers."""
    mask = 2**64 - 1
    for number in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        k0 = (key[0] + number * 0x9E3779B97F4A7C15) & mask
        k1 = (key[1] + number * 0xBB67AE8584CAA73B) & mask
        counter = (high1 ^ counter[1] ^ k0, low1, high0 ^ counter[3] ^ k1, low0)
    return counter


def test_the_random_numbers_never_change():
    """Another machine, version or run must draw the same tokens: Philox4x64-10 as published."""
    # The known answer for counter 0 and key 0 of the authors' test vectors (Random123).
    assert philox((0, 0, 0, 0), (0, 0))[0] == 0x16554D9ECA36314C
    for seed, sample_index, position in ((0, 0, 0), (2**64 - 1, 7, 123), (12345, 2**32, 10**6)):
        word = philox((position + 1, 0, 0, 0), (seed, sample_index))[0]
        assert uniform(seed, sample_index, position) == (word >> 11) / 2**53


def test_b26_b27_a_draw_depends_on_its_own_row_and_keys_alone():
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((6, 300)) * 2).astype(np.float32)
    samplings = [Sampling(1.0, seed=i, sample_index=i, top_p=0.9) for i in range(6)]
    positions = np.arange(6) * 10
    together, logprobs = sample(logits, samplings, positions, np.full(6, 2, np.int32), 300)
    for i in range(6):
        alone, alone_logprobs = sample(
            logits[i : i + 1], samplings[i : i + 1], positions[i : i + 1], np.array([2]), 300
        )
        assert alone.tolist() == together[2 * i : 2 * i + 2].tolist()
        assert alone_logprobs.tolist() == logprobs[2 * i : 2 * i + 2].tolist()
    # Candidates j of one row are those with sample index + j, drawn singly.
    flat = np.zeros(300, np.float32)
    several = draw(flat, Sampling(1.0, seed=5, sample_index=2), count=8)
    singly = [draw(flat, Sampling(1.0, seed=5, sample_index=2 + j))[0] for j in range(8)]
    assert several == singly
    assert len(set(several)) > 4


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id():
    logits = np.array([0.0, 3.0, 1.0, 3.0], np.float32)
    assert draw(logits, Sampling(0.0, top_p=0.1), count=3) == [1, 1, 1]
    assert draw(logits, Sampling(5.0, top_k=1)) == [1]
    assert draw(logits, Sampling(1e-300)) in ([1], [3])


def test_b36_top_k_and_top_p_at_their_edges():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    everything = {1, 3, 2, 0}

    def support(**sampling) -> set[int]:
        return {draw(logits, Sampling(1.0, **sampling), p)[0] for p in range(300)}

    for top_k in (0, -1, 4, 5, 2**31 - 1):
        assert support(top_k=top_k) == everything
    assert support(top_k=2) == {1, 3}
    assert support(top_p=1.0) == everything
    assert support(top_p=1e-8) == {1}
    assert support(top_p=0.39) == {1}
    assert support(top_p=0.41) == {1, 3}
    assert support(top_p=0.95) == everything
    assert support(min_p=1.0) == {1}
    assert support(min_p=0.6) == {1, 3}
    assert support(min_p=0.0) == everything


def test_equal_logits_at_the_edge_of_top_k_go_by_id():
    logits = np.zeros(10, np.float32)
    assert {draw(logits, Sampling(1.0, top_k=3), p)[0] for p in range(200)} == {0, 1, 2}


def test_b38_masked_ids_are_never_drawn_before_their_position():
    logits = np.array([9.0, 8.0, 1.0, 0.0], np.float32)
    for temperature in (0.0, 1.0, 1e300):
        masked = Sampling(temperature, masked_token_ids=(0, 1), masked_before_position=7)
        assert not {draw(logits, masked, 6, count=50)[0]} & {0, 1}
        assert not set(draw(logits, masked, 0, count=50)) & {0, 1}
    masked = Sampling(0.0, masked_token_ids=(0, 1), masked_before_position=7)
    assert draw(logits, masked, 6) == [2]
    assert draw(logits, masked, 7) == [0]
    # The log-probability stays that under the unmodified logits.
    _, logprobs = sample(logits[None], [masked], np.array([6]), np.array([1]), 4)
    assert logprobs[0] == pytest.approx(1.0 - np.log(np.exp(logits.astype(float)).sum()), abs=1e-5)


def test_b34_ids_beyond_the_tokenizer_are_never_drawn():
    logits = np.array([0.0, 1.0, 50.0, 60.0], np.float32)
    assert draw(logits, Sampling(0.0), limit=2) == [1]
    assert set(draw(logits, Sampling(1.0), count=100, limit=2)) == {0, 1}
    # A request may mask such an id as well: its own stop id, say.
    masked = Sampling(0.0, masked_token_ids=(1, 3), masked_before_position=9)
    assert draw(logits, masked, limit=2) == [0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e300])
def test_b39_extreme_temperatures_and_logits_never_leave_the_support(temperature):
    low = np.finfo(np.float32).min
    logits = np.array([low, 1e30, -np.inf, 1e30, 0.0, np.nan], np.float32)
    drawn = set(draw(logits, Sampling(temperature), count=200))
    assert drawn <= {0, 1, 3, 4}
    if temperature <= 1.0:
        assert drawn == {1, 3}
    ordinary = np.linspace(-5, 5, 11, dtype=np.float32)
    drawn = set(draw(ordinary, Sampling(temperature), count=300))
    if temperature < 1e-2:
        assert drawn == {10}
    if temperature > 100:
        assert drawn == set(range(11))


def test_all_the_mass_in_one_token():
    logits = np.array([-1e4, 0.0, -1e4], np.float32)
    assert set(draw(logits, Sampling(1.0), count=300)) == {1}
    assert set(draw(logits, Sampling(1.0, top_p=0.999999), count=300)) == {1}


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_numbers_at_the_ends_of_the_interval(monkeypatch, number):
    monkeypatch.setattr("model_worker.sampler.uniform", lambda *_: number)
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(3000) * 4).astype(np.float32)
    logits[100:200] = -np.inf
    for sampling in (Sampling(1.0), Sampling(0.3, top_p=0.9), Sampling(1.0, top_k=7)):
        (token_id,) = draw(logits, sampling)
        assert np.isfinite(logits[token_id])
    if number == 0.0:
        assert draw(logits, Sampling(1.0)) == [int(logits.argmax())]


@pytest.mark.parametrize("fill", [np.nan, -np.inf])
def test_a_row_without_any_chance_is_an_error_not_a_token(fill):
    with pytest.raises(NonFiniteLogitsError):
        draw(np.full(5, fill, np.float32), Sampling(1.0))
    all_masked = Sampling(0.0, masked_token_ids=(0, 1), masked_before_position=9)
    with pytest.raises(NonFiniteLogitsError):
        draw(np.zeros(2, np.float32), all_masked)
