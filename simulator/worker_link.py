"""A scheduler's way to the worker: `scheduler_svc.worker_port` without asyncio."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvmem_svc.core import batch as kv
from scheduler_svc.core import ops
from simulator.clock import SECOND
from simulator.kvmem_link import OPEN_DEADLINE_US, OnFailed
from simulator.messages import Execute, Install, Installed, WorkerInfo
from simulator.network import DEADLINE_EXCEEDED, UNAVAILABLE, Call, End
from simulator.process import Process
from simulator.worker import expect

if TYPE_CHECKING:
    from simulator.scheduler_shell import SchedulerShell

# As in `scheduler_svc.worker_port`.
STEP_DEADLINE_US = 300 * SECOND


class WorkerLink:
    """The worker over one Execute stream."""

    def __init__(self, shell: SchedulerShell, worker: Process, on_lost: OnFailed) -> None:
        """`on_lost` is called with the reason when a step will not be answered."""
        # Those at the worker, oldest first.
        self.steps: deque[ops.Step] = deque()
        self._shell, self._worker, self._on_lost = shell, worker, on_lost
        self._turn = 0
        self._stream: End | None = None
        self._watch: End | None = None
        self._on_result: Callable[[ops.StepResult], None] | None = None

    def cancel(self) -> None:
        """Drop everything under way."""
        self._turn += 1
        self.steps.clear()
        if self._watch is not None:
            self._watch.close("CANCELLED")
            self._watch = None

    def _now(self, action: Callable[..., None]) -> Callable[..., None]:
        """`action`, unless it is cancelled by then."""
        turn = self._turn

        def guarded(*args: Any) -> None:
            if self._turn == turn:
                action(*args)

        return guarded

    def _call(
        self,
        method: str,
        request: object,
        deadline_us: int,
        on_reply: Callable[..., None],
        on_failed: OnFailed,
    ) -> None:
        call = Call(
            self._shell,
            self._worker,
            method,
            request,
            self._now(on_reply),
            self._now(lambda reason: on_failed(_lost(reason))),
        )
        self._shell.network.call(call, deadline_us)

    def describe(self, on_reply: Callable[[WorkerInfo], None], on_failed: OnFailed) -> None:
        if self._stream is not None:
            self._stream.close("CANCELLED")
            self._stream = None
        self._call("GetInfo", None, OPEN_DEADLINE_US, on_reply, on_failed)

    def install(
        self, fence: kv.Fence, on_reply: Callable[[Installed], None], on_failed: OnFailed
    ) -> None:
        self._call("Install", Install(fence), STEP_DEADLINE_US, on_reply, on_failed)

    def execute(
        self, step: ops.Step, fence: kv.Fence, on_result: Callable[[ops.StepResult], None]
    ) -> None:
        self.steps.append(step)
        self._on_result = on_result
        stream = self._stream
        if stream is None:
            stream = self._stream = self._shell.network.open_stream(
                self._shell, self._worker, "Execute"
            )
        elif not stream.open:
            self._on_lost("WORKER_LOST")
            return
        stream.on_message = self._now(self._on_result_arrived)
        stream.on_end = self._now(self._on_stream_end)
        stream.send(Execute(fence, step))
        self._shell.after(STEP_DEADLINE_US, self._now(partial(self._on_deadline, step)))

    def _on_deadline(self, step: ops.Step) -> None:
        if any(step is other for other in self.steps):
            self._on_lost("WORKER_LOST")

    def _on_result_arrived(self, result: ops.StepResult) -> None:
        step = self.steps.popleft()
        expect(
            step.step_id == result.step_id,
            "steps in order",
            f"{result.step_id} is answered before {step.step_id}",
        )
        assert self._on_result is not None
        self._on_result(result)

    def _on_stream_end(self, reason: str) -> None:
        # Nobody reads from it while no step is under way.
        if self.steps:
            self._on_lost(_lost(reason))

    def watch(self) -> None:
        self._watch = self._shell.network.open_stream(self._shell, self._worker, "Health")
        self._watch.on_end = self._now(lambda reason: self._on_lost(_lost(reason)))


def _lost(reason: str) -> str:
    return "WORKER_LOST" if reason in (UNAVAILABLE, DEADLINE_EXCEEDED) else reason
