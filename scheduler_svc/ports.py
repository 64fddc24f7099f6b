"""The scheduler's two ways out: the memory service and the worker, over gRPC streams.

One transport seam each, so that the same engine also runs with both in one process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2, kvmem_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from scheduler_svc import convert
from scheduler_svc.core import ops
from scheduler_svc.core.events import Connected

OPEN_DEADLINE_S = 5.0
BATCH_DEADLINE_S = 30.0
# A step of a large prompt on a slow machine takes seconds; a hung worker takes forever.
STEP_DEADLINE_S = 300.0


class PeerLostError(Exception):
    """A peer went away or refused us. `reason` is a key of the error table."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class WorkerDescription:
    """What the worker says of itself."""

    boot_id: str
    model_name: str
    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    attention_backend: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    # The whole geometry, for the memory service; opaque here.
    geometry: Any = field(repr=False, default=None)


class KvMemoryPort(Protocol):
    """The memory service, as the engine uses it. Every method raises PeerLostError."""

    async def open(self, holder: str, worker: WorkerDescription) -> Connected: ...

    async def apply(self, batch: ops.Batch, traceparent: str) -> ops.BatchResult: ...

    async def watch(self) -> None:
        """Waits, with nothing to do as well, and raises when the peer is gone or unwell."""
        ...

    async def close(self) -> None: ...


class WorkerPort(Protocol):
    """The model worker, as the engine uses it. Every method raises PeerLostError."""

    async def describe(self) -> WorkerDescription: ...

    async def execute(self, step: ops.Step, traceparent: str) -> ops.StepResult: ...

    async def watch(self) -> None:
        """As the memory service's."""
        ...

    async def close(self) -> None: ...


class FenceHolder:
    """The fence of the open session, shared by the two ports of one engine."""

    def __init__(self) -> None:
        self.fence = types_pb2.Fence()


class GrpcKvMemory:
    """The memory service over one Session stream."""

    def __init__(self, address: str, fence: FenceHolder) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = kvmem_pb2_grpc.KvMemoryStub(self._channel)
        self._fence = fence
        self._stream: grpc.aio.StreamStreamCall | None = None

    async def open(self, holder: str, worker: WorkerDescription) -> Connected:
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                return await self._open(holder, worker)
        except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError) as error:
            raise lost("KVMEM_LOST", "the KV memory service", error) from error

    async def _open(self, holder: str, worker: WorkerDescription) -> Connected:
        if self._stream is not None:
            self._stream.cancel()
        self._stream = stream = self._stub.Session()
        request = kvmem_pb2.OpenSessionRequest(holder=holder)
        await stream.write(kvmem_pb2.SessionRequest(open=request))
        reply = await _read(stream)
        opened = reply.opened
        attached = await self._stub.AttachPool(
            kvmem_pb2.AttachPoolRequest(
                fence=opened.fence, worker_boot_id=worker.boot_id, geometry=worker.geometry
            ),
            timeout=OPEN_DEADLINE_S,
        )
        self._fence.fence = attached.fence
        return Connected(
            next_batch_seq=opened.next_batch_seq,
            last_step_id=opened.last_step_id,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            levels=convert.levels_of(attached.levels),
        )

    async def apply(self, batch: ops.Batch, traceparent: str) -> ops.BatchResult:
        assert self._stream is not None
        message = convert.batch_message(batch, self._fence.fence, traceparent)
        try:
            async with asyncio.timeout(BATCH_DEADLINE_S):
                await self._stream.write(kvmem_pb2.SessionRequest(batch=message))
                reply = await _read(self._stream)
        except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError) as error:
            raise lost("KVMEM_LOST", "the KV memory service", error) from error
        return convert.result_of(reply.result)

    async def watch(self) -> None:
        await _watch_health(self._channel, "KVMEM_LOST", "the KV memory service")

    async def close(self) -> None:
        await self._channel.close()


class GrpcWorker:
    """The model worker over one Execute stream."""

    def __init__(self, address: str, fence: FenceHolder) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = worker_pb2_grpc.ModelWorkerStub(self._channel)
        self._fence = fence
        self._stream: grpc.aio.StreamStreamCall | None = None

    async def describe(self) -> WorkerDescription:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        try:
            reply = await self._stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=OPEN_DEADLINE_S)
            health = await _health_stub(self._channel).Check(
                health_pb2.HealthCheckRequest(), timeout=OPEN_DEADLINE_S
            )
        except grpc.RpcError as error:
            raise lost("WORKER_LOST", "the model worker", error) from error
        _check_serving(health, "WORKER_LOST", "the model worker")
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
            geometry=geometry,
        )

    async def execute(self, step: ops.Step, traceparent: str) -> ops.StepResult:
        stream = self._stream
        if stream is None:
            self._stream = stream = self._stub.Execute()
        message = convert.step_message(step, self._fence.fence, traceparent)
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                await stream.write(message)
                reply = await _read(stream)
        except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError) as error:
            raise lost("WORKER_LOST", "the model worker", error) from error
        return convert.step_result_of(reply)

    async def watch(self) -> None:
        await _watch_health(self._channel, "WORKER_LOST", "the model worker")

    async def close(self) -> None:
        await self._channel.close()


async def _read(stream: grpc.aio.StreamStreamCall) -> Any:
    """The next message; a stream that ends instead raises what it ended with."""
    reply = await stream.read()
    if reply is grpc.aio.EOF:  # type: ignore[attr-defined]
        code = await stream.code()
        raise PeerLostError(
            "KVMEM_LOST" if code is grpc.StatusCode.OK else "INTERNAL",
            f"the stream ended with {code.name}: {await stream.details()}",
        )
    return reply


async def _watch_health(channel: grpc.aio.Channel, reason: str, who: str) -> NoReturn:
    """Follow what the peer says of its health. Raises PeerLostError when that is bad or stops."""
    watching = _health_stub(channel).Watch(health_pb2.HealthCheckRequest())
    try:
        async for health in watching:
            _check_serving(health, reason, who)
    except grpc.RpcError as error:
        raise lost(reason, who, error) from error
    finally:
        watching.cancel()
    raise PeerLostError(reason, f"{who} has stopped")


def _health_stub(channel: grpc.aio.Channel) -> Any:
    # Its methods are attributes that the type stubs leave out.
    return health_pb2_grpc.HealthStub(channel)


def _check_serving(health: health_pb2.HealthCheckResponse, reason: str, who: str) -> None:
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
        raise PeerLostError(reason, f"{who} says {name} of itself")


def lost(reason: str, who: str, error: BaseException) -> PeerLostError:
    """What to tell callers about a call that failed."""
    if isinstance(error, grpc.RpcError):
        stated = ServiceError.from_rpc_error(error)
        if stated is not None:
            return PeerLostError(stated.reason, stated.message)
        code = getattr(error, "code", lambda: None)()
        details = getattr(error, "details", lambda: "")()
        return PeerLostError(reason, f"{who} cannot be reached ({code}: {details})")
    if isinstance(error, TimeoutError):
        return PeerLostError(reason, f"{who} did not answer in time")
    return PeerLostError(reason, f"{who} has ended its stream")
