"""The port to the memory service, against the real service on a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.leases import LeaseTimes
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Session
from kvmem_svc.servicer import KvMemoryServicer
from octavo.service import telemetry
from octavo.v1 import kvmem_pb2_grpc, types_pb2
from scheduler_svc.core import ops
from scheduler_svc.kvmem_port import GrpcKvMemory
from scheduler_svc.peers import FenceHolder
from scheduler_svc.ports import Holder, PeerLostError, WorkerDescription

HOLDER = Holder("scheduler", "unix:/nowhere")
WORKER = WorkerDescription(
    boot_id="w",
    model_name="m",
    model_path="",
    vocab_size=50,
    eos_token_ids=(0,),
    attention_backend="",
    num_blocks=8,
    block_size=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    geometry=types_pb2.PoolGeometry(num_blocks=8, block_size=4, max_model_len=32),
)


@asynccontextmanager
async def service(folder: Path, gatekeeper: Gatekeeper) -> AsyncIterator[GrpcKvMemory]:
    """A port to a memory service in this process."""
    servicer = KvMemoryServicer(
        gatekeeper, telemetry.disabled(), lambda bug: pytest.fail(repr(bug))
    )
    server = grpc.aio.server()
    kvmem_pb2_grpc.add_KvMemoryServicer_to_server(servicer, server)
    address = f"unix:{folder}/kvmem.sock"
    server.add_insecure_port(address)
    await server.start()
    port = GrpcKvMemory(address, FenceHolder())
    try:
        yield port
    finally:
        await port.close()
        await server.stop(None)


async def take_over_with_a_broken_stream(folder: Path) -> None:
    gatekeeper = Gatekeeper(KvMemory("life", max_sequences=8))
    async with service(folder, gatekeeper) as port:
        await port.open(HOLDER, WORKER)
        await port.attach(WORKER, 0)
        assert gatekeeper.mutations_open
        # It lost the worker, say, and takes over from itself.
        await port.open(HOLDER, WORKER)
        await port._resume(port._stream, PeerLostError("KVMEM_LOST", "the connection broke"))
        assert not gatekeeper.mutations_open
        await port.attach(WORKER, 5)
        assert gatekeeper.mutations_open
        assert gatekeeper.memory.acknowledged_step == 5


class CountsHeartbeats(Gatekeeper):
    num_heartbeats = 0

    def heartbeat(self, session: Session, now_ms: int) -> None:
        self.num_heartbeats += 1
        super().heartbeat(session, now_ms)


async def speak_and_be_silent(folder: Path) -> None:
    times = LeaseTimes(lease_ttl_ms=2_000)
    gatekeeper = CountsHeartbeats(KvMemory("life", max_sequences=8), times)
    async with service(folder, gatekeeper) as port:
        opened = await port.open(HOLDER, WORKER)
        await port.attach(WORKER, 0)
        watching = asyncio.create_task(port.watch())
        batch_seq, began_s = opened.next_batch_seq, time.monotonic()
        while time.monotonic() < began_s + 1.5 * times.lease_ttl_ms / 1000:
            await port.apply(ops.Batch(batch_seq, batch_seq, 0, (), False), "")
            batch_seq += 1
        assert not gatekeeper.num_heartbeats
        async with asyncio.timeout(30):
            while gatekeeper.num_heartbeats < 3:
                assert gatekeeper.leases.remaining_ms > 0
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_heartbeats_are_for_when_there_is_nothing_else_to_say(tmp_path: Path) -> None:
    asyncio.run(speak_and_be_silent(tmp_path))


def test_a_session_that_is_resumed_before_the_worker_was_taken_over_stays_closed(
    tmp_path: Path,
) -> None:
    """To confirm the pool then, as that of the session before, would open the mutations while the
    worker still runs a step of that one."""
    asyncio.run(take_over_with_a_broken_stream(tmp_path))
