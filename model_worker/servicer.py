"""The gRPC face of the worker: GetInfo, Install, and Execute with its one exclusive stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog

from model_worker import convert
from model_worker.errors import StepError
from model_worker.fencing import Fence, Fencing
from model_worker.metrics import StepMetrics
from model_worker.step import RetainedStep, StepInput, StepOutput
from model_worker.tracing import record_step
from octavo.service.errors import ServiceError, abort
from octavo.service.telemetry import Telemetry
from octavo.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    # It brings torch, and the server is to listen before that is loaded.
    from model_worker.runner import ModelRunner

log = structlog.get_logger()

# Steps that may be un-answered at a time; their results are kept for an adopter.
MAX_INFLIGHT_STEPS = 2


class _Stream:
    """One open Execute stream. `replaced` is done, with what it is to end with, once the worker
    has been taken from it: by a newer session, or by its own on another connection."""

    def __init__(self) -> None:
        self.replaced: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class _Issued:
    """A step on the model thread, or waiting for it."""

    step: StepInput
    output: asyncio.Future[StepOutput]


class WorkerServicer(worker_pb2_grpc.ModelWorkerServicer):
    """Serves a ModelRunner, once there is one; until then every call says NOT_READY.

    The runner lives on `model_thread`, a pool of one thread, so that steps run one after another
    whatever becomes of the streams that brought them, and the event loop stays free meanwhile.
    """

    def __init__(
        self, boot_id: str, model_thread: ThreadPoolExecutor, telemetry: Telemetry
    ) -> None:
        self.boot_id = boot_id
        self.fencing = Fencing(boot_id)
        # The newest steps with rows, whether or not anybody received their results.
        self.retained: deque[RetainedStep] = deque(maxlen=MAX_INFLIGHT_STEPS)
        # Monotonic time at which the step that runs now began; None between steps.
        self.step_began_s: float | None = None
        # Steps of the newest session that may repeat what was executed for the one before.
        self._num_watched_steps = 0
        self._model_thread = model_thread
        self._telemetry = telemetry
        self._metrics = StepMetrics(telemetry.meter)
        self._runner: ModelRunner | None = None
        self._holder: _Stream | None = None

    def set_runner(self, runner: ModelRunner) -> None:
        """Begin to serve."""
        self._runner = runner

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        if self._runner is None:
            await abort(context, _not_ready())
        return convert.info_to_pb(self._runner, self.boot_id, MAX_INFLIGHT_STEPS)

    async def Install(
        self, request: worker_pb2.InstallRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.InstallReply:
        fence = convert.fence_from_pb(request.fence)
        try:
            if self._runner is None:
                raise _not_ready()
            self._install(fence, is_newer=self.fencing.check(fence))
        except StepError as error:
            log.warning("install refused", reason=error.reason, message=error.message)
            await abort(context, ServiceError(error.reason, error.message))
        except ServiceError as error:
            await abort(context, error)
        # Behind the step that runs, and behind those queued: of these the older ones are refused.
        last_step_id, retained = await asyncio.get_running_loop().run_in_executor(
            self._model_thread, self._executed_for, fence
        )
        return convert.installed_to_pb(self.boot_id, last_step_id, retained)

    async def Execute(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        del request_iterator  # Read through `context`, so that a wait for it can be given up.
        stream = _Stream()
        try:
            await self._serve(stream, context)
        except StepError as error:
            log.warning("step refused", reason=error.reason, message=error.message)
            await abort(context, ServiceError(error.reason, error.message))
        except ServiceError as error:
            await abort(context, error)
        except Exception:
            log.exception("step failed")
            await abort(context, ServiceError("INTERNAL", "the step failed; see the worker's log"))
        finally:
            if self._holder is stream:
                self._holder = None

    async def _serve(self, stream: _Stream, context: grpc.aio.ServicerContext) -> None:
        """Answer the stream's steps until it ends. Raises what ends it early."""
        if self._runner is None:
            raise _not_ready()
        steps: asyncio.Queue[_Issued | None] = asyncio.Queue(MAX_INFLIGHT_STEPS)
        replying = asyncio.ensure_future(self._reply(stream, steps, context))
        reading = asyncio.ensure_future(self._read(self._runner, stream, steps, context))
        under_way = {replying, reading}
        try:
            while under_way:
                await asyncio.wait(
                    {*under_way, stream.replaced}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in (replying, reading):
                    if task.done():
                        task.result()
                        under_way.discard(task)
                if under_way and stream.replaced.done():
                    raise stream.replaced.result()
        finally:
            replying.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reading

    async def _read(
        self,
        runner: ModelRunner,
        stream: _Stream,
        steps: asyncio.Queue[_Issued | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Put the stream's steps on the model thread, in their order, until its end."""
        while isinstance(request := await context.read(), worker_pb2.ExecuteRequest):
            fence = convert.fence_from_pb(request.fence)
            self._take_hold(stream, fence)
            step = convert.step_from_pb(request)
            # On its way before the one before it has been answered: the model never waits.
            output = asyncio.get_running_loop().run_in_executor(
                self._model_thread, self._run, runner, fence, step
            )
            # Whoever takes the stream's place may leave it without a reader.
            output.add_done_callback(_take_note)
            await steps.put(_Issued(step, output))
        await steps.put(None)

    async def _reply(
        self,
        stream: _Stream,
        steps: asyncio.Queue[_Issued | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Answer the steps in their order."""
        while (issued := await steps.get()) is not None:
            output = await issued.output
            if stream.replaced.done():
                raise stream.replaced.result()
            await context.write(convert.reply_to_pb(output, self.boot_id))
            if self._telemetry.enabled:
                record_step(self._telemetry, issued.step, output)
                self._metrics.record(output)

    def _take_hold(self, stream: _Stream, fence: Fence) -> None:
        """Let `stream` execute under `fence`, ending the stream of an older session.

        Raises StepError (STALE_*) and ServiceError (SESSION_HELD).
        """
        is_newer = self.fencing.check(fence)
        if self._holder is stream:
            self._holder = None
        elif self._holder is not None and not is_newer:
            raise ServiceError(
                "SESSION_HELD", f"epoch {fence.epoch} already has an Execute stream open"
            )
        if is_newer:
            self._install(fence, is_newer=True)
        self._holder = stream

    def _install(self, fence: Fence, *, is_newer: bool) -> None:
        """Refuse older fences from now on, and end the stream that has the worker, if any.

        A stream of the same session goes as well: its holder would not ask while it could still
        use it, and a connection that broke may look open here for a long time.
        """
        if self._holder is not None:
            self._holder.replaced.set_result(_taken_over(fence, is_newer=is_newer))
            self._holder = None
        if is_newer:
            self.fencing.install(fence)
            log.info("session installed", epoch=fence.epoch, session_id=fence.session_id)

    def _executed_for(self, fence: Fence) -> tuple[int, list[RetainedStep]]:
        """On the model thread: the last step and the results of the fence's memory service."""
        life = fence.kvmem_boot_id
        retained = [step for step in self.retained if step.kvmem_boot_id == life]
        return self.fencing.last_step_id_of(life), retained

    def _run(self, runner: ModelRunner, fence: Fence, step: StepInput) -> StepOutput:
        """On the model thread: execute `step`, unless a newer session has come in between."""
        if self.fencing.begin_step(fence, step.step_id):
            runner.forget_sequences()
            self._num_watched_steps = MAX_INFLIGHT_STEPS
        if self._num_watched_steps and step.sequence_ids.size:
            self._num_watched_steps -= 1
            self._watch_for_repetition(fence, step)
        self.step_began_s = time.monotonic()
        try:
            output = runner.execute(step)
        finally:
            self.step_began_s = None
        self.fencing.end_step(step.step_id)
        if step.sequence_ids.size:  # else an adopter's first, empty step would push them out
            self.retained.append(RetainedStep.of(fence.kvmem_boot_id, step, output))
        return output

    def _watch_for_repetition(self, fence: Fence, step: StepInput) -> None:
        """What a takeover costs: a step whose results were handed over need not run again."""
        if any(
            done.kvmem_boot_id == fence.kvmem_boot_id and done.is_repeated_by(step)
            for done in self.retained
        ):
            log.warning("step executed again", step_id=step.step_id)


def _take_note(output: asyncio.Future[StepOutput]) -> None:
    if not output.cancelled():
        output.exception()


def _taken_over(fence: Fence, *, is_newer: bool) -> ServiceError:
    if is_newer:
        return ServiceError("STALE_EPOCH", f"epoch {fence.epoch} has taken this worker over")
    return ServiceError("SESSION_HELD", f"epoch {fence.epoch} goes on over another connection")


def _not_ready() -> ServiceError:
    return ServiceError("NOT_READY", "the model is being loaded", retry_after_ms=500)
