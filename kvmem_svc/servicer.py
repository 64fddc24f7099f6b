"""The KvMemory service: the memory core behind gRPC.

One event loop owns the core, so calls reach it one at a time and in order. A mistake of the
caller ends its call with a reason; a bug in the core ends the process, since its books can no
longer be trusted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc.aio
import structlog

from kvmem_svc import convert
from kvmem_svc.core import batch as b
from kvmem_svc.core.errors import KvMemoryError
from kvmem_svc.core.limits import MAX_OPS_PER_BATCH
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.session import Session
from kvmem_svc.core.views import sequence_views
from kvmem_svc.traces import BatchTrace, BatchTracer
from kvmem_svc.watchers import Watchers
from octavo.service.errors import ServiceError, abort
from octavo.service.telemetry import Telemetry
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc

log = structlog.get_logger()
T = TypeVar("T")

DEFAULT_VIEWED_SEQUENCES = 1024
MAX_VIEWED_SEQUENCES = 65_536

DRAINING = ServiceError("DRAINING", "the memory service is shutting down", retry_after_ms=500)


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class KvMemoryServicer(kvmem_pb2_grpc.KvMemoryServicer):
    """`on_bug` is called once with what broke; the process is then to end."""

    def __init__(
        self,
        memory: KvMemory,
        telemetry: Telemetry,
        on_bug: Callable[[Exception], None],
        now_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._memory = memory
        self._tracer = BatchTracer(telemetry, memory)
        self._on_bug = on_bug
        self._now_ms = now_ms
        self._watchers = Watchers()
        self._draining = False
        # The handler of the stream that holds the session, and why it was cancelled by us.
        self._stream: asyncio.Task[None] | None = None
        self._ended_by_us: dict[asyncio.Task[None], ServiceError] = {}

    async def drain(self) -> None:
        """Refuse what is new, and end the session's stream and all watchers with DRAINING."""
        self._draining = True
        self._watchers.end_all(DRAINING)
        if self._stream is not None:
            self._end_stream(self._stream, DRAINING)

    # --- the session stream ------------------------------------------------------------

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        session: Session | None = None
        try:
            first = await context.read()
            if not isinstance(first, pb.SessionRequest) or not first.HasField("open"):
                raise ServiceError("INVALID_BATCH", "the first message of a session opens it")
            session = self._open(first.open, held_by_stream=True)
            self._stream = task
            await context.write(pb.SessionReply(opened=self._opened()))
            await self._serve_batches(context)
        except asyncio.CancelledError:
            error = self._ended_by_us.pop(task, None)
            if error is None:
                raise
            task.uncancel()
            await abort(context, error)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, _service_error(error))
        finally:
            self._ended_by_us.pop(task, None)
            if session is not None and self._stream is task:
                # Whether the holder is done or its stream broke cannot be told apart in time.
                self._stream = None
                self._memory.ledger.release(session.session_id, self._now_ms())
                log.info("session stream ended", session_id=session.session_id)

    async def _serve_batches(self, context: grpc.aio.ServicerContext) -> None:
        while isinstance(request := await context.read(), pb.SessionRequest):
            if not request.HasField("batch"):
                raise ServiceError("INVALID_BATCH", "a session is opened by its first message only")
            await context.write(pb.SessionReply(result=self._apply(request.batch)))

    def _end_stream(self, task: asyncio.Task[None], error: ServiceError) -> None:
        self._ended_by_us[task] = error
        task.cancel()

    def _open(self, request: pb.OpenSessionRequest, *, held_by_stream: bool) -> Session:
        self._refuse_when_draining()
        memory, now_ms = self._memory, self._now_ms()
        if request.HasField("resume"):
            session = memory.resume_session(
                convert.fence_from_pb(request.resume),
                request.last_result_batch_seq,
                now_ms,
                held_by_stream=held_by_stream,
            )
            if self._stream is not None:
                error = ServiceError("UNKNOWN_SESSION", "the session went on elsewhere")
                self._end_stream(self._stream, error)
                self._stream = None
            log.info("session resumed", session_id=session.session_id)
            return session
        session = self._guarded(
            lambda: memory.open_session(request.holder, now_ms, held_by_stream=held_by_stream)
        )
        self._tracer.forget_all()
        self._publish_snapshot()
        log.info("session opened", session_id=session.session_id, holder=request.holder)
        return session

    def _opened(self) -> pb.SessionOpened:
        memory, ledger = self._memory, self._memory.ledger
        geometry = convert.geometry_to_pb(memory.manager.geometry) if memory.manager else None
        return pb.SessionOpened(
            fence=convert.fence_to_pb(ledger.fence()),
            next_batch_seq=ledger.next_batch_seq,
            lease_ttl_ms=ledger.lease_ttl_ms,
            geometry=geometry,
            max_ops_per_batch=MAX_OPS_PER_BATCH,
            last_step_id=memory.last_step_id,
        )

    # --- unary twins -------------------------------------------------------------------

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.SessionOpened:
        try:
            self._open(request, held_by_stream=False)
            return self._opened()
        except (KvMemoryError, ServiceError) as error:
            await abort(context, _service_error(error))

    async def Apply(self, request: pb.Batch, context: grpc.aio.ServicerContext) -> pb.BatchResult:
        try:
            return self._apply(request)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, _service_error(error))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionReply:
        try:
            self._memory.close_session(convert.fence_from_pb(request.fence), self._now_ms())
        except KvMemoryError as error:
            await abort(context, _service_error(error))
        log.info("session closed", session_id=request.fence.session_id)
        return pb.CloseSessionReply()

    async def AttachPool(
        self, request: pb.AttachPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.AttachPoolReply:
        try:
            self._refuse_when_draining()
            fence = convert.fence_from_pb(request.fence)
            geometry = convert.geometry_from_pb(request.geometry)
            is_new = self._guarded(
                lambda: self._memory.attach_pool(
                    fence, request.worker_boot_id, geometry, self._now_ms()
                )
            )
        except (KvMemoryError, ServiceError) as error:
            await abort(context, _service_error(error))
        if is_new:
            log.info(
                "pool attached",
                worker_boot_id=request.worker_boot_id,
                num_blocks=geometry.num_blocks,
                block_size=geometry.block_size,
            )
            self._publish_snapshot()
        return pb.AttachPoolReply(
            fence=convert.fence_to_pb(self._memory.ledger.fence()),
            levels=convert.levels_to_pb(self._memory.levels()),
        )

    # --- batches -----------------------------------------------------------------------

    def _apply(self, request: pb.Batch) -> pb.BatchResult:
        """Apply one batch, and tell watchers and traces. Raises KvMemoryError, ServiceError."""
        self._refuse_when_draining()
        memory = self._memory
        num_batches = memory.num_batches
        batch = convert.batch_from_pb(request)
        trace = self._begin_trace(batch, request) if self._tracer.enabled else None
        now_ms = self._now_ms()
        result = self._guarded(lambda: memory.apply(batch, now_ms))
        reply = convert.result_to_pb(result)
        if memory.num_batches == num_batches:  # sent again: told already
            return reply
        if trace is not None:
            self._tracer.end(trace, result)
        if self._watchers:
            applied = pb.AppliedBatch(batch_seq=request.batch_seq, step=request.step, result=reply)
            self._watchers.publish(pb.WatchEvent(applied=applied))
        return reply

    def _begin_trace(self, batch: b.Batch, request: pb.Batch) -> BatchTrace:
        arrivals = {
            op.arrive.request_id: op.arrive.traceparent
            for op in request.step.ops
            if op.HasField("arrive")
        }
        return self._tracer.begin(batch, request.traceparent, arrivals)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Run a mutation of the core. What is no KvMemoryError is a bug: the process ends."""
        try:
            return call()
        except KvMemoryError:
            raise
        except Exception as bug:
            self._draining = True
            self._on_bug(bug)
            raise ServiceError("INTERNAL", f"the memory service broke: {bug}") from bug

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise DRAINING

    # --- reading -----------------------------------------------------------------------

    async def GetBlockTables(
        self, request: pb.GetBlockTablesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetBlockTablesReply:
        try:
            return self._block_tables(
                list(request.sequence_ids),
                request.request_id,
                min(request.max_sequences or DEFAULT_VIEWED_SEQUENCES, MAX_VIEWED_SEQUENCES),
            )
        except KvMemoryError as error:
            await abort(context, _service_error(error))

    def _block_tables(
        self, sequence_ids: list[int], request_id: str, max_sequences: int
    ) -> pb.GetBlockTablesReply:
        if self._memory.manager is None:
            return pb.GetBlockTablesReply()
        views, truncated = sequence_views(
            self._memory.manager, sequence_ids, request_id, max_sequences
        )
        return pb.GetBlockTablesReply(sequences=map(convert.view_to_pb, views), truncated=truncated)

    async def GetPoolStats(
        self,
        request: pb.GetPoolStatsRequest,
        context: grpc.aio.ServicerContext,
    ) -> pb.PoolStats:
        ledger = self._memory.ledger
        return convert.stats_to_pb(
            self._memory.stats(), ledger.kvmem_boot_id, ledger.worker_boot_id
        )

    async def WatchEvents(
        self,
        request: pb.WatchEventsRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        try:
            self._refuse_when_draining()
            watcher = self._watchers.add(self._snapshot())
        except ServiceError as error:
            await abort(context, error)
        try:
            while True:
                await context.write(await watcher.next())
        except ServiceError as error:
            await abort(context, error)
        finally:
            self._watchers.remove(watcher)

    def _snapshot(self) -> pb.WatchEvent:
        return pb.WatchEvent(snapshot=self._block_tables([], "", MAX_VIEWED_SEQUENCES))

    def _publish_snapshot(self) -> None:
        """Everything may have changed: watchers start over from a new snapshot."""
        if self._watchers:
            self._watchers.publish(self._snapshot())


def _service_error(error: KvMemoryError | ServiceError) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    return ServiceError(error.reason, error.message, error.retry_after_ms)
