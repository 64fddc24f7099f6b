"""What the KV memory service costs: its core alone, and through a Session stream.

    python -m benchmarks.kvmem [--quick]

A decode step of N running sequences is one batch: Commit of one token each, and Reserve of the
slots for them. Lengths are staggered, so about one sequence in block_size needs a block in every
step. `core_*` is the core in this process, ops in and result out; `rpc_*` is the same step
through a real process over a unix socket, one batch in flight, from building the request to
holding the reply's columns. `rpc_empty_us` is a batch without ops: what the stream alone costs.
`journal_cost_pct` is what a journal adds to that step.
Ends with one JSON line; all times in microseconds, means are totals divided by counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import numpy as np
import typer
import uvloop

from kvmem_svc.core import batch as b
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from octavo.service.columns import I32, U64, pack, unpack
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2

BLOCK_SIZE = 16
PROMPT_LEN = 64
MAX_MODEL_LEN = 4096
WARMUP_STEPS = 64
READY_TIMEOUT_S = 30
CALL_TIMEOUT_S = 600


@dataclass
class Timings:
    """Samples of one kind, in nanoseconds."""

    samples_ns: list[int] = field(default_factory=list)

    def measure(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter_ns()
        result = call()
        self.samples_ns.append(time.perf_counter_ns() - start)
        return result

    @property
    def mean_us(self) -> float:
        """Total divided by count: nothing is left out."""
        return round(sum(self.samples_ns) / len(self.samples_ns) / 1000, 1)

    def percentile_us(self, percent: float) -> float:
        return round(float(np.percentile(self.samples_ns, percent)) / 1000, 1)


@dataclass
class Decoding:
    """N sequences that decode: their ids and lengths, uint64[N] and int32[N]."""

    sequence_ids: b.Column
    lengths: b.Column
    tokens: b.Column

    @classmethod
    def of(cls, sequence_ids: list[int]) -> Decoding:
        lengths = np.array([prompt_len(i) for i in range(len(sequence_ids))], np.int32)
        tokens = np.arange(len(sequence_ids), dtype=np.int32)
        return cls(np.array(sequence_ids, np.uint64), lengths, tokens)

    def advance(self) -> tuple[b.Column, b.Column]:
        """One token more each: (computed before, slots after)."""
        computed, self.lengths = self.lengths, self.lengths + 1
        return computed, self.lengths


def prompt_len(index: int) -> int:
    return PROMPT_LEN + index % BLOCK_SIZE


def num_blocks_for(num_sequences: int, num_steps: int) -> int:
    per_sequence = -(-(PROMPT_LEN + BLOCK_SIZE + num_steps) // BLOCK_SIZE)
    return num_sequences * (per_sequence + 1)


class CoreBench:
    """The core alone."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = KvMemory("bench", max_sequences=4096)
        self.gatekeeper = Gatekeeper(self.memory)
        session = self.gatekeeper.open_session("bench", 0)
        geometry = b.PoolGeometry(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)
        bare = b.Fence(session.session_id, session.epoch, "bench")
        self.gatekeeper.attach_pool(bare, "worker", geometry, 0)
        self.fence = self.memory.ledger.fence()
        self.batch_seq = 0

    def apply(self, *ops: b.Op) -> b.BatchResult:
        self.batch_seq += 1
        seq = self.batch_seq
        batch = b.Batch(self.fence, seq, seq, seq - 1, ops, b"digest")
        result = self.gatekeeper.apply(batch, 0)
        assert all(one.status == b.OpStatus.OK for one in result.results), result.results
        return result

    def start(self, count: int, prefix: str = "r") -> list[int]:
        """`count` running sequences."""
        ids = [self.arrive(f"{prefix}{i}", prompt_len(i)) for i in range(count)]
        for i, sequence_id in enumerate(ids):
            self.apply(b.Admit([b.AdmitMember(sequence_id, prompt_len(i))]))
        return ids

    def arrive(self, name: str, length: int) -> int:
        prompt = np.arange(length, dtype=np.int32)
        value = self.apply(b.Arrive(name, prompt, 4)).results[0].value
        assert isinstance(value, b.Arrived)
        return value.sequence_id

    def decode(self, num_sequences: int, num_steps: int) -> tuple[Timings, float]:
        """Timings of whole decode steps, and blocks allocated per step."""
        decoding = Decoding.of(self.start(num_sequences))
        timings, num_allocated = Timings(), 0

        def step() -> b.BatchResult:
            computed, slots = decoding.advance()
            commit = b.Commit(decoding.sequence_ids, decoding.tokens, computed)
            return self.apply(commit, b.Reserve(decoding.sequence_ids, slots))

        for _ in range(WARMUP_STEPS):
            step()
        for _ in range(num_steps):
            num_allocated += timings.measure(step).num_allocated_blocks
        return timings, num_allocated / num_steps

    def one_by_one(self, repeats: int, length: int) -> dict[str, Timings]:
        """Single ops, each a batch of its own, on sequences of `length` tokens."""
        kinds = {name: Timings() for name in ("arrive", "admit", "fork", "free")}
        for i in range(repeats):
            name = f"single {i}"
            parent = kinds["arrive"].measure(lambda name=name: self.arrive(name, length))
            admit = b.Admit([b.AdmitMember(parent, length)])
            kinds["admit"].measure(lambda admit=admit: self.apply(admit))
            fork = b.Fork(parent, 1)
            forked = kinds["fork"].measure(lambda fork=fork: self.apply(fork)).results[0].value
            [child] = forked.child_sequence_ids
            for sequence_id in (child, parent):
                free = b.Free([sequence_id], b.FinishReason.STOP)
                kinds["free"].measure(lambda free=free: self.apply(free))
            self.apply(b.Confirm(name))
        return kinds


