"""What the memory service keeps for each block: run by `benchmarks.kvmem` in a fresh process.

    python -m benchmarks.kvmem_memory NUM_BLOCKS

By how much the process grows (its resident memory, so what is never touched does not count)
while a pool is made and every one of its blocks was in use once and is free again; and while every
block is filled with tokens, published and cached. The tokens themselves, 4 bytes each, are in the
latter.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path

from benchmarks import kvmem_workload as w
from benchmarks.kvmem_sides import CoreSide, Side
from kvmem_svc.core.pool import BlockPool
from octavo.v1 import kvmem_pb2 as pb

FILL_TOKENS = w.MAX_MODEL_LEN - w.BLOCK_SIZE
BLOCKS_PER_FILL = FILL_TOKENS // w.BLOCK_SIZE
# As many as a sequence could hold.
BLOCKS_AT_ONCE = 256


def resident_bytes() -> int:
    """Of this process, now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bytes_per_free_block(num_blocks: int) -> float:
    before = resident_bytes()
    pool = BlockPool(num_blocks, w.BLOCK_SIZE)
    pool.begin_step(1, 0)
    used = [pool.allocate(BLOCKS_AT_ONCE, 0) for _ in range(num_blocks // BLOCKS_AT_ONCE)]
    while used:
        pool.unreference(used.pop())
    pool.begin_step(2, 2)
    if pool.num_free != num_blocks:
        raise RuntimeError(f"{pool.num_free} of {num_blocks} blocks are free")
    return (resident_bytes() - before) / num_blocks


async def fill(side: Side, num_blocks: int, seed: int) -> int:
    """Sequences are computed, published and freed until the cache has gained about `num_blocks`
    blocks; how many were filled. No two have a block in common."""
    num_sequences = num_blocks // BLOCKS_PER_FILL
    # Somebody stays: a memory that falls idle looks over all its books.
    waiting = f"stays {seed}"
    await side.apply(lambda step: w.add_arrive(step, waiting, w.random_tokens(seed, 1)))
    for number in range(num_sequences):
        await _fill_one(side, f"fill {seed}.{number}", w.random_tokens((seed, number), FILL_TOKENS))
    return num_sequences * BLOCKS_PER_FILL


async def _fill_one(side: Side, name: str, prompt: w.Tokens) -> None:
    arrived, _ = await side.apply(lambda step: w.add_arrive(step, name, prompt))
    sequence_id = arrived.results[0].arrived.sequence_id
    await side.apply(lambda step: w.add_admit(step, sequence_id, prompt.size))
    await side.apply(lambda step: w.add_computed(step, sequence_id, 0, prompt.size))

    def end(step: pb.StepOps) -> None:
        w.add_free(step, [sequence_id])
        w.add_confirm(step, name)

    await side.apply(end)


async def bytes_per_cached_block(num_blocks: int) -> float:
    side = CoreSide(num_blocks)
    await fill(side, 4 * BLOCKS_PER_FILL, seed=1)  # whatever is made once
    before = resident_bytes()
    num_filled = await fill(side, num_blocks - 8 * BLOCKS_PER_FILL, seed=2)
    num_cached = side.memory.levels().num_cached_blocks
    if num_cached < num_filled:
        raise RuntimeError(f"{num_filled} blocks were filled, {num_cached} are cached")
    return (resident_bytes() - before) / num_filled


def main() -> None:
    num_blocks = int(sys.argv[1])
    report = {
        "bytes_per_free_block": round(bytes_per_free_block(num_blocks), 1),
        "bytes_per_cached_block": round(asyncio.run(bytes_per_cached_block(num_blocks)), 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
