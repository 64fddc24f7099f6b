"""The shell of the model worker, as `model_worker.servicer` is: real fencing, one model thread,
and a model that checks every slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from kvmem_svc.core import batch as kv
from model_worker.errors import StepError
from model_worker.fencing import Fence, Fencing
from scheduler_svc.core import ops
from simulator import checkers
from simulator.clock import MS
from simulator.kvmem_shell import KvmemShell
from simulator.messages import Execute, Install, Installed, WorkerInfo
from simulator.network import End, Later, Refused
from simulator.prefix_tree import VOCAB
from simulator.process import Process, Surroundings
from simulator.wording import step_in_words
from simulator.worker import EOS, TagWorker, expect


@dataclass(frozen=True)
class _Retained:
    kvmem_boot_id: str
    step: ops.RetainedStep


class WorkerShell(Process):
    """A start is a new boot id; the KV is gone, and with it the results that were kept."""

    boot_id: str
    geometry: kv.PoolGeometry
    model: TagWorker
    fencing: Fencing
    retained: deque[_Retained]
    _ready: bool
    _holder: End | None
    # Steps with their streams, and installations that wait behind them.
    _queue: deque[tuple[End, Execute] | tuple[Later, Install]]
    _busy: bool
    # The newest epoch let in, by boot id of the memory service.
    _newest_epochs: dict[str, int]

    def __init__(self, world: Surroundings, kvmem: KvmemShell) -> None:
        super().__init__("worker", world)
        self._kvmem = kvmem

    def boot(self) -> None:
        self.boot_id = f"worker-{self.life}"
        self.geometry = self.world.knobs.geometry(self.life)
        checks = self.world.checks
        self.model = TagWorker(self.geometry.block_size, checks.tree, checks.kv)
        checks.kv.workers[self.boot_id] = self.model
        self.fencing = Fencing(self.boot_id)
        self.retained = deque(maxlen=self.world.knobs.max_inflight_steps)
        self._ready = False
        self._holder = None
        self._queue = deque()
        self._busy = False
        self._newest_epochs = {}
        self.note(f"starts as {self.boot_id}")
        self.after(self.world.draw.choice([0, 0, 20 * MS, 200 * MS]), self._get_ready)

    def _get_ready(self) -> None:
        self._ready = True

    def serve(self, method: str, request: object) -> object:
        if not self._ready:
            raise Refused("NOT_READY", "the model is being loaded")
        if isinstance(request, Install):
            return self._serve_install(request)
        assert method == "GetInfo", method
        return WorkerInfo(
            self.boot_id,
            self.geometry,
            VOCAB,
            (EOS,),
            self.world.knobs.worker_max_num_batched_tokens,
            self.world.knobs.max_inflight_steps,
            self.world.knobs.rates,
        )

    # ---- taking the worker over ----

    def _serve_install(self, request: Install) -> Later:
        fence = _worker_fence(request.fence)
        try:
            self._install(fence, is_newer=self.fencing.check(fence))
        except StepError as error:
            self._count_refusal(error.reason, error.message)
            raise Refused(error.reason, error.message) from error
        self.world.marks.hit("takeover waited for a step", self._busy)
        later = Later()
        # Behind the step that runs, and behind those queued: of these the older ones are refused.
        self._queue.append((later, request))
        self._work()
        return later

    def _install(self, fence: Fence, *, is_newer: bool) -> None:
        """Refuse older fences from now on, and end the stream that has the worker, if any."""
        self._expect_newest(fence)
        if self._holder is not None:
            self.world.marks.hit("stream replaced at worker")
            self._holder.close("STALE_EPOCH" if is_newer else "SESSION_HELD")
            self._holder = None
        if is_newer:
            self.fencing.install(fence)
            self.note(f"installs {fence.session_id}")

    def _executed_for(self, fence: kv.Fence) -> Installed:
        life = fence.kvmem_boot_id
        retained = tuple(one.step for one in self.retained if one.kvmem_boot_id == life)
        last_step_id = self.fencing.last_step_id_of(life)
        self.note(f"hands over to {fence.session_id} after step {last_step_id}")
        return Installed(last_step_id, retained)

    # ---- the Execute stream ----

    def accept(self, service: str, end: End) -> None:
        if not self._ready:
            end.close("NOT_READY")
        elif service == "Execute":
            end.on_message = partial(self._on_step, end)
            end.on_end = lambda _: self._let_go(end)

    def _let_go(self, end: End) -> None:
        if self._holder is end:
            self._holder = None

    def _refuse(self, end: End, reason: str, message: str) -> None:
        self._count_refusal(reason, message)
        end.close(reason)
        self._let_go(end)

    def _count_refusal(self, reason: str, message: str) -> None:
        self.note(f"refuses: {reason}: {message}")
        if reason == "STALE_EPOCH":
            self.world.marks.hit("stale epoch refused at worker")
        elif reason == "STALE_BOOT_ID":
            self.world.marks.hit("stale boot id refused at worker")

    def _on_step(self, end: End, message: Execute) -> None:
        try:
            self._take_hold(end, _worker_fence(message.fence))
        except (StepError, Refused) as error:
            self._refuse(end, error.reason, error.message)
            return
        self._queue.append((end, message))
        most = self.world.knobs.max_inflight_steps
        waiting = sum(asker is end for asker, _ in self._queue)
        expect(waiting <= most, "steps in flight", f"{waiting} wait, at most {most} may")
        self._work()

    def _take_hold(self, end: End, fence: Fence) -> None:
        is_newer = self.fencing.check(fence)
        self._expect_newest(fence)
        if self._holder is end:
            self._holder = None
        elif self._holder is not None and not is_newer:
            raise Refused("SESSION_HELD", f"epoch {fence.epoch} already has a stream open")
        if is_newer:
            self._install(fence, is_newer=True)
        self._holder = end

    # ---- the model thread ----

    def _work(self) -> None:
        """Begin the next step, if there is one and none runs."""
        while self._queue and not self._busy:
            asker, message = self._queue.popleft()
            if isinstance(message, Install):
                assert isinstance(asker, Later)
                asker.answer(self._executed_for(message.fence))
            else:
                assert isinstance(asker, End)
                self._begin(asker, message)

    def _begin(self, end: End, message: Execute) -> None:
        fence, step = _worker_fence(message.fence), message.step
        try:
            if self.fencing.begin_step(fence, step.step_id):
                self.model.forget()
                self.model.last_step_id = 0
        except StepError as error:
            self._refuse(end, error.reason, error.message)
            return
        checkers.check_not_taken_over(self._kvmem.memory, message.fence)
        self._busy = True
        self.note(step_in_words(step))
        duration_us = self.world.draw.randint(*self.world.knobs.step_duration_us)
        self.after(duration_us, partial(self._finish, end, message))

    def _finish(self, end: End, message: Execute) -> None:
        step = message.step
        expect(
            len(step.input_token_ids) <= self.world.knobs.worker_max_num_batched_tokens,
            "worker limits",
            f"{len(step.input_token_ids)} tokens in step {step.step_id}",
        )
        checkers.check_not_taken_over(self._kvmem.memory, message.fence)
        num_copies = self.model.num_copies
        result = self.model.execute(step)
        self.world.marks.hit("copied on write", self.model.num_copies - num_copies)
        tables = (self.model.known[i].table for i in step.sequence_ids.tolist())
        checkers.check_blocks_are_held(self._kvmem.memory, message.fence, step, tables)
        checkers.check_published_blocks_stay(
            self._kvmem.memory, message.fence, step.step_id, self.model.written_blocks
        )
        self.fencing.end_step(step.step_id)
        self._retain(message, result)
        self.note(f"has executed step {step.step_id}: tokens {result.sampled_token_ids.tolist()}")
        self._busy = False
        end.send(result)
        self._work()

    def _retain(self, message: Execute, result: ops.StepResult) -> None:
        step = message.step
        kept = ops.RetainedStep(
            result,
            step.sequence_ids,
            step.num_input_tokens,
            step.num_computed_tokens,
            step.num_samples,
        )
        self.retained.append(_Retained(message.fence.kvmem_boot_id, kept))

    def _expect_newest(self, fence: Fence) -> None:
        """No step that is let in is of an epoch before another's, nor for another worker."""
        newest = self._newest_epochs.get(fence.kvmem_boot_id, 0)
        expect(
            fence.worker_boot_id == self.boot_id and fence.epoch >= newest,
            "fenced at the worker",
            f"{fence} was obeyed by {self.boot_id} after epoch {newest}",
        )
        self._newest_epochs[fence.kvmem_boot_id] = fence.epoch


def _worker_fence(fence: kv.Fence) -> Fence:
    return Fence(fence.session_id, fence.epoch, fence.kvmem_boot_id, fence.worker_boot_id)