class RpcBench:
    """A Session stream to a real process."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        self.batch_seq = 0

    async def open(self, num_blocks: int) -> None:
        self.call = self.stub.Session(timeout=CALL_TIMEOUT_S)
        await self.call.write(pb.SessionRequest(open=pb.OpenSessionRequest(holder="bench")))
        self.fence = (await self.call.read()).opened.fence
        geometry = types_pb2.PoolGeometry(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
        )
        attach = pb.AttachPoolRequest(fence=self.fence, worker_boot_id="w", geometry=geometry)
        self.fence = (await self.stub.AttachPool(attach, timeout=READY_TIMEOUT_S)).fence

    async def apply(self, *ops: pb.Op) -> pb.BatchResult:
        self.batch_seq += 1
        step = pb.StepOps(
            step_id=self.batch_seq, acknowledged_step=self.batch_seq - 1, ops=list(ops)
        )
        batch = pb.Batch(fence=self.fence, batch_seq=self.batch_seq, step=step)
        await self.call.write(pb.SessionRequest(batch=batch))
        result = (await self.call.read()).result
        assert all(one.status == pb.OP_STATUS_OK for one in result.results), result
        return result

    async def decode(self, num_sequences: int, num_steps: int) -> Timings:
        decoding, timings = await self.start(num_sequences), Timings()
        for i in range(WARMUP_STEPS + num_steps):
            start = time.perf_counter_ns()
            await self.step(decoding)
            if i >= WARMUP_STEPS:
                timings.samples_ns.append(time.perf_counter_ns() - start)
        return timings

    async def start(self, num_sequences: int) -> Decoding:
        """So many running sequences."""
        arrivals = [
            pb.Arrive(request_id=f"r{i}", prompt_token_ids=range(prompt_len(i)), num_candidates=1)
            for i in range(num_sequences)
        ]
        arrived = await self.apply(*(pb.Op(arrive=arrival) for arrival in arrivals))
        ids = [one.arrived.sequence_id for one in arrived.results]
        members = [
            pb.AdmitMember(sequence_id=sequence_id, num_slots=prompt_len(i))
            for i, sequence_id in enumerate(ids)
        ]
        await self.apply(pb.Op(admit=pb.Admit(members=members)))
        return Decoding.of(ids)

    async def empty(self, num_steps: int) -> Timings:
        timings = Timings()
        for _ in range(num_steps):
            start = time.perf_counter_ns()
            await self.apply()
            timings.samples_ns.append(time.perf_counter_ns() - start)
        return timings

    async def step(self, decoding: Decoding) -> None:
        computed, slots = decoding.advance()
        ids = pack(decoding.sequence_ids, U64)
        commit = pb.Commit(
            sequence_ids=ids,
            token_ids=pack(decoding.tokens, I32),
            num_computed_tokens=pack(computed, I32),
        )
        reserve = pb.Reserve(sequence_ids=ids, num_slots=pack(slots, I32))
        result = await self.apply(pb.Op(commit=commit), pb.Op(reserve=reserve))
        unpack(result.deltas.sequence_ids, U64)
        unpack(result.deltas.table_indices, I32)
        unpack(result.deltas.block_ids, I32)


@contextlib.asynccontextmanager
async def rpc_bench(num_blocks: int, *options: str) -> AsyncIterator[RpcBench]:
    """A session with a service of its own, which has a pool of so many blocks."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'kvmem.sock'}"
        command = [sys.executable, "-m", "kvmem_svc", "--address", address, *options]
        process = subprocess.Popen([*command, "--log-level", "warning"])
        try:
            async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
                await asyncio.wait_for(channel.channel_ready(), READY_TIMEOUT_S)
                bench = RpcBench(kvmem_pb2_grpc.KvMemoryStub(channel))
                await bench.open(num_blocks)
                yield bench
        finally:
            process.terminate()
            process.wait(READY_TIMEOUT_S)


