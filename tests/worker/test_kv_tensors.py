"""The size of the KV pool, and copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_worker.attention import LayerSpec
from model_worker.errors import PoolSizeError
from model_worker.kv_tensors import KvTensors, bytes_per_block, choose_num_blocks, parse_bytes

SPECS = [LayerSpec(4, 2, 8, 8, 0.3), LayerSpec(4, 1, 16, 4, 0.3)]
CPU = torch.device("cpu")


def test_memory_is_written_with_its_unit():
    assert parse_bytes("2GiB") == 2 * 2**30
    assert parse_bytes("1.5 gib") == 3 * 2**29
    assert parse_bytes("500MB") == 500_000_000
    assert parse_bytes(" 4096 ") == 4096
    for bad in ("", "2 Gigs", "-1GiB", "GiB", "1e9", "nan", "2GiB please"):
        with pytest.raises(PoolSizeError, match="like 2GiB"):
            parse_bytes(bad)


def test_bytes_per_block_are_those_of_the_tensors():
    kv = KvTensors(SPECS, 3, 5, torch.bfloat16, CPU)
    actual = sum(t.nbytes for layer in kv.layers for t in (layer.keys, layer.values))
    assert kv.bytes_per_block * 3 == actual
    assert bytes_per_block(SPECS, 5, torch.bfloat16) == kv.bytes_per_block
    assert bytes_per_block(SPECS, 5, torch.float32) == 2 * kv.bytes_per_block


def size(**changes) -> int:
    arguments = {
        "block_bytes": 1000,
        "block_size": 16,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "available_bytes": 10**9,
    }
    return choose_num_blocks(**(arguments | changes))


def test_left_to_itself_the_pool_is_what_all_sequences_can_use():
    assert size() == 4 * 10
    assert size(max_model_len=161) == 4 * 11


def test_left_to_itself_the_pool_takes_at_most_a_quarter_of_what_is_available():
    assert size(available_bytes=4 * 25_999) == 25
    assert size(available_bytes=4 * 10_000) == 10
    with pytest.raises(PoolSizeError, match=r"160 tokens needs 10 blocks of 1000 .* room for 9 "):
        size(available_bytes=4 * 9_999)


def test_memory_that_was_given_is_used_whole():
    assert size(kv_memory_bytes=77_900) == 77
    with pytest.raises(PoolSizeError, match="room for 9 "):
        size(kv_memory_bytes=9_999)
    with pytest.raises(PoolSizeError, match="available"):
        size(kv_memory_bytes=2 * 10**9)


def test_copies_read_all_sources_before_any_is_overwritten():
    kv = KvTensors(SPECS, 6, 4, torch.float32, CPU)
    for layer in kv.layers:
        for pool in (layer.keys, layer.values):
            pool.copy_(torch.arange(6.0)[:, None, None, None].expand_as(pool))
    # A chain, a swap and one source twice.
    kv.copy_blocks(np.array([0, 1, 2, 1], np.int32), np.array([1, 2, 0, 5], np.int32))
    for layer in kv.layers:
        for pool in (layer.keys, layer.values):
            assert pool[:, 0, 0, 0].tolist() == [2, 0, 1, 3, 4, 1]
            assert (pool == pool[:, :1, :1, :1]).all()
