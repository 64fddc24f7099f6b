"""The KvMemory service: the memory core behind gRPC.

One event loop owns the core, so calls reach it one at a time and in order. A mistake of the
caller ends its call with a reason; a bug in the core ends the process, since its books can no
longer be trusted. Every mutation is journalled after the core carried it out and before it is
answered; while that cannot be done nothing is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio
import structlog

from kvmem_svc import convert
from kvmem_svc.core import batch as b
from kvmem_svc.core.errors import KvMemoryError
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.limits import MAX_OPS_PER_BATCH
from kvmem_svc.core.mutations import Mutation, Reply, Session
from kvmem_svc.ports import Journal, NullJournal
from kvmem_svc.read_servicer import MAX_VIEWED_SEQUENCES, ReadServicer, service_error
from kvmem_svc.traces import BatchTrace, BatchTracer
from kvmem_svc.watchers import Watchers
from octavo.service.errors import ServiceError, abort
from octavo.service.telemetry import Telemetry
from octavo.v1 import kvmem_pb2 as pb

log = structlog.get_logger()
T = TypeVar("T")


# How often time is looked at: well below what one look may add to it. And how often a journal
# that failed is tried again.
TICK_S = 0.25
RETRY_S = 0.1

DRAINING = ServiceError("DRAINING", "the memory service is shutting down", retry_after_ms=500)
JOURNAL_FAILED = ServiceError(
    "JOURNAL_FAILED", "the journal cannot be written at the moment", retry_after_ms=100
)


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class KvMemoryServicer(ReadServicer):
    """`on_bug` is called once with what broke; the process is then to end.

    `on_serving` is told whether mutations can be acknowledged, whenever that changes.
    """

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        telemetry: Telemetry,
        on_bug: Callable[[Exception], None],
        *,
        journal: Journal | None = None,
        on_serving: Callable[[bool], Awaitable[None]] | None = None,
        now_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        super().__init__(gatekeeper, journal or NullJournal())
        self._tracer = BatchTracer(telemetry, gatekeeper.memory)
        self._on_bug = on_bug
        if journal is not None:
            gatekeeper.on_mutation = self._record
        self._on_serving = on_serving
        self._now_ms = now_ms
        self._watchers = Watchers()
        self._draining = False
        self._is_serving = True
        # The handler of the stream that holds the session, and why it was cancelled by us.
        self._stream: asyncio.Task[None] | None = None
        self._ended_by_us: dict[asyncio.Task[None], ServiceError] = {}
        # The newest result converted, and what it became: needed by the journal and the reply.
        self._converted: tuple[b.BatchResult, pb.BatchResult] | None = None

    async def drain(self) -> None:
        """Refuse what is new, and end the session's stream and all watchers with DRAINING."""
        self._draining = True
        self._watchers.end_all(DRAINING)
        if self._stream is not None:
            self._end_stream(self._stream, DRAINING)

    # --- time --------------------------------------------------------------------------

    async def keep_ticking(self) -> None:
        """Let time go on for leases and TTLs, and try a journal that failed again; for ever."""
        while True:
            await asyncio.sleep(TICK_S if self._is_serving else RETRY_S)
            healthy = self._journal.healthy or self._journal.flush_pending()
            if healthy != self._is_serving:
                self._is_serving = healthy
                log.warning("the journal works again" if healthy else "the journal failed")
                if self._on_serving is not None and not self._draining:
                    await self._on_serving(healthy)
            if healthy and not self._draining:
                self._expire()

    def _expire(self) -> None:
        try:
            request_ids = self._guarded(lambda: self._gatekeeper.tick(self._now_ms()))
        except ServiceError:  # a bug, told already: the process is about to end
            return
        if request_ids:
            log.warning("nobody came for requests: expired", num_requests=len(request_ids))
            self._tracer.forget(request_ids)
            self._publish_snapshot()

    # --- the journal -------------------------------------------------------------------

    def _record(self, mutation: Mutation, reply: Reply) -> None:
        if isinstance(reply, b.BatchResult):
            digest = convert.encoded_digest(self._result_to_pb(reply))
        else:
            digest = convert.reply_digest(reply)
        self._journal.append(mutation, digest)

    def _result_to_pb(self, result: b.BatchResult) -> pb.BatchResult:
        if self._converted is None or self._converted[0] is not result:
            self._converted = result, convert.result_to_pb(result)
        return self._converted[1]

    def _check_accepting(self) -> None:
        """Before anything is done. Raises ServiceError."""
        if self._draining:
            raise DRAINING
        self._check_journalled()

    def _check_journalled(self) -> None:
        """Before a mutation is acknowledged. Raises ServiceError."""
        if not self._journal.healthy:
            raise JOURNAL_FAILED

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
            session = self._open(first.open)
            self._stream = task
            await context.write(pb.SessionReply(opened=self._opened()))
            await self._serve_batches(session, context)
        except asyncio.CancelledError:
            error = self._ended_by_us.pop(task, None)
            if error is None:
                raise
            task.uncancel()
            await abort(context, error)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))
        finally:
            self._ended_by_us.pop(task, None)
            if session is not None and self._stream is task:
                # Whether the holder is done or its stream broke cannot be told apart in time.
                self._stream = None
                self._gatekeeper.release_session(session, self._now_ms())
                log.info("session stream ended", session_id=session.session_id)

    async def _serve_batches(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        loop = asyncio.get_running_loop()
        while isinstance(request := await context.read(), pb.SessionRequest):
            match request.WhichOneof("message"):
                case "batch":
                    reply = pb.SessionReply(result=self._apply(request.batch))
                    # By then the reply is under way.
                    loop.call_soon(self._settle)
                    await context.write(reply)
                case "heartbeat":
                    self._gatekeeper.heartbeat(session, self._now_ms())
                case _:
                    raise ServiceError(
                        "INVALID_BATCH", "a session is opened by its first message only"
                    )

    def _settle(self) -> None:
        with contextlib.suppress(ServiceError):  # a bug, told already: the process is about to end
            self._guarded(self._memory.settle)

    def _end_stream(self, task: asyncio.Task[None], error: ServiceError) -> None:
        self._ended_by_us[task] = error
        task.cancel()

    def _let_go_of_stream(self, reason: str, message: str) -> None:
        """End the stream that held the session until now."""
        if self._stream is not None:
            self._end_stream(self._stream, ServiceError(reason, message))
            self._stream = None

    def _open(self, request: pb.OpenSessionRequest) -> Session:
        """Open or resume a session. Raises KvMemoryError, ServiceError."""
        self._check_accepting()
        gatekeeper, now_ms = self._gatekeeper, self._now_ms()
        if request.HasField("resume"):
            session = gatekeeper.resume_session(
                convert.fence_from_pb(request.resume), request.last_result_batch_seq, now_ms
            )
            self._let_go_of_stream("UNKNOWN_SESSION", "the session went on elsewhere")
            log.info("session resumed", session_id=session.session_id, holder=session.holder)
            return session
        former = self._memory.ledger.session
        session = self._guarded(
            lambda: gatekeeper.open_session(request.holder, now_ms, request.holder_address)
        )
        self._let_go_of_stream("STALE_EPOCH", f"session {session.session_id} took over")
        self._publish_snapshot()
        log.info(
            "session opened",
            session_id=session.session_id,
            holder=session.holder,
            holder_address=session.holder_address,
            taken_over_from=former.holder if former is not None else None,
            num_requests=len(self._memory.manager.requests) if self._memory.manager else 0,
        )
        try:
            self._check_journalled()
        except ServiceError:
            gatekeeper.abandon_session(session)
            raise
        return session

    def _opened(self) -> pb.SessionOpened:
        memory, ledger = self._memory, self._memory.ledger
        geometry = convert.geometry_to_pb(memory.manager.geometry) if memory.manager else None
        return pb.SessionOpened(
            fence=convert.fence_to_pb(ledger.fence()),
            next_batch_seq=ledger.next_batch_seq,
            lease_ttl_ms=self._gatekeeper.leases.times.lease_ttl_ms,
            geometry=geometry,
            max_ops_per_batch=MAX_OPS_PER_BATCH,
            last_step_id=memory.last_step_id,
            mutations_open=self._gatekeeper.mutations_open,
        )

    # --- unary twins -------------------------------------------------------------------

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.SessionOpened:
        try:
            self._open(request)
            return self._opened()
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))

    async def Apply(self, request: pb.Batch, context: grpc.aio.ServicerContext) -> pb.BatchResult:
        try:
            return self._apply(request)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionReply:
        try:
            self._check_accepting()
            fence = convert.fence_from_pb(request.fence)
            self._guarded(lambda: self._gatekeeper.close_session(fence, self._now_ms()))
            self._let_go_of_stream("UNKNOWN_SESSION", "the session was closed")
            log.info("session closed", session_id=request.fence.session_id)
            self._check_journalled()
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))
        return pb.CloseSessionReply()

    async def AttachPool(
        self, request: pb.AttachPoolRequest, context: grpc.aio.ServicerContext
    ) -> pb.AttachPoolReply:
        try:
            return self._attach_pool(request)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))

    def _attach_pool(self, request: pb.AttachPoolRequest) -> pb.AttachPoolReply:
        self._check_accepting()
        geometry = convert.geometry_from_pb(request.geometry)
        confirmed = self._guarded(
            lambda: self._gatekeeper.attach_pool(
                convert.fence_from_pb(request.fence),
                request.worker_boot_id,
                geometry,
                self._now_ms(),
                request.last_executed_step,
            )
        )
        log.info(
            "pool attached",
            worker_boot_id=request.worker_boot_id,
            is_new_pool=confirmed.is_new_pool,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            last_executed_step=request.last_executed_step,
            num_host_blocks=geometry.num_host_blocks,
            num_pending_copies=len(confirmed.pending_copies),
            num_pending_swaps=len(confirmed.pending_swap_ins) + len(confirmed.pending_swap_outs),
        )
        if confirmed.is_new_pool:
            self._publish_snapshot()
        self._check_journalled()
        memory = self._memory
        return convert.pool_confirmed_to_pb(confirmed, memory.ledger.fence(), memory.levels())

    async def AdoptSequences(
        self, request: pb.AdoptSequencesRequest, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            self._check_accepting()
            fence = convert.fence_from_pb(request.fence)
            adopted = self._gatekeeper.adopt(fence, self._now_ms())
            log.info("requests adopted", session_id=fence.session_id, num_requests=len(adopted))
            for one in adopted:
                self._memory.ledger.check_mutation(fence)  # while it streams, another may open
                await context.write(convert.adopted_to_pb(one))
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))

    # --- batches -----------------------------------------------------------------------

    def _apply(self, request: pb.Batch) -> pb.BatchResult:
        """Apply one batch, and tell watchers and traces. Raises KvMemoryError, ServiceError."""
        self._check_accepting()
        memory = self._memory
        num_batches = memory.num_batches
        batch = convert.batch_from_pb(request)
        trace = self._begin_trace(batch, request) if self._tracer.enabled else None
        now_ms = self._now_ms()
        result = self._guarded(lambda: self._gatekeeper.apply(batch, now_ms))
        reply = self._result_to_pb(result)
        if memory.num_batches != num_batches:  # else sent again: told already
            self.num_recorded_tokens += _num_recorded_tokens(batch, result)
            if trace is not None:
                self._tracer.end(trace, result)
            if self._watchers:
                applied = pb.AppliedBatch(
                    batch_seq=request.batch_seq, step=request.step, result=reply
                )
                self._watchers.publish(pb.WatchEvent(applied=applied))
            self._check_journalled()
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

    # --- pins --------------------------------------------------------------------------

    async def Pin(self, request: pb.PinRequest, context: grpc.aio.ServicerContext) -> pb.PinReply:
        try:
            self._check_accepting()
            fence, pin = convert.fence_from_pb(request.fence), convert.pin_from_pb(request)
            pinned = self._guarded(lambda: self._gatekeeper.pin(fence, pin, self._now_ms()))
            self._check_journalled()
            return pb.PinReply(pin_id=pinned.pin_id, num_pinned_tokens=pinned.num_pinned_tokens)
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))

    async def Unpin(
        self, request: pb.UnpinRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnpinReply:
        try:
            self._check_accepting()
            fence = convert.fence_from_pb(request.fence)
            self._guarded(lambda: self._gatekeeper.unpin(fence, request.pin_id, self._now_ms()))
            self._check_journalled()
        except (KvMemoryError, ServiceError) as error:
            await abort(context, service_error(error))
        return pb.UnpinReply()

    async def WatchEvents(
        self,
        request: pb.WatchEventsRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        try:
            if self._draining:
                raise DRAINING
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
        return pb.WatchEvent(snapshot=self.block_tables([], "", MAX_VIEWED_SEQUENCES))

    def _publish_snapshot(self) -> None:
        """Everything may have changed: watchers start over from a new snapshot."""
        if self._watchers:
            self._watchers.publish(self._snapshot())


def _num_recorded_tokens(batch: b.Batch, result: b.BatchResult) -> int:
    """Tokens that the batch added to sequences; those that an Arrive brings were there before."""
    return sum(
        op.token_ids.size
        for op, op_result in zip(batch.ops, result.results, strict=True)
        if isinstance(op, b.Commit | b.Append | b.Fork) and op_result.status is b.OpStatus.OK
    )
