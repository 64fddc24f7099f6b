"""The sides that `benchmarks.kvmem` compares: the core alone, and the service over a stream.

Both take the same messages. Of the core only `Gatekeeper.apply` is timed: ops in, result out. Of
the service everything is: from building the request to holding the reply's columns, with one
batch in flight.
"""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from benchmarks import kvmem_workload as w
from kvmem_svc import convert
from kvmem_svc.core import batch as b
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from octavo.service.columns import I32, U64, unpack
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2

MAX_SEQUENCES = 4096
READY_TIMEOUT_S = 30
CALL_TIMEOUT_S = 3600
# Requests that one batch starts: a message has a limit.
MAX_STARTED_AT_ONCE = 1024

AddOps = Callable[[pb.StepOps], None]


class Side(Protocol):
    """Carries out one batch at a time."""

    async def apply(self, add_ops: AddOps) -> tuple[pb.BatchResult, int]:
        """Its result, in which every op is OK, and the time it took in nanoseconds."""
        ...


class CoreSide:
    """The core in this process."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = KvMemory("bench", max_sequences=MAX_SEQUENCES)
        self.gatekeeper = Gatekeeper(self.memory)
        session = self.gatekeeper.open_session("bench", 0)
        bare = b.Fence(session.session_id, session.epoch, "bench")
        geometry = b.PoolGeometry(
            num_blocks, w.BLOCK_SIZE, w.MAX_MODEL_LEN, num_host_blocks=w.NUM_HOST_BLOCKS
        )
        self.gatekeeper.attach_pool(bare, "worker", geometry, 0)
        self.fence = self.memory.ledger.fence()
        self.batch_seq = 0

    async def apply(self, add_ops: AddOps) -> tuple[pb.BatchResult, int]:
        step = self._next_step()
        add_ops(step)
        encoded = step.SerializeToString(deterministic=True)
        batch = convert.batch_from_encoded(self.fence, self.batch_seq, encoded)
        start = time.perf_counter_ns()
        applied = self.gatekeeper.apply(batch, 0)
        elapsed_ns = time.perf_counter_ns() - start
        result = convert.result_to_pb(applied)
        _check(result)
        return result, elapsed_ns

    def _next_step(self) -> pb.StepOps:
        self.batch_seq += 1
        return pb.StepOps(step_id=self.batch_seq, acknowledged_step=self.batch_seq - 1)


class RpcSide:
    """A Session stream to a service."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub
        self.batch_seq = 0

    async def open(self, num_blocks: int) -> None:
        self.call = self.stub.Session(timeout=CALL_TIMEOUT_S)
        await self.call.write(pb.SessionRequest(open=pb.OpenSessionRequest(holder="bench")))
        fence = (await self.call.read()).opened.fence
        geometry = types_pb2.PoolGeometry(
            num_blocks=num_blocks,
            block_size=w.BLOCK_SIZE,
            max_model_len=w.MAX_MODEL_LEN,
            num_host_blocks=w.NUM_HOST_BLOCKS,
        )
        attach = pb.AttachPoolRequest(fence=fence, worker_boot_id="w", geometry=geometry)
        self.fence = (await self.stub.AttachPool(attach, timeout=READY_TIMEOUT_S)).fence

    async def apply(self, add_ops: AddOps) -> tuple[pb.BatchResult, int]:
        start = time.perf_counter_ns()
        self.batch_seq += 1
        request = pb.SessionRequest()
        batch = request.batch
        batch.fence.CopyFrom(self.fence)
        batch.batch_seq = self.batch_seq
        batch.step.step_id = self.batch_seq
        batch.step.acknowledged_step = self.batch_seq - 1
        add_ops(batch.step)
        await self.call.write(request)
        result = (await self.call.read()).result
        _check(result)
        deltas = result.deltas
        unpack(deltas.sequence_ids, U64)
        unpack(deltas.table_indices, I32)
        unpack(deltas.block_ids, I32)
        return result, time.perf_counter_ns() - start


def _check(result: pb.BatchResult) -> None:
    for one in result.results:
        if one.status != pb.OP_STATUS_OK:
            raise RuntimeError(f"{pb.OpStatus.Name(one.status)}: {one.message}")


# Where the services stay; empty: anywhere.
_service_cores: list[int] = []


def place_benchmark() -> bool:
    """Keep this process, and what it starts, on one core, and the services on another; False when
    there is only one. The threads of processes that take turns otherwise chase each other over
    cores whose caches are somebody else's."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[-1:])
        _service_cores.extend(cores[:1])
    return len(cores) > 1


def place_service(pid: int) -> None:
    """Keep a service that was just started on its core."""
    if _service_cores:
        os.sched_setaffinity(pid, _service_cores)


@contextlib.asynccontextmanager
async def rpc_side(num_blocks: int, *options: str) -> AsyncIterator[RpcSide]:
    """A session with a service of its own, which has a pool of so many blocks; with a journal,
    unless `options` say otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'kvmem.sock'}"
        command = [sys.executable, "-m", "kvmem_svc", "--address", address]
        command += ["--journal", str(Path(folder) / "journal"), "--log-level", "warning"]
        # Sides take turns: while others have theirs, nobody is to lose the session.
        process = subprocess.Popen([*command, "--lease-ttl-ms", "600000", *options])
        place_service(process.pid)
        try:
            async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
                await asyncio.wait_for(channel.channel_ready(), READY_TIMEOUT_S)
                side = RpcSide(kvmem_pb2_grpc.KvMemoryStub(channel))
                await side.open(num_blocks)
                yield side
        finally:
            process.terminate()
            process.wait(READY_TIMEOUT_S)


