"""n candidates of one prompt: the same as n single runs, and the prompt is held once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient, Client, Generation, SamplingParams
from octavo.admin_types import SequenceStatus, SequenceView
from tests.system.models import TINY_WORKER
from tests.system.requests import token_prompt
from tests.system.stack import Stack, wait_until

SEED = 20240607
BLOCK_SIZE = 16
# Six full blocks and four tokens of a seventh.
PROMPT = token_prompt(100)
NUM_FULL = len(PROMPT) // BLOCK_SIZE


@pytest.fixture(scope="module")
def fresh(tiny_model: Path) -> Iterator[Stack]:
    """A pool whose peak is this module's own."""
    with Stack(model=tiny_model, num_blocks=128, worker=TINY_WORKER) as stack:
        yield stack


def sampling(**more: Any) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "seed": SEED,
        "max_tokens": 44,
        "ignore_eos": True,
        **more,
    }
    return SamplingParams(**fields)


def tokens(answer: Generation) -> list[tuple[int, ...]]:
    return [candidate.token_ids for candidate in answer.candidates]


async def at_once(
    address: str, params: list[SamplingParams], salts: tuple[str, ...]
) -> list[Generation]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(
                client.generate(PROMPT, each, cache_salt=salt)
                for each, salt in zip(params, salts, strict=True)
            )
        )


def test_b27_four_candidates_are_four_single_runs_in_fewer_blocks(fresh: Stack) -> None:
    singles = [sampling(first_sample_index=i) for i in range(4)]
    with fresh.client() as client:
        together = tokens(client.generate(PROMPT, sampling(n=4)))
        peak_together = fresh.wait_until_empty().peak_in_use_blocks
        alone = [tokens(client.generate(PROMPT, params))[0] for params in singles]
        again = tokens(client.generate(PROMPT, sampling(n=4)))
    assert fresh.wait_until_empty().peak_in_use_blocks == peak_together
    four_at_once = asyncio.run(at_once(fresh.address, singles, ("", "", "", "")))
    # The first to come computes the prompt, and the others hold its blocks, as siblings do.
    assert fresh.wait_until_empty().peak_in_use_blocks == peak_together
    strangers = asyncio.run(at_once(fresh.address, singles, ("a", "b", "c", "d")))
    peak_at_once = fresh.wait_until_empty().peak_in_use_blocks

    assert together == alone == again
    assert together == [tokens(answer)[0] for answer in four_at_once]
    assert together == [tokens(answer)[0] for answer in strangers]
    assert len(set(together)) == 4
    # 144 tokens: nine blocks each, and six of them the prompt's, held once.
    assert peak_together <= NUM_FULL + 4 * 3
    assert peak_at_once > peak_together * 3 // 2


def test_a_seed_drawn_by_the_server_repeats_the_run(fresh: Stack) -> None:
    with fresh.client() as client:
        first = client.generate(PROMPT, sampling(seed=None, n=2))
        second = client.generate(PROMPT, sampling(seed=first.seed, n=2))
        third = client.generate(PROMPT, sampling(seed=None, n=2))
    assert tokens(second) == tokens(first)
    assert third.seed != first.seed
    assert tokens(third) != tokens(first)


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 32])
def test_candidates_at_block_borders_are_single_runs(fresh: Stack, num_prompt_tokens: int) -> None:
    prompt = token_prompt(num_prompt_tokens, salt=3)
    with fresh.client() as client:
        together = tokens(client.generate(prompt, sampling(n=3, first_sample_index=5)))
        alone = [
            tokens(client.generate(prompt, sampling(first_sample_index=i)))[0] for i in (5, 6, 7)
        ]
    assert together == alone


def test_the_prompts_full_blocks_are_held_once(fresh: Stack) -> None:
    with Client(fresh.address) as client, fresh.inspector() as inspector:

        def running() -> list[SequenceView]:
            views = inspector.block_tables("shared").sequences
            return [view for view in views if view.status is SequenceStatus.RUNNING]

        params = sampling(n=4, max_tokens=400)
        with client.stream(PROMPT, params, request_id="shared") as chunks:
            next(chunks)
            wait_until(lambda: len(running()) == 4, "four candidates run")
            views = running()
    prefixes = {view.block_ids[:NUM_FULL] for view in views}
    tails = [block for view in views for block in view.block_ids[NUM_FULL:]]
    assert len(prefixes) == 1
    for view in views:
        assert view.ref_counts[:NUM_FULL] == (4,) * NUM_FULL
    # Behind the prompt each writes blocks of its own. (The seventh is shared until it is copied.)
    assert len(set(tails)) >= 4
    assert not set(tails) & set(views[0].block_ids[:NUM_FULL])
    fresh.wait_until_empty()


def test_an_early_end_of_one_candidate_leaves_the_others_alone(fresh: Stack) -> None:
    """Stop ids end candidates at different moments; each is still its single run."""
    params: dict[str, Any] = {"stop_token_ids": tuple(range(0, 256, 8)), "max_tokens": 120}
    with fresh.client() as client:
        together = client.generate(PROMPT, sampling(n=6, **params))
        alone = [
            client.generate(PROMPT, sampling(first_sample_index=i, **params)).candidates[0]
            for i in range(6)
        ]
    for candidate, single in zip(together.candidates, alone, strict=True):
        assert candidate.token_ids == single.token_ids
        assert candidate.finish_reason == single.finish_reason
        assert candidate.matched_stop == single.matched_stop
        assert candidate.text == single.text
    assert len({len(candidate.token_ids) for candidate in together.candidates}) > 1
    fresh.wait_until_empty()
