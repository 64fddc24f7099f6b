"""The scheduler's machine against the real memory core and the simulator's worker, which checks
every slot it touches. Its next token is a hash of the prefix, so every stream must equal its solo
run. Here a test says itself when a batch or a step completes."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.kvmem_adapter import apply_batch, levels_of
from kvmem_svc.core import batch as kv
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.memory import KvMemory
from scheduler_svc.core import events, ops
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request
from simulator.worker import EOS, Letters, TagWorker, solo_run

__all__ = ["EOS", "Caller", "World", "solo_run"]


@dataclass
class Caller:
    """What one caller has received."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, object] = field(default_factory=dict)
    accepted: bool = False
    done: bool = False
    aborted: bool = False
    rejected: str = ""


class World:
    """One machine, one memory core, one worker; batches and steps complete when told."""

    def __init__(
        self, *, num_blocks: int, block_size: int = 4, config: SchedulerConfig | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.memory = KvMemory("kvmem-boot", max_sequences=512)
        self.gatekeeper = Gatekeeper(self.memory)
        session = self.gatekeeper.open_session("test", 0)
        bare = kv.Fence(session.session_id, session.epoch, "kvmem-boot")
        geometry = kv.PoolGeometry(num_blocks, block_size, max_model_len=4096)
        self.gatekeeper.attach_pool(bare, "worker-boot", geometry, 0)
        self.fence = kv.Fence(session.session_id, session.epoch, "kvmem-boot", "worker-boot")
        self.worker = TagWorker(block_size)
        self.machine = Machine(config or SchedulerConfig(max_waiting=100), (EOS,), Letters)
        self.callers: dict[str, Caller] = {}
        self.batch: ops.Batch | None = None
        self.step: ops.Step | None = None
        self.num_batches = 0
        self.preemptions = 0
        self.now_s = 0.0
        self._handle(
            events.Connected(1, 0, num_blocks, block_size, levels_of(self.memory.levels()))
        )

    def arrive(self, request_id: str, prompt: list[int], **params: object) -> Caller:
        request = Request(request_id, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]
        caller = self.callers[request_id] = Caller(request)
        self._handle(events.RequestArrived(request))
        return caller

    def abort(self, request_id: str) -> None:
        self.callers[request_id].aborted = True
        self._handle(events.AbortRequested(request_id))

    def deliver(self, request_id: str) -> None:
        self._handle(events.Delivered(request_id))

    def finish_batch(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self.num_batches += 1
        self.preemptions += sum(isinstance(op, ops.Preempt) for op in batch.ops)
        result = apply_batch(self.gatekeeper, batch, self.fence, 0)
        assert self.memory.manager is not None
        check_integrity(self.memory.manager)
        self._handle(events.BatchApplied(result))

    def finish_step(self) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        self._handle(events.StepExecuted(self.worker.execute(step)))

    def run(self, limit: int = 20_000) -> None:
        """Let everything finish, every caller taking what it gets."""
        for _ in range(limit):
            if self.batch is not None:
                self.finish_batch()
            elif self.step is not None:
                self.finish_step()
            else:
                return
        raise AssertionError(f"not at rest after {limit} events")

    def assert_empty(self) -> None:
        stats = self.memory.stats()
        assert self.machine.idle
        assert stats.num_requests == 0
        assert stats.num_sequences == 0
        assert stats.levels.num_free_blocks == self.num_blocks
        # The worker hears with the next step of what it may forget.
        self.arrive("last", [1], max_tokens=1)
        self.run()
        assert len(self.worker.known) == 1
        del self.callers["last"]

    def assert_right(self, caller: Caller) -> None:
        """Every candidate is what it would be alone, token for token."""
        assert caller.done, caller
        for candidate in range(caller.request.params.n):
            assert tuple(caller.tokens[candidate]) == solo_run(caller.request, candidate)

    def _handle(self, event: events.Event) -> None:
        self.now_s += 1.0
        delivered = []
        for command in self.machine.handle(event, self.now_s):
            match command:
                case events.ApplyBatch(batch):
                    assert self.batch is None, "two batches in flight"
                    self.batch = batch
                case events.ExecuteStep(step):
                    assert self.step is None, "two steps in flight"
                    self.step = step
                case events.Accepted(request_id):
                    self.callers[request_id].accepted = True
                case events.Emit(request_id, deltas, times):
                    self._receive(self.callers[request_id], deltas, last=times is not None)
                    if times is not None:
                        delivered.append(request_id)
                case events.Reject(request_id, reason):
                    self.callers[request_id].rejected = reason
        for request_id in delivered:
            self.deliver(request_id)

    def _receive(
        self, caller: Caller, deltas: tuple[events.CandidateDelta, ...], *, last: bool
    ) -> None:
        assert caller.accepted
        assert not caller.done
        assert not caller.aborted, "output after an abort"
        for delta in deltas:
            assert delta.index not in caller.finish, "output after the finish reason"
            caller.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                caller.finish[delta.index] = delta.finish_reason
        caller.done = last
        if last:
            assert len(caller.finish) == caller.request.params.n
