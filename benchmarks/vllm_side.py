"""The operations of `benchmarks.kvmem` on vLLM's `KVCacheManager`, in vLLM's own environment.

    PYTHON benchmarks/vllm_side.py

Imports nothing of Octavo, so it runs under any interpreter that has vLLM 0.32. Takes one JSON
command a line on stdin and answers each with one JSON line on stdout; `benchmarks.kvmem_vllm`
speaks to it. The manager is built as vLLM's scheduler builds it for a model of full attention
(caching on, sha256), and driven as the scheduler drives it: nothing of the scheduler's own work
is in the times.

A decode step is, for each sequence: `allocate_slots` for one token, the ids of the new blocks
(what a worker needs), `num_computed_tokens`, and `append_output_token_ids`, which hashes a block
that became full. Its caching is inside `allocate_slots`. As in vLLM's engine, what was made
before measuring is moved out of the garbage collector's sight.
"""

# vLLM is not among what Octavo is checked with.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

HASH_ALGORITHM = "sha256"  # CacheConfig.prefix_caching_hash_algo's default
MAX_TOKENS = 1 << 20


class VllmSide:
    """One `KVCacheManager` with its running sequences."""

    def __init__(self, block_size: int, max_model_len: int) -> None:
        hash_function = get_hash_fn_by_name(HASH_ALGORITHM)
        init_none_hash(hash_function)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.block_hasher = get_request_block_hasher(block_size, hash_function)
        self.params = SamplingParams(max_tokens=MAX_TOKENS)
        self.manager: KVCacheManager
        self.running: list[Request] = []

    def pool(self, num_blocks: int) -> dict[str, float]:
        """Replace the manager; what its pool takes in memory."""
        self.running = []
        self.manager = None  # type: ignore[assignment]
        gc.unfreeze()
        gc.collect()
        before = resident_bytes()
        spec = FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        # One block more: vLLM keeps the first for itself.
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config,
            self.max_model_len,
            scheduler_block_size=self.block_size,
            hash_block_size=self.block_size,
            enable_caching=True,
        )
        return {"bytes_per_free_block": (resident_bytes() - before) / num_blocks}

    def request(self, name: str, prompt: list[int]) -> Request:
        """Hashes the prompt's blocks, as the engine does when a request arrives."""
        return Request(name, prompt, self.params, None, block_hasher=self.block_hasher)

    def admit(self, request: Request) -> None:
        """As for a waiting request: look its prefix up, allocate the rest, count it computed."""
        computed, num_computed, _ = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_computed
        blocks = self.manager.allocate_slots(request, num_new, num_computed, computed)
        assert blocks is not None, "vLLM's pool is too small"
        self.manager.get_block_ids(request.request_id)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING

    def start(self, prompts: list[list[int]]) -> dict[str, float]:
        """Running sequences with these prompts, the first token of each sampled."""
        for number, prompt in enumerate(prompts):
            request = self.request(f"running {number}", prompt)
            self.admit(request)
            request.append_output_token_ids(0)
            self.running.append(request)
        gc.collect()
        gc.freeze()
        return {"num_free_blocks": self.manager.block_pool.get_num_free_blocks()}

    def step(self, tokens: list[int]) -> None:
        manager = self.manager
        manager.new_step_starts()
        for request, token in zip(self.running, tokens, strict=True):
            blocks = manager.allocate_slots(request, 1)
            assert blocks is not None, "vLLM's pool is too small"
            blocks.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    def decode(self, steps: list[list[int]]) -> dict[str, list[int]]:
        """One step for each list of tokens; the time of each in nanoseconds."""
        return {"samples_ns": [timed(self.step, tokens) for tokens in steps]}

    def single(self, prompts: list[list[int]]) -> dict[str, list[int]]:
        """Admit and free each prompt by itself; twice, so that the second time is a prefix hit.

        `arrive` makes the request and hashes its blocks. vLLM has neither fork nor
        copy-on-write of its own: n candidates are n requests there.
        """
        samples: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            for kind in ("admit", "admit_hit"):
                start = time.perf_counter_ns()
                request = self.request(f"{kind} {number}", prompt)
                samples.setdefault("arrive", []).append(time.perf_counter_ns() - start)
                samples.setdefault(kind, []).append(timed(self.admit, request))
                samples.setdefault("free", []).append(timed(self.manager.free, request))
        return samples

    def cached(self, prompts: list[list[int]]) -> dict[str, float]:
        """What a cached block takes more than a free one: memory that stays behind."""
        gc.collect()
        before = resident_bytes()
        for number, prompt in enumerate(prompts):
            request = self.request(f"cached {number}", prompt)
            self.admit(request)
            self.manager.free(request)
        gc.collect()
        num_cached = sum(len(prompt) // self.block_size for prompt in prompts)
        return {"more_bytes_per_cached_block": (resident_bytes() - before) / num_cached}


def timed(call: Callable[..., Any], *arguments: Any) -> int:
    start = time.perf_counter_ns()
    call(*arguments)
    return time.perf_counter_ns() - start


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    # Whatever vLLM's modules print goes where people look; stdout is for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sides: list[VllmSide] = []
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        if name == "setup":
            sides = [VllmSide(**command)]
            answer: dict[str, Any] = {"version": vllm.__version__}
        elif name in ("pool", "start", "decode", "single", "cached"):
            answer = getattr(sides[0], name)(**command)
        else:
            raise ValueError(f"there is no command {name!r}")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
