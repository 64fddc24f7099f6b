"""A runner put together from options, as the server and a benchmark in one process do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model_worker.build import build_runner
from model_worker.errors import WorkerError
from model_worker.options import WorkerOptions
from model_worker.step import SequenceStart, StepInput


@pytest.fixture
def options(model_folders) -> WorkerOptions:
    return WorkerOptions(model=str(model_folders["llama-gqa"]), threads=1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention": "telepathy"}, "there is no such backend"),
        ({"dtype": "float8"}, "only float32, bfloat16"),
        ({"kv_memory": "lots"}, "write it like 2GiB"),
        ({"kv_memory": "100KiB"}, "Raise --kv-memory or lower --max-model-len"),
        ({"max_model_len": 257}, r"within 1\.\.256"),
        ({"num_blocks": 0}, "below 1"),
        ({"block_size": 0}, "below 1"),
        ({"num_host_blocks": -1}, "below 0"),
        ({"swap_space": "lots"}, "write it like 2GiB"),
        ({"swap_space": "900TiB"}, "--swap-space asks for 943718400.0 MiB, but only"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(options, changes, sentence):
    with pytest.raises(WorkerError, match=sentence):
        build_runner(replace(options, **changes))


def test_the_pool_is_what_the_options_say(options):
    assert build_runner(replace(options, num_blocks=3)).kv.num_blocks == 3
    assert build_runner(replace(options, kv_memory="1MiB")).kv.num_blocks == 2**20 // 8192
    assert build_runner(replace(options, max_num_seqs=2)).kv.num_blocks == 2 * 256 / 16
    runner = build_runner(replace(options, dtype="bfloat16", num_blocks=3, block_size=5))
    assert runner.kv.layers[0].keys.shape == (3, 2, 5, 16)
    assert runner.kv.bytes_per_block == 2 * 2 * 2 * 5 * 16 * 2


def test_the_host_tier_is_what_the_options_say(options):
    def num_host_blocks(**changes):
        runner = build_runner(replace(options, num_blocks=3, **changes))
        assert runner.kv.host.num_blocks == runner.input_batch.limits.num_host_blocks
        return runner.kv.host.num_blocks

    assert num_host_blocks() == 3  # as many as the pool has
    assert num_host_blocks(swap_space="1MiB") == 2**20 // 8192
    assert num_host_blocks(swap_space="0") == 0
    assert num_host_blocks(num_host_blocks=0) == 0
    assert num_host_blocks(num_host_blocks=5, swap_space="1MiB") == 5


def test_rates_are_measured(options):
    rates = build_runner(replace(options, num_blocks=3)).rates
    assert rates.prefill_tokens_per_s > 0
    assert rates.swap_bytes_per_s > 0
    rates = build_runner(replace(options, num_blocks=3, num_host_blocks=0)).rates
    assert rates.swap_bytes_per_s == 0


def test_timings_add_up_and_idle_time_is_that_between_steps(options):
    runner = build_runner(replace(options, num_blocks=8))
    one = np.array([1], np.int32)
    start = SequenceStart(1, np.array([3], np.int32), 1)
    outputs = [
        runner.execute(
            StepInput(
                step_id=i,
                sequence_ids=np.array([1], np.uint64),
                table_versions=np.array([1], np.uint32),
                num_input_tokens=one,
                num_computed_tokens=np.array([i], np.int32),
                input_token_ids=one,
                num_samples=one,
                starts=(start,) if i == 0 else (),
            )
        )
        for i in range(2)
    ]
    first, second = (output.timings for output in outputs)
    assert first.idle_us == 0
    assert first.forward_us > 0
    assert first.copy_us <= first.prepare_us
    apart_us = (outputs[1].started_unix_ns - outputs[0].started_unix_ns) // 1000
    busy_us = first.prepare_us + first.forward_us + first.sample_us
    assert abs(apart_us - busy_us - second.gap_us) < 1000
    assert second.idle_us == second.gap_us
