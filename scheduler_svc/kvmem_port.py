"""The memory service over one Session stream, which is resumed when only the connection broke."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc.aio
import structlog

from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2, kvmem_pb2_grpc, types_pb2
from scheduler_svc import convert, convert_records
from scheduler_svc.core import ops
from scheduler_svc.peers import (
    OPEN_DEADLINE_S,
    STREAM_FAILURES,
    FenceHolder,
    lost,
    read,
    watch_health,
)
from scheduler_svc.ports import Holder, Opened, PeerLostError, PoolAttached, WorkerDescription

log = structlog.get_logger()

WHO = "the KV memory service"
BATCH_DEADLINE_S = 30.0
# How long the session is tried to be resumed, and how.
RESUME_FOR_S = 3.0
RESUME_ATTEMPT_S = 1.0
RESUME_PAUSE_S = 0.02
RESUME_PAUSE_MOST_S = 0.2
# Heartbeats per lease, while there is nothing else to say. So half a lease is the longest silence.
BEATS_PER_LEASE = 4
# Words of the peer that leave room for hope: it is there, or will be, with the same state.
PASSING = frozenset(("KVMEM_LOST", "NOT_READY", "DRAINING", "JOURNAL_FAILED"))


class GrpcKvMemory:
    """The memory service over one Session stream."""

    def __init__(self, address: str, fence: FenceHolder) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = kvmem_pb2_grpc.KvMemoryStub(self._channel)
        self._fence = fence
        self._stream: grpc.aio.StreamStreamCall | None = None
        self._writing = asyncio.Lock()
        self._resuming = asyncio.Lock()
        self._holder = Holder("")
        self._worker: WorkerDescription | None = None
        self._lease_s = 1.0
        self._last_result_batch_seq = 0
        self._acknowledged_step = 0
        # Since the last time a heartbeat was due.
        self._has_spoken = False

    # ---- taking over ----

    async def open(self, holder: Holder, worker: WorkerDescription) -> Opened:
        await self._end_session()
        self._holder = holder
        # Of the session before: a session resumed before `attach` has no pool to confirm yet.
        self._worker = None
        message = kvmem_pb2.OpenSessionRequest(holder=holder.name, holder_address=holder.address)
        opened = await self._open_stream(message, OPEN_DEADLINE_S)
        self._fence.fence = opened.fence
        # Before the pool is attached the worker is to obey the fence already.
        self._fence.fence.worker_boot_id = worker.boot_id
        self._lease_s = opened.lease_ttl_ms / 1000
        self._last_result_batch_seq = opened.next_batch_seq - 1
        return Opened(opened.next_batch_seq, opened.last_step_id)

    async def attach(self, worker: WorkerDescription, last_executed_step: int) -> PoolAttached:
        self._worker = worker
        self._acknowledged_step = last_executed_step
        try:
            attached = await self._stub.AttachPool(
                kvmem_pb2.AttachPoolRequest(
                    fence=self._fence.fence,
                    worker_boot_id=worker.boot_id,
                    geometry=worker.geometry,
                    last_executed_step=last_executed_step,
                ),
                timeout=OPEN_DEADLINE_S,
            )
        except STREAM_FAILURES as error:
            raise lost("KVMEM_LOST", WHO, error) from error
        self._fence.fence = attached.fence
        return PoolAttached(
            convert.levels_of(attached.levels),
            convert_records.pending_copies_of(attached),
            convert.copies_of(attached.pending_swap_ins),
            convert.copies_of(attached.pending_swap_outs),
        )

    async def adopt(self) -> tuple[ops.AdoptedRequest, ...]:
        request = kvmem_pb2.AdoptSequencesRequest(fence=self._fence.fence)
        try:
            records = self._stub.AdoptSequences(request, timeout=OPEN_DEADLINE_S)
            return tuple([convert_records.adopted_of(record) async for record in records])
        except STREAM_FAILURES as error:
            raise lost("KVMEM_LOST", WHO, error) from error

    async def close(self) -> None:
        await self._end_session()
        await self._channel.close()

    async def _end_session(self) -> None:
        """Whether it succeeds or not: a session that nobody speaks for ends by itself."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        request = kvmem_pb2.CloseSessionRequest(fence=self._fence.fence)
        with contextlib.suppress(grpc.RpcError):
            await self._stub.CloseSession(request, timeout=RESUME_ATTEMPT_S)
        stream.cancel()

    async def _open_stream(
        self, message: kvmem_pb2.OpenSessionRequest, timeout_s: float
    ) -> kvmem_pb2.SessionOpened:
        stream = self._stub.Session(wait_for_ready=True)
        try:
            async with asyncio.timeout(timeout_s):
                await stream.write(kvmem_pb2.SessionRequest(open=message))
                reply = await read(stream, "KVMEM_LOST", WHO)
        except (*STREAM_FAILURES, PeerLostError) as error:
            stream.cancel()
            raise lost("KVMEM_LOST", WHO, error) from error
        self._stream = stream
        return reply.opened

    # ---- batches ----

    async def apply(self, batch: ops.Batch, traceparent: str) -> ops.BatchResult:
        try:
            async with asyncio.timeout(BATCH_DEADLINE_S):
                while True:
                    stream = self._stream
                    if stream is None:
                        raise PeerLostError("KVMEM_LOST", f"{WHO} is not connected")
                    message = convert.batch_message(batch, self._fence.fence, traceparent)
                    try:
                        reply = await self._exchange(stream, message)
                        break
                    except (grpc.RpcError, asyncio.InvalidStateError, PeerLostError) as error:
                        await self._resume(stream, lost("KVMEM_LOST", WHO, error))
        except TimeoutError as error:
            raise lost("KVMEM_LOST", WHO, error) from error
        self._last_result_batch_seq = batch.batch_seq
        self._acknowledged_step = batch.acknowledged_step
        return convert.result_of(reply.result)

    async def _exchange(self, stream: grpc.aio.StreamStreamCall, message: kvmem_pb2.Batch) -> Any:
        async with self._writing:
            await stream.write(kvmem_pb2.SessionRequest(batch=message))
        self._has_spoken = True
        return await read(stream, "KVMEM_LOST", WHO)

    # ---- keeping it ----

    async def watch(self) -> None:
        beating = asyncio.get_running_loop().create_task(self._beat())
        try:
            while True:
                stream = self._stream
                try:
                    await watch_health(self._channel, "KVMEM_LOST", WHO)
                except PeerLostError as error:
                    await self._resume(stream, error)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        beat = kvmem_pb2.SessionRequest(heartbeat=kvmem_pb2.Heartbeat())
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            if self._has_spoken:  # a batch makes the lease longer as well
                self._has_spoken = False
                continue
            stream = self._stream
            if stream is not None:
                # A stream that broke is noticed by whoever reads from it, and by `watch`.
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    async with self._writing:
                        await stream.write(beat)

    async def _resume(self, broken: grpc.aio.StreamStreamCall | None, error: PeerLostError) -> None:
        """Go on with the session over a new stream. Raises PeerLostError when that is no use.

        The broken one is not cancelled, since somebody may be reading from it: the service ends
        it, if it is still there to end.
        """
        async with self._resuming:
            if self._stream is not broken:
                return  # Another one of us has noticed too, and done it.
            if error.reason not in PASSING or broken is None:
                raise error
            log.warning("resuming the session", error=error.message)
            deadline, pause_s = time.monotonic() + RESUME_FOR_S, RESUME_PAUSE_S
            while True:
                try:
                    await self._try_to_resume()
                except PeerLostError as refused:
                    if refused.reason not in PASSING or time.monotonic() > deadline:
                        raise
                else:
                    log.info("session resumed")
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RESUME_PAUSE_MOST_S)

    async def _try_to_resume(self) -> None:
        fence = types_pb2.Fence()
        fence.CopyFrom(self._fence.fence)
        opened = await self._open_stream(
            kvmem_pb2.OpenSessionRequest(
                holder=self._holder.name,
                holder_address=self._holder.address,
                resume=fence,
                last_result_batch_seq=self._last_result_batch_seq,
            ),
            RESUME_ATTEMPT_S,
        )
        if not opened.mutations_open and self._worker is not None:
            # It came back from its journal, and takes the pool for gone until told otherwise.
            await self.attach(self._worker, self._acknowledged_step)
