"""What the KV memory service costs: its core alone, through a Session stream, and beside vLLM.

    python -m benchmarks.kvmem [--quick] [--vs-vllm PYTHON]

A decode step of N running sequences is one batch: Commit of one token each, and Reserve of the
slots for them. Lengths are staggered, so about one sequence in block_size needs a block in every
step, and fills one, which is hashed and published. `core_*` is the core in this process, ops in
and result out; `rpc_*` is the same through a real process over a unix socket, journalled and with
the prefix cache on, one batch in flight, from building the request to holding the reply's columns.
`rpc_empty_us` is a batch without ops: what the stream alone costs, and the limit of the former.
With --vs-vllm the same sequences decode in vLLM's KVCacheManager, in its own process under PYTHON
(where vllm 0.32 is installed): `step_vs_vllm_N` is our step over gRPC divided by its step
in-process.

Whatever is compared takes turns of a few steps in one run. The services stay on one core, and this
process and vLLM's on another (--no-pin: wherever the kernel puts them, which costs a step over
gRPC about a third more). `pool_growth_1m` compares pools of 1M
and of 10k blocks whose free blocks are all cached, so that every allocation evicts.
Ends with one JSON line; all times in microseconds, means are totals divided by counts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Protocol

import typer
import uvloop

from benchmarks import kvmem_workload as w
from benchmarks.kvmem_memory import fill
from benchmarks.kvmem_sides import (
    CoreSide,
    OctavoDecoding,
    empty_batches,
    measure_single_ops,
    place_benchmark,
    rpc_side,
)
from benchmarks.kvmem_vllm import VllmDecoding, VllmSide, vllm_side

STEPS_PER_TURN = 16
POOLS = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
POOL_SEQUENCES = 256
# A table of 32 blocks, the last one not full: whoever forks it copies that one.
SINGLE_PROMPT_LEN = 31 * w.BLOCK_SIZE + w.BLOCK_SIZE // 2

Report = dict[str, float | str]


class DecodingSide(Protocol):
    """Running sequences that take decode steps."""

    async def start(self, prompts: Sequence[w.Tokens]) -> None: ...

    async def steps(self, tokens: w.Tokens) -> list[int]:
        """One step for each row of int32[steps, N]; the time of each in nanoseconds."""
        ...


async def decode_in_turns(
    sides: Mapping[str, DecodingSide], num_sequences: int, num_steps: int
) -> dict[str, w.Timings]:
    """Everybody decodes the same; after each turn somebody else begins."""
    prompts = w.staggered_prompts(num_sequences)
    for side in sides.values():
        await side.start(prompts)
    timings = {name: w.Timings() for name in sides}
    names = list(sides)
    for turn, first in enumerate(range(0, w.WARMUP_STEPS + num_steps, STEPS_PER_TURN)):
        tokens = w.random_tokens((2, turn), STEPS_PER_TURN, num_sequences)
        for name in names:
            samples_ns = await sides[name].steps(tokens)
            if first >= w.WARMUP_STEPS:
                timings[name].samples_ns += samples_ns
        names.append(names.pop(0))
    return timings


async def bench_steps(num_sequences: int, num_steps: int, vllm: VllmSide | None) -> Report:
    num_blocks = w.num_blocks_for(num_sequences, w.WARMUP_STEPS + num_steps)
    async with rpc_side(num_blocks) as service:
        core = OctavoDecoding(CoreSide(num_blocks))
        sides: dict[str, DecodingSide] = {"core": core, "rpc": OctavoDecoding(service)}
        if vllm is not None:
            await vllm.command("pool", num_blocks=num_blocks)
            sides["vllm"] = VllmDecoding(vllm)
        timings = await decode_in_turns(sides, num_sequences, num_steps)
        timings["rpc_empty"] = await empty_batches(service, num_steps)
    report: Report = {}
    for name, of_side in timings.items():
        key = f"{name}_us" if name == "rpc_empty" else f"{name}_step_us_{num_sequences}"
        report |= w.summary(key, of_side)
    report[f"blocks_per_step_{num_sequences}"] = round(
        core.num_allocated_blocks / (1 + w.WARMUP_STEPS + num_steps), 1
    )
    if vllm is not None:
        ratio = timings["rpc"].mean_us / timings["vllm"].mean_us
        report[f"step_vs_vllm_{num_sequences}"] = round(ratio, 3)
        ratio = timings["rpc"].percentile_us(50) / timings["vllm"].percentile_us(50)
        report[f"step_vs_vllm_{num_sequences}_p50"] = round(ratio, 3)
    return report


async def bench_pools(num_steps: int, pools: Mapping[str, int]) -> Report:
    """The core and the service's step in pools of several sizes, everything cached."""
    async with AsyncExitStack() as stack:
        core: dict[str, DecodingSide] = {}
        rpc: dict[str, DecodingSide] = {}
        for name, num_blocks in pools.items():
            side = CoreSide(num_blocks)
            await fill(side, num_blocks, seed=3)
            core[f"core_step_us_{POOL_SEQUENCES}_pool_{name}"] = OctavoDecoding(side)
            service = await stack.enter_async_context(rpc_side(num_blocks))
            await fill(service, num_blocks, seed=3)
            rpc[f"rpc_step_us_{POOL_SEQUENCES}_pool_{name}"] = OctavoDecoding(service)
        report: Report = {}
        for sides in (core, rpc):
            timings = await decode_in_turns(sides, POOL_SEQUENCES, num_steps)
            for key, of_pool in timings.items():
                report |= w.summary(key, of_pool)
            smallest, *_, largest = timings.values()
            prefix = "" if sides is rpc else "core_"
            growth = largest.mean_us / smallest.mean_us
            report[f"{prefix}pool_growth_{list(pools)[-1]}"] = round(growth, 3)
            growth = largest.percentile_us(50) / smallest.percentile_us(50)
            report[f"{prefix}pool_growth_{list(pools)[-1]}_p50"] = round(growth, 3)
    return report