async def bench_rpc(num_sequences: int, num_steps: int) -> dict[str, Timings]:
    async with rpc_bench(num_blocks_for(num_sequences, WARMUP_STEPS + num_steps)) as bench:
        return {
            f"rpc_step_us_{num_sequences}": await bench.decode(num_sequences, num_steps),
            "rpc_empty_us": await bench.empty(num_steps),
        }


async def bench_journal(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Two services, one with a journal, take the same steps in turn; the order changes with
    every pair. What the folding of full segments takes meanwhile is in it."""
    num_blocks = num_blocks_for(num_sequences, WARMUP_STEPS + num_steps)
    with tempfile.TemporaryDirectory() as journal:
        async with (
            rpc_bench(num_blocks, "--journal", "none") as without,
            rpc_bench(num_blocks, "--journal", journal) as with_journal,
        ):
            pair = [(bench, await bench.start(num_sequences)) for bench in (without, with_journal)]
            timings = [Timings(), Timings()]
            for i in range(WARMUP_STEPS + num_steps):
                for which in (i % 2, 1 - i % 2):
                    bench, decoding = pair[which]
                    start = time.perf_counter_ns()
                    await bench.step(decoding)
                    if i >= WARMUP_STEPS:
                        timings[which].samples_ns.append(time.perf_counter_ns() - start)
    off, on = timings
    return {
        "journal_off_us": off.mean_us,
        "journal_on_us": on.mean_us,
        "journal_cost_pct": round(100 * (on.mean_us / off.mean_us - 1), 1),
        "journal_cost_pct_p50": round(100 * (on.percentile_us(50) / off.percentile_us(50) - 1), 1),
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer steps: seconds in all.")] = False,
) -> None:
    """Measure the KV memory service."""
    num_steps, repeats = (512, 200) if quick else (4096, 2000)
    report: dict[str, float] = {"num_steps": num_steps, "block_size": BLOCK_SIZE}
    for size in (64, 256) if quick else (16, 64, 256, 1024):
        bench = CoreBench(num_blocks_for(size, WARMUP_STEPS + num_steps))
        timings, blocks_per_step = bench.decode(size, num_steps if size < 1024 else 1024)
        report |= summary(f"core_step_us_{size}", timings)
        report[f"blocks_per_step_{size}"] = round(blocks_per_step, 1)
    # Single ops beside 256 running sequences, on a table of 32 blocks.
    bench = CoreBench(num_blocks_for(256, WARMUP_STEPS) + 64)
    bench.start(256)
    for name, timings in bench.one_by_one(repeats, 32 * BLOCK_SIZE).items():
        report |= summary(f"{name}_us", timings)
    for name, timings in uvloop.run(bench_rpc(256, num_steps)).items():
        report |= summary(name, timings)
    report |= uvloop.run(bench_journal(256, num_steps))
    print(json.dumps(report))


def summary(name: str, timings: Timings) -> dict[str, float]:
    return {
        name: timings.mean_us,
        f"{name}_p50": timings.percentile_us(50),
        f"{name}_p99": timings.percentile_us(99),
    }


if __name__ == "__main__":
    typer.run(main)
