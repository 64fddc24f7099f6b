"""The model worker over one Execute stream."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc import convert, convert_records
from scheduler_svc.core import ops
from scheduler_svc.core.preemption import TierRates
from scheduler_svc.peers import (
    OPEN_DEADLINE_S,
    STREAM_FAILURES,
    FenceHolder,
    check_serving,
    health_stub,
    lost,
    read,
    watch_health,
)
from scheduler_svc.ports import Installed, PeerLostError, WorkerDescription

WHO = "the model worker"
# A step of a large prompt on a slow machine takes seconds; a hung worker takes forever.
STEP_DEADLINE_S = 300.0


class GrpcWorker:
    """The model worker over one Execute stream."""

    def __init__(self, address: str, fence: FenceHolder) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = worker_pb2_grpc.ModelWorkerStub(self._channel)
        self._fence = fence
        self._stream: grpc.aio.StreamStreamCall | None = None
        # Both are handed on in the order of asking, so the replies find their steps.
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()

    async def describe(self) -> WorkerDescription:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        try:
            reply = await self._stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=OPEN_DEADLINE_S)
            health = await health_stub(self._channel).Check(
                health_pb2.HealthCheckRequest(), timeout=OPEN_DEADLINE_S
            )
        except grpc.RpcError as error:
            raise lost("WORKER_LOST", WHO, error) from error
        check_serving(health, "WORKER_LOST", WHO)
        geometry = reply.geometry
        return WorkerDescription(
            boot_id=reply.boot_id,
            model_name=reply.model_name,
            model_path=reply.model_path,
            vocab_size=reply.vocab_size,
            eos_token_ids=tuple(reply.eos_token_ids),
            attention_backend=reply.attention_backend,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            max_model_len=geometry.max_model_len,
            max_num_batched_tokens=reply.max_num_batched_tokens,
            max_inflight_steps=max(reply.max_inflight_steps, 1),
            rates=TierRates(
                reply.prefill_tokens_per_s, reply.swap_bytes_per_s, geometry.kv_bytes_per_block
            ),
            geometry=geometry,
        )

    async def install(self) -> Installed:
        request = worker_pb2.InstallRequest(fence=self._fence.fence)
        try:
            reply = await self._stub.Install(request, timeout=STEP_DEADLINE_S)
        except grpc.RpcError as error:
            raise lost("WORKER_LOST", WHO, error) from error
        return Installed(
            reply.last_step_id, tuple(map(convert_records.retained_of, reply.retained))
        )

    async def execute(self, step: ops.Step, traceparent: str) -> ops.StepResult:
        stream = self._open_stream()
        message = convert.step_message(step, self._fence.fence, traceparent)
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                async with self._writing:
                    await stream.write(message)
                async with self._reading:
                    reply = await read(stream, "WORKER_LOST", WHO)
        except (*STREAM_FAILURES, PeerLostError) as error:
            raise lost("WORKER_LOST", WHO, error) from error
        return convert.step_result_of(reply)

    def _open_stream(self) -> grpc.aio.StreamStreamCall:
        stream = self._stream
        if stream is None:
            self._stream = stream = self._stub.Execute()
        return stream

    async def watch(self) -> None:
        """Raises what the worker ends the stream with as well, while nobody reads from it: so
        a scheduler that waits for the memory service hears that another one has taken over."""
        stream = self._open_stream()
        ended = asyncio.Event()
        stream.add_done_callback(lambda _: ended.set())
        health = asyncio.create_task(watch_health(self._channel, "WORKER_LOST", WHO))
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({health, ending}, return_when=asyncio.FIRST_COMPLETED)
            if health.done():
                health.result()
            async with self._reading:
                await read(stream, "WORKER_LOST", WHO)
        except (*STREAM_FAILURES, PeerLostError) as error:
            raise lost("WORKER_LOST", WHO, error) from error
        finally:
            health.cancel()
            ending.cancel()

    async def close(self) -> None:
        await self._channel.close()