async def bench_single_ops(repeats: int, vllm: VllmSide | None) -> Report:
    """Beside 256 running sequences, on a table of 32 blocks."""
    num_blocks = w.num_blocks_for(POOL_SEQUENCES, w.WARMUP_STEPS) + 64 * repeats
    prompts = list(w.random_tokens(4, repeats, SINGLE_PROMPT_LEN))
    report: Report = {}
    async with rpc_side(num_blocks) as service:
        for prefix, side in (("core", CoreSide(num_blocks)), ("rpc", service)):
            await OctavoDecoding(side).start(w.staggered_prompts(POOL_SEQUENCES))
            for kind, timings in (await measure_single_ops(side, prompts)).items():
                report |= w.summary(f"{prefix}_{kind}_us", timings)
    if vllm is not None:
        await vllm.command("pool", num_blocks=num_blocks)
        await VllmDecoding(vllm).start(w.staggered_prompts(POOL_SEQUENCES))
        for kind, timings in (await vllm.single_ops(prompts)).items():
            report |= w.summary(f"vllm_{kind}_us", timings)
    return report


async def bench_journal(num_sequences: int, num_steps: int) -> Report:
    """Two services, one without a journal, decode in turns. What the folding of full segments
    takes meanwhile is in it."""
    num_blocks = w.num_blocks_for(num_sequences, w.WARMUP_STEPS + num_steps)
    async with (
        rpc_side(num_blocks, "--journal", "none") as without,
        rpc_side(num_blocks) as with_journal,
    ):
        sides = {"off": OctavoDecoding(without), "on": OctavoDecoding(with_journal)}
        timings = await decode_in_turns(sides, num_sequences, num_steps)
    off, on = timings["off"], timings["on"]
    return {
        "journal_off_us": off.mean_us,
        "journal_on_us": on.mean_us,
        "journal_cost_pct": round(100 * (on.mean_us / off.mean_us - 1), 1),
        "journal_cost_pct_p50": round(100 * (on.percentile_us(50) / off.percentile_us(50) - 1), 1),
    }


def bytes_per_block(num_blocks: int) -> Report:
    """`bytes_per_block` is what a block takes at most: a cached one, its tokens included."""
    command = [sys.executable, "-m", "benchmarks.kvmem_memory", str(num_blocks)]
    measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"bytes_per_block": measured["bytes_per_cached_block"], **measured}


async def bench(quick: bool, vllm_python: str, pinned: bool) -> Report:
    num_steps, repeats = (256, 100) if quick else (1024, 1000)
    report: Report = {"num_steps": num_steps, "block_size": w.BLOCK_SIZE}
    report["pinned"] = int(pinned and place_benchmark())
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(vllm_side(vllm_python)) if vllm_python else None
        for size in (64, 256, 1024) if quick else (16, 64, 1024, 4096, 256):
            report |= await bench_steps(size, num_steps if size <= 256 else 256, vllm)
        report |= await bench_single_ops(repeats, vllm)
    report |= await bench_journal(256, num_steps)
    largest = "100k" if quick else "1m"
    pools = {name: size for name, size in POOLS.items() if size <= POOLS[largest]}
    report |= await bench_pools(256, pools)
    return report | await asyncio.to_thread(bytes_per_block, POOLS[largest])


def main(
    quick: Annotated[bool, typer.Option(help="Fewer steps, smaller pools.")] = False,
    vs_vllm: Annotated[
        str, typer.Option(metavar="PYTHON", help="An interpreter that has vllm 0.32.")
    ] = "",
    pin: Annotated[
        bool, typer.Option(help="Keep the services on one core and everything else on another.")
    ] = True,
) -> None:
    """Measure the KV memory service."""
    print(json.dumps(uvloop.run(bench(quick, vs_vllm, pin))))


if __name__ == "__main__":
    typer.run(main)
