"""The host tier: its size, and blocks that leave the pool and come back bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.attention import LayerSpec
from model_worker.errors import PoolSizeError
from model_worker.host_tensors import MAX_STAGED_BLOCKS, choose_num_host_blocks
from model_worker.kv_tensors import KvTensors
from model_worker.step import StepInput
from tests.worker.tiny import Driver, load_tiny, make_runner, random_prompt

SPECS = [LayerSpec(4, 2, 8, 8, 0.3), LayerSpec(4, 1, 16, 4, 0.3)]
CPU = torch.device("cpu")


def size(**changes) -> int:
    arguments = {"block_bytes": 1000, "num_blocks": 50, "available_bytes": 10**9}
    return choose_num_host_blocks(**(arguments | changes))


def test_left_to_itself_it_has_as_many_blocks_as_the_pool():
    assert size() == 50
    assert size(available_bytes=8 * 7_999) == 7  # an eighth of what is there
    assert size(block_bytes=2**30, num_blocks=9, available_bytes=2**40) == 4  # 4 GiB
    assert size(available_bytes=-1) == 0


def test_memory_that_was_given_is_used_whole():
    assert size(swap_space_bytes=77_900) == 77
    assert size(swap_space_bytes=0) == 0
    with pytest.raises(PoolSizeError, match=r"--swap-space asks for 1907\.3 MiB, but only 953\.7"):
        size(swap_space_bytes=2 * 10**9)


def kv_of_random_bits(dtype: torch.dtype, num_blocks: int, num_host_blocks: int) -> KvTensors:
    """NaN of every kind among them."""
    kv = KvTensors(SPECS, num_blocks, 4, dtype, CPU, num_host_blocks=num_host_blocks)
    generator = torch.Generator().manual_seed(0)
    for pool in pools(kv):
        bits = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8, generator=generator)
        pool.view(torch.uint8).copy_(bits.view(pool.view(torch.uint8).shape))
    return kv


def pools(kv: KvTensors) -> list[torch.Tensor]:
    return [pool for layer in kv.layers for pool in (layer.keys, layer.values)]


def bits(kv: KvTensors, blocks: np.ndarray) -> list[torch.Tensor]:
    return [pool[torch.from_numpy(blocks).long()].view(torch.uint8).clone() for pool in pools(kv)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 2 * MAX_STAGED_BLOCKS + 3])
def test_swapped_out_and_in_again_it_is_the_same_bits(dtype, count):
    kv = kv_of_random_bits(dtype, 300, 200)
    rng = np.random.default_rng(count)
    blocks, others = rng.permutation(300).astype(np.int32)[: 2 * count].reshape(2, count)
    hosts = rng.permutation(200).astype(np.int32)[:count]
    before = bits(kv, blocks)
    untouched = np.setdiff1d(np.arange(300), np.concatenate((blocks, others)))
    rest = bits(kv, untouched)
    kv.host.swap_out(blocks, hosts)
    for pool in pools(kv):
        pool[torch.from_numpy(blocks).long()] = 1
    order = rng.permutation(count)  # in another order than they went
    kv.host.swap_in(hosts[order], others[order])
    assert all(map(torch.equal, bits(kv, others), before))
    assert all(map(torch.equal, bits(kv, untouched), rest))


def test_memory_that_is_not_there_is_a_sentence():
    with pytest.raises(PoolSizeError, match=r"host blocks .* cannot be had"):
        KvTensors(SPECS, 1, 4, torch.float32, CPU, num_host_blocks=2**40)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_one_step_swaps_in_then_copies_then_swaps_out(model_folders):
    runner = make_runner(load_tiny(model_folders["llama-gqa"]), num_blocks=8, num_host_blocks=3)
    kv = runner.kv
    for number, pool in enumerate(pools(kv)):
        pool.copy_((100.0 * number + torch.arange(8.0))[:, None, None, None].expand_as(pool))
    before = bits(kv, i32(5))
    runner.execute(StepInput(1, swap_out_block_ids=i32(5), swap_out_host_block_ids=i32(0)))
    # Host block 0 to 1, 1 to 2, 2 to host block 2, which then comes to 3.
    output = runner.execute(
        StepInput(
            2,
            swap_in_host_block_ids=i32(0),
            swap_in_block_ids=i32(1),
            copy_src_block_ids=i32(1),
            copy_dst_block_ids=i32(2),
            swap_out_block_ids=i32(2),
            swap_out_host_block_ids=i32(2),
        )
    )
    assert output.sampled_token_ids.size == 0
    runner.execute(StepInput(3, swap_in_host_block_ids=i32(2), swap_in_block_ids=i32(3)))
    for block in (1, 2, 3):
        assert all(map(torch.equal, bits(kv, i32(block)), before))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_a_sequence_goes_on_as_if_it_had_never_left(model_folders, name):
    """Its blocks are another one's in the very step that swaps it out."""
    loaded = load_tiny(model_folders[name])

    def generate(*, swaps: bool) -> tuple[list[int], list[int]]:
        # Blocks are few: the second sequence must be given those of the first.
        runner = make_runner(loaded, num_blocks=8 if swaps else 64, num_host_blocks=8)
        driver = Driver(runner)
        first, second = driver.add(random_prompt(1, 21)), driver.add(random_prompt(2, 15))
        driver.step([(first, 21, 1)])
        driver.step([(first, 1, 1)])
        own = set(first.block_ids)
        if swaps:
            driver.swap_out(first)
        driver.step([(second, 15, 1)])
        assert bool(own & set(second.block_ids)) == swaps
        for _ in range(2):
            driver.step([(second, 1, 1)])
        if swaps:
            driver.free += second.block_ids
            driver.swap_in(first)
        for _ in range(3):
            driver.step([(first, 1, 1)])
        return first.tokens, second.tokens

    assert generate(swaps=True) == generate(swaps=False)