class OctavoDecoding:
    """Running sequences of one side, which take decode steps."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.num_allocated_blocks = 0

    async def start(self, prompts: Sequence[w.Tokens]) -> None:
        ids: list[int] = []
        for first in range(0, len(prompts), MAX_STARTED_AT_ONCE):
            ids += await self._start_some(prompts[first : first + MAX_STARTED_AT_ONCE], first)
        self._decoding = w.Decoding(ids, prompts)
        await self.steps(w.random_tokens(1, 1, len(prompts)))

    async def _start_some(self, prompts: Sequence[w.Tokens], first: int) -> list[int]:
        def arrive(step: pb.StepOps) -> None:
            for number, prompt in enumerate(prompts, first):
                w.add_arrive(step, f"running {number}", prompt)

        arrived, _ = await self.side.apply(arrive)
        ids = [one.arrived.sequence_id for one in arrived.results]

        def admit(step: pb.StepOps) -> None:
            for sequence_id, prompt in zip(ids, prompts, strict=True):
                w.add_admit(step, sequence_id, prompt.size)

        await self.side.apply(admit)
        return ids

    async def steps(self, tokens: w.Tokens) -> list[int]:
        """One step for each row of int32[steps, N]; the time of each in nanoseconds."""
        samples_ns = []
        for row in tokens:
            result, elapsed_ns = await self.side.apply(
                lambda step, row=row: self._decoding.add_step(step, row)
            )
            self.num_allocated_blocks += len(result.deltas.block_ids) // I32.itemsize
            samples_ns.append(elapsed_ns)
        return samples_ns


async def empty_batches(side: Side, count: int) -> w.Timings:
    """Batches without ops: what the way there and back takes."""
    return w.Timings([(await side.apply(lambda _: None))[1] for _ in range(count)])


class SingleOps:
    """Ops one by one, each a batch of its own."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.timings: dict[str, w.Timings] = {}

    async def _timed(self, kind: str, add_ops: AddOps) -> pb.OpResult:
        result, elapsed_ns = await self.side.apply(add_ops)
        self.timings.setdefault(kind, w.Timings()).samples_ns.append(elapsed_ns)
        return result.results[0]

    async def measure(self, name: str, prompt: w.Tokens, *, expect_hit: bool) -> None:
        """The life of one request: admitted, computed, forked, the fork written to, freed."""
        kind = "admit_hit" if expect_hit else "admit"
        arrived = await self._timed("arrive", lambda step: w.add_arrive(step, name, prompt, 2))
        parent = arrived.arrived.sequence_id
        admitted = await self._timed(kind, lambda step: w.add_admit(step, parent, prompt.size))
        [table] = admitted.admitted.tables
        if bool(table.num_computed_tokens) != expect_hit:
            raise RuntimeError(f"{kind}: {table.num_computed_tokens} tokens were cached")
        # From here on its blocks are in the cache, and the last one is not full.
        await self.side.apply(lambda step: w.add_computed(step, parent, 0, prompt.size))
        await self.side.apply(lambda step: w.add_reserve(step, parent, prompt.size + 1))
        forked = await self._timed("fork", lambda step: w.add_fork(step, parent))
        [child] = forked.forked.child_sequence_ids
        await self._timed("copy_on_write", lambda step: w.add_reserve(step, child, prompt.size + 1))
        for sequence_id in (child, parent):
            await self._timed("free", lambda step, one=sequence_id: w.add_free(step, [one]))
        await self.side.apply(lambda step: w.add_confirm(step, name))

    async def measure_swaps(self, name: str, prompt: w.Tokens) -> None:
        """One request, swapped out and in again."""
        result, _ = await self.side.apply(lambda step: w.add_arrive(step, name, prompt))
        sequence_id = result.results[0].arrived.sequence_id
        await self.side.apply(lambda step: w.add_admit(step, sequence_id, prompt.size))
        await self._timed("swap_out", lambda step: w.add_swap_out(step, [sequence_id]))
        await self._timed("swap_in", lambda step: w.add_swap_in(step, sequence_id, prompt.size))
        await self.side.apply(lambda step: w.add_free(step, [sequence_id]))
        await self.side.apply(lambda step: w.add_confirm(step, name))


async def measure_single_ops(side: Side, prompts: Sequence[w.Tokens]) -> dict[str, w.Timings]:
    """Every prompt twice: the second time its prefix is a hit; and once more for swaps."""
    ops = SingleOps(side)
    for number, prompt in enumerate(prompts):
        await ops.measure(f"single {number}", prompt, expect_hit=False)
        await ops.measure(f"again {number}", prompt, expect_hit=True)
        await ops.measure_swaps(f"swapped {number}", prompt)
    return ops.timings
