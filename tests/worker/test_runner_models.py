"""The runner against transformers' own forward and generate, on tiny random models.

Pools are filled with NaN beforehand, so every comparison also shows that no slot is read before
it was written (b46).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.step import Sampling
from tests.worker.tiny import (
    CONFIGS,
    Driver,
    eager_logits,
    eager_model,
    greedy_ids,
    load_tiny,
    make_runner,
    random_prompt,
)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, model_folders: dict[str, Path]) -> tuple[Any, Any]:
    folder = model_folders[request.param]
    return load_tiny(folder), eager_model(folder)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits.copy()), dim=-1).numpy()


def test_chunked_prefill_and_decode_equal_generate(pair):
    loaded, eager = pair
    prompt = random_prompt(1, 23)
    expected = greedy_ids(eager, prompt, 12)
    for chunks in ([23], [1, 22], [7, 9, 7], [4, 4, 4, 4, 4, 3]):
        driver = Driver(make_runner(loaded), seed=len(chunks))
        sequence = driver.add(prompt)
        for size in chunks[:-1]:
            assert driver.step([(sequence, size, 0)]) == [[]]
        driver.step([(sequence, chunks[-1], 1)])
        for _ in range(11):
            driver.step([(sequence, 1, 1)])
        assert sequence.tokens[23:] == expected, chunks


def test_mixed_batch_of_prefills_and_decodes_equals_each_alone(pair):
    loaded, eager = pair
    driver = Driver(make_runner(loaded))
    prompts = [random_prompt(10 + i, length) for i, length in enumerate((5, 17, 31, 2))]
    expected = [greedy_ids(eager, prompt, 6) for prompt in prompts]
    a, b, c, d = (driver.add(prompt) for prompt in prompts)
    driver.step([(a, 5, 1)])
    driver.step([(b, 9, 0), (a, 1, 1)])
    driver.step([(a, 1, 1), (c, 31, 1), (b, 8, 1), (d, 1, 0)])
    driver.step([(d, 1, 1), (b, 1, 1), (a, 1, 1), (c, 1, 1)])
    while any(len(s.tokens) < len(p) + 6 for s, p in zip((a, b, c, d), prompts, strict=True)):
        driver.step([(s, 1, 1) for s in (c, a, d, b)])
    for sequence, prompt, tokens in zip((a, b, c, d), prompts, expected, strict=True):
        assert sequence.tokens[len(prompt) : len(prompt) + 6] == tokens


def test_logprobs_are_those_of_the_unmodified_logits(pair):
    loaded, eager = pair
    prompt = random_prompt(3, 11)
    expected = log_softmax(eager_logits(eager, prompt)[-1])
    hot = Sampling(temperature=5.0, top_k=9, seed=4)
    driver = Driver(make_runner(loaded))
    greedy, sampled = driver.add(prompt), driver.add(prompt, hot)
    output = driver.execute([(greedy, 11, 1), (sampled, 11, 5)])
    assert output.sampled_token_ids[0] == expected.argmax()
    assert output.sampled_token_ids.size == 6
    assert len(set(output.sampled_token_ids[1:].tolist())) > 1
    np.testing.assert_allclose(
        output.logprobs, expected[output.sampled_token_ids], rtol=1e-4, atol=1e-4
    )


def test_forks_diverge_on_copied_blocks_without_touching_the_parent(pair):
    loaded, eager = pair
    driver = Driver(make_runner(loaded))
    parent = driver.add(random_prompt(5, 10))  # two and a half blocks of four
    driver.step([(parent, 10, 1)])
    children = [driver.fork(parent) for _ in range(2)]
    for child, first in zip(children, (20, 30), strict=True):
        child.tokens[10] = first
    for _ in range(8):
        driver.step([(s, 1, 1) for s in (children[0], parent, children[1])])
    for sequence in (parent, *children):
        assert sequence.tokens[11:] == greedy_ids(eager, sequence.tokens[:11], 8)


def test_a_sequence_reads_blocks_its_sibling_writes_in_the_same_step(pair):
    loaded, eager = pair
    driver = Driver(make_runner(loaded))
    prompt = random_prompt(6, 10)
    first, second = driver.add(prompt), driver.add(prompt)
    first.block_ids = [int(driver.free.pop()) for _ in range(3)]
    second.block_ids = [*first.block_ids[:2], int(driver.free.pop())]
    second.num_computed_tokens = 8  # as of this step: `first` computes them beside it
    driver.step([(second, 2, 1), (first, 10, 1)])
    assert first.tokens[10:] == second.tokens[10:] == greedy_ids(eager, prompt, 1)


def test_a_step_without_rows_carries_out_its_copies_and_nothing_else(pair):
    loaded, _ = pair
    driver = Driver(make_runner(loaded))
    sequence = driver.add(random_prompt(7, 8))
    driver.step([(sequence, 8, 1)])
    spare = int(driver.free.pop())
    driver.copies = [(sequence.block_ids[1], spare)]
    output = driver.execute([])
    assert output.sampled_token_ids.size == 0
    for layer in driver.runner.kv.layers:
        assert torch.equal(layer.keys[spare], layer.keys[sequence.block_ids[1]])
        assert not layer.values[spare].isnan().any()


def test_b28_greedy_tokens_survive_recomputation_in_other_blocks(pair):
    loaded, eager = pair
    prompt = random_prompt(8, 13)
    expected = greedy_ids(eager, prompt, 10)
    driver = Driver(make_runner(loaded))
    sequence = driver.add(prompt)
    driver.step([(sequence, 13, 1)])
    for _ in range(4):
        driver.step([(sequence, 1, 1)])
    # Preempted by recompute: the blocks are lost, the tokens stay.
    sequence.block_ids, sequence.num_computed_tokens, sequence.is_known = [], 0, False
    driver.step([(sequence, 9, 0)])
    driver.step([(sequence, len(sequence.tokens) - 9, 1)])
    for _ in range(4):
        driver.step([(sequence, 1, 1)])
    assert sequence.tokens[13:] == expected


def test_window_of_every_size_around_a_block(tmp_path):
    """b48: sliding windows of k·block ± 1, prefilled in chunks and decoded."""
    from transformers import MistralConfig

    from tests.worker.tiny import COMMON, save_model

    prompt = random_prompt(9, 21)
    for window in (1, 3, 4, 5, 7, 8, 9):
        config = MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=window)
        source = save_model(config, tmp_path / f"window-{window}")
        loaded = load_tiny(source.path)
        assert {spec.sliding_window for spec in loaded.layer_specs} == {window}
        driver = Driver(make_runner(loaded))
        sequence = driver.add(prompt)
        driver.step([(sequence, 10, 0)])
        driver.step([(sequence, 11, 1)])
        for _ in range(6):
            driver.step([(sequence, 1, 1)])
        assert sequence.tokens[21:] == greedy_ids(eager_model(source.path), prompt, 7), window


def test_bfloat16_stays_near_float32(model_folders):
    folder = model_folders["llama-gqa"]
    loaded = load_tiny(folder, dtype=torch.bfloat16)
    driver = Driver(make_runner(loaded))
    prompt = random_prompt(2, 20)
    sequence = driver.add(prompt)
    output = driver.execute([(sequence, 20, 1)])
    expected = log_softmax(eager_logits(eager_model(folder), prompt)[-1])
    assert loaded.model.dtype == driver.runner.kv.dtype == torch.bfloat16
    assert abs(output.logprobs[0] - expected[output.sampled_token_ids[0]]) < 0.3
