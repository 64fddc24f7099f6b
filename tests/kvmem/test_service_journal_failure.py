"""What the service answers while its journal cannot be written. (A real disk that is full is in
`test_journal_process`; here the journal fails at the very mutation that a test is about.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvmem_svc.core.batch import BatchResult
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import ApplyBatch, CloseSession, ConfirmPool, GrantSession, Mutation
from kvmem_svc.servicer import KvMemoryServicer
from octavo.service import telemetry
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2
from tests.kvmem.process import DEADLINE_S, arrive, reason_of

GEOMETRY = types_pb2.PoolGeometry(num_blocks=8, block_size=4, max_model_len=32)


class FailingJournal:
    """Writes to a list, until `fails_at` turns up; then it keeps what comes until it `heals`."""

    def __init__(self) -> None:
        self.written: list[Mutation] = []
        self.pending: list[Mutation] = []
        self.fails_at: type | None = None

    @property
    def healthy(self) -> bool:
        return not self.pending

    def append(self, mutation: Mutation, reply_digest: int) -> None:
        if isinstance(mutation, self.fails_at or ()) or self.pending:
            self.pending.append(mutation)
        else:
            self.written.append(mutation)

    def flush_pending(self) -> bool:
        if self.fails_at is None:
            self.written += self.pending
            self.pending.clear()
        return self.healthy

    def close(self) -> None:
        pass


class World:
    """A servicer on a socket, its journal, and what health was told."""

    def __init__(self) -> None:
        self.journal = FailingJournal()
        self.memory = KvMemory("boot", max_sequences=8)
        self.serving: asyncio.Queue[bool] = asyncio.Queue()
        self.fence = types_pb2.Fence()
        self.stub: Any = None
        self.servicer = KvMemoryServicer(
            Gatekeeper(self.memory),
            telemetry.disabled(),
            lambda bug: pytest.fail(repr(bug)),
            journal=self.journal,
            on_serving=self.serving.put,
        )

    async def heal(self) -> None:
        assert await asyncio.wait_for(self.serving.get(), DEADLINE_S) is False
        self.journal.fails_at = None
        assert await asyncio.wait_for(self.serving.get(), DEADLINE_S) is True

    async def open(self) -> None:
        opened = await self.stub.OpenSession(pb.OpenSessionRequest(), timeout=DEADLINE_S)
        self.fence = opened.fence

    async def attach(self) -> pb.AttachPoolReply:
        request = pb.AttachPoolRequest(fence=self.fence, worker_boot_id="w", geometry=GEOMETRY)
        reply = await self.stub.AttachPool(request, timeout=DEADLINE_S)
        self.fence = reply.fence
        return reply

    async def apply(self) -> pb.BatchResult:
        step = pb.StepOps(step_id=1, ops=[arrive("r", 3)])
        batch = pb.Batch(fence=self.fence, batch_seq=1, step=step)
        return await self.stub.Apply(batch, timeout=DEADLINE_S)

    async def close(self) -> None:
        request = pb.CloseSessionRequest(fence=self.fence)
        await self.stub.CloseSession(request, timeout=DEADLINE_S)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[World]:
    world, address = World(), f"unix:{folder}/kvmem.sock"
    server = grpc.aio.server()
    kvmem_pb2_grpc.add_KvMemoryServicer_to_server(world.servicer, server)
    server.add_insecure_port(address)
    await server.start()
    ticking = asyncio.create_task(world.servicer.keep_ticking())
    async with grpc.aio.insecure_channel(address) as channel:
        world.stub = kvmem_pb2_grpc.KvMemoryStub(channel)
        yield world
    ticking.cancel()
    await server.stop(None)


def run(folder: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(folder) as world:
            await test(world)

    asyncio.run(main())


async def fails(call: Awaitable[object]) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await call
    assert reason_of(refused.value) == "JOURNAL_FAILED"


def kinds(mutations: list[Mutation]) -> list[type]:
    return [type(one) for one in mutations]


def test_a_batch_that_could_not_be_written_is_answered_when_it_comes_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.open()
        await world.attach()
        world.journal.fails_at = ApplyBatch
        await fails(world.apply())
        await fails(world.apply())  # it was carried out: not even its kept reply is given
        assert not world.journal.written[2:]
        await world.heal()
        reply = await world.apply()
        assert reply.results[0].status == pb.OP_STATUS_OK
        assert kinds(world.journal.written) == [GrantSession, ConfirmPool, ApplyBatch]
        assert world.memory.num_batches == 1

    run(tmp_path, test)


def test_a_session_whose_grant_could_not_be_written_holds_nobody_up(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.journal.fails_at = GrantSession
        await fails(world.open())
        await fails(world.open())
        await world.heal()
        await world.open()  # at once
        assert world.fence.epoch == 2
        await world.attach()
        await world.apply()

    run(tmp_path, test)


def test_a_pool_and_a_close_that_could_not_be_written_are_not_answered(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.open()
        world.journal.fails_at = ConfirmPool
        await fails(world.attach())
        await fails(world.attach())
        await world.heal()
        assert not (await world.attach()).is_new_pool  # it was carried out
        adopt = pb.AdoptSequencesRequest(fence=world.fence)
        assert [one async for one in world.stub.AdoptSequences(adopt, timeout=DEADLINE_S)] == []
        world.journal.fails_at = CloseSession
        await fails(world.close())
        with pytest.raises(grpc.RpcError) as refused:
            _ = [one async for one in world.stub.AdoptSequences(adopt, timeout=DEADLINE_S)]
        assert reason_of(refused.value) == "JOURNAL_FAILED"
        stats = await world.stub.GetPoolStats(pb.GetPoolStatsRequest(), timeout=DEADLINE_S)
        assert not stats.journal_healthy

    run(tmp_path, test)


def test_a_batch_sent_again_is_not_written_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.open()
        await world.attach()
        assert await world.apply() == await world.apply()
        assert kinds(world.journal.written) == [GrantSession, ConfirmPool, ApplyBatch]
        batch = world.journal.written[2]
        assert isinstance(batch, ApplyBatch)
        step = pb.StepOps.FromString(batch.batch.encoded)
        assert step == pb.StepOps(step_id=1, ops=[arrive("r", 3)])
        assert isinstance(world.memory.ledger.replies[1][1], BatchResult)

    run(tmp_path, test)
