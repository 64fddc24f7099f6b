"""The scheduler's machine against the real memory core and the simulator's worker, which checks
every slot it touches. Its next token is a hash of the prefix, so every stream must equal its solo
run. Here a test says itself when a batch or a step completes, and who dies in between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from benchmarks.kvmem_adapter import (
    adopted_of,
    apply_batch,
    levels_of,
    pending_copies_of,
    pending_swaps_of,
)
from kvmem_svc.core import batch as kv
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.leases import LeaseTimes
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Configure
from kvmem_svc.core.tenants import Quota
from scheduler_svc.core import events, ops
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.preemption import TierRates
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason
from simulator.worker import EOS, Letters, TagWorker, solo_run

__all__ = ["EOS", "Caller", "World", "solo_run"]


@dataclass
class Caller:
    """What one caller has received."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    accepted: bool = False
    done: bool = False
    aborted: bool = False
    rejected: str = ""

    def received(self) -> dict[int, events.Received]:
        """What it says it has when it comes back."""
        return {
            index: events.Received(
                tuple(self.tokens.get(index, ())), self.finish.get(index), self.logprobs[index]
            )
            for index in self.logprobs
        }


class World:
    """One machine, one memory core, one worker; batches and steps complete when told."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        config: SchedulerConfig | None = None,
        max_inflight_steps: int = 2,
        quota: Quota | None = None,
        num_host_blocks: int = 0,
        rates: TierRates | None = None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.config = config or SchedulerConfig(max_waiting=100)
        self.callers: dict[str, Caller] = {}
        self.detached: set[str] = set()
        self.adopted: list[str] = []
        self.batch: ops.Batch | None = None
        self.max_inflight_steps = max_inflight_steps
        self.quota = quota or Quota()
        self.num_host_blocks = num_host_blocks
        self.rates = rates or TierRates()
        # At the worker, oldest first, and the results of those executed that nobody has heard of.
        self.steps: deque[ops.Step] = deque()
        self.results: deque[ops.StepResult] = deque()
        self.retained: deque[ops.RetainedStep] = deque(maxlen=max_inflight_steps)
        self.num_batches = self.num_steps = 0
        self.preemptions = self.swap_outs = 0
        self.now_s = 0.0
        self.num_lives = {"kvmem": 0, "worker": 0}
        self.new_machine()
        self.new_worker()
        self.new_kvmem()
        self.connect()

    # ---- lives and deaths ----

    def new_machine(self) -> None:
        """Another scheduler, which knows nothing."""
        self.machine = Machine(self.config, (EOS,), Letters)

    def new_worker(self) -> None:
        """Another worker, whose KV is empty."""
        self.num_lives["worker"] += 1
        self.worker = TagWorker(self.block_size)
        self.retained.clear()

    def new_kvmem(self) -> None:
        """A memory service that has lost everything."""
        self.num_lives["kvmem"] += 1
        self.memory = KvMemory(f"kvmem-{self.num_lives['kvmem']}", max_sequences=512)
        times = LeaseTimes(resume_grace_ms=0)
        self.gatekeeper = Gatekeeper(self.memory, times)
        self.gatekeeper.configure(Configure(quota=self.quota))

    @property
    def worker_boot_id(self) -> str:
        return f"worker-{self.num_lives['worker']}"

    def disconnect(self) -> None:
        """The scheduler loses a peer; what was under way to it is lost with it."""
        self._handle(events.Disconnected())
        self._lose_what_was_sent()

    def kill_scheduler(self) -> None:
        """Another one takes over, and every caller goes on there."""
        self._lose_what_was_sent()
        self.new_machine()
        self.connect()

    def _lose_what_was_sent(self) -> None:
        self.batch = None
        self.steps.clear()
        self.results.clear()

    def connect(self) -> None:
        """Take over: session, worker, pool, records."""
        if (session := self.memory.ledger.session) is not None:
            self.gatekeeper.abandon_session(session)
        session = self.gatekeeper.open_session("test", 0)
        boot_id = self.memory.ledger.kvmem_boot_id
        last_step_id = self.memory.last_step_id
        next_batch_seq = self.memory.ledger.next_batch_seq
        self.fence = kv.Fence(session.session_id, session.epoch, boot_id, self.worker_boot_id)
        executed = self.worker.last_step_id if self.retained_is_ours else 0
        self.worker.forget()
        # The first step of another life of the memory service may have any id.
        self.worker.last_step_id = executed
        geometry = kv.PoolGeometry(
            self.num_blocks,
            self.block_size,
            max_model_len=4096,
            num_host_blocks=self.num_host_blocks,
        )
        confirmed = self.gatekeeper.attach_pool(
            self.fence, self.worker_boot_id, geometry, 0, executed
        )
        requests = {name: caller.request for name, caller in self.callers.items()}
        records = self.gatekeeper.adopt(self.fence, 0)
        self._handle(
            events.Connected(
                next_batch_seq,
                max(last_step_id - 1, executed, 0),
                self.num_blocks,
                self.block_size,
                levels_of(self.memory.levels()),
                tuple(adopted_of(record, requests[record.request_id]) for record in records),
                pending_copies_of(confirmed),
                tuple(self.retained) if self.retained_is_ours else (),
                self.max_inflight_steps,
                *pending_swaps_of(confirmed),
                self.rates,
            )
        )

    @property
    def retained_is_ours(self) -> bool:
        """Whether the worker's last step was executed for this life of the memory service."""
        return bool(self.retained) and self._retained_for == self.num_lives["kvmem"]

    # ---- callers ----

    def arrive(
        self,
        request_id: str,
        prompt: list[int],
        *,
        tenant: str = "default",
        cache_salt: str = "",
        priority: int = 0,
        **params: object,
    ) -> Caller:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        request = Request(
            request_id,
            tuple(prompt),
            sampling,
            tenant,
            cache_salt=cache_salt,
            priority=priority,
        )
        caller = self.callers[request_id] = Caller(request)
        self._handle(events.RequestArrived(request))
        return caller

    def come_back(self, request_id: str) -> None:
        """A caller attaches again, or enters its request again where nobody knows it."""
        caller = self.callers[request_id]
        self.detached.discard(request_id)
        caller.accepted = False
        if self.machine.is_live(request_id):
            self._handle(events.Attached(request_id, caller.received()))
        else:
            self._handle(events.RequestArrived(caller.request, caller.received()))

    def all_come_back(self) -> None:
        """After a scheduler's death."""
        for request_id, caller in self.callers.items():
            if not (caller.done or caller.aborted or caller.rejected):
                self.come_back(request_id)

    def give_up_on_callers(self) -> None:
        """Results of callers who had everything before their scheduler died, or whose abort died
        with it: nobody comes for them."""
        for request_id in [*self.machine.groups]:
            caller = self.callers.get(request_id)
            if caller is None or caller.done or caller.aborted:
                self._handle(events.AbortRequested(request_id))

    def detach(self, request_id: str) -> None:
        self.detached.add(request_id)
        self._handle(events.Detached(request_id))

    def abort(self, request_id: str) -> None:
        self.callers[request_id].aborted = True
        self._handle(events.AbortRequested(request_id))

    def deliver(self, request_id: str) -> None:
        self._handle(events.Delivered(request_id))

    # ---- what completes ----

    def apply_batch(self) -> ops.BatchResult:
        """The memory service applies the batch in flight; nobody has heard of it yet."""
        assert self.batch is not None
        self.num_batches += 1
        self.preemptions += sum(isinstance(op, ops.Preempt) for op in self.batch.ops)
        self.swap_outs += sum(isinstance(op, ops.SwapOut) for op in self.batch.ops)
        result = apply_batch(self.gatekeeper, self.batch, self.fence, 0)
        assert self.memory.manager is not None
        check_integrity(self.memory.manager)
        return result

    def finish_batch(self) -> None:
        result = self.apply_batch()
        self.batch = None
        self._handle(events.BatchApplied(result))

    @property
    def step(self) -> ops.Step | None:
        """The oldest one at the worker that is not executed yet."""
        return self.steps[0] if self.steps else None

    def execute_step(self) -> None:
        """The worker executes the next step; nobody has heard of it yet."""
        step = self.steps.popleft()
        self.num_steps += 1
        result = self.worker.execute(step)
        if self.retained and not self.retained_is_ours:
            self.retained.clear()
        self._retained_for = self.num_lives["kvmem"]
        self.retained.append(
            ops.RetainedStep(
                result,
                step.sequence_ids,
                step.num_input_tokens,
                step.num_computed_tokens,
                step.num_samples,
            )
        )
        self.results.append(result)

    def finish_step(self) -> None:
        if not self.results:
            self.execute_step()
        self._handle(events.StepExecuted(self.results.popleft()))

    def run(self, limit: int = 20_000) -> None:
        """Let everything finish, every caller taking what it gets."""
        for _ in range(limit):
            if self.batch is not None:
                self.finish_batch()
            elif self.steps or self.results:
                self.finish_step()
            else:
                return
        raise AssertionError(f"not at rest after {limit} events")

    def run_and_count(self) -> int:
        """Like `run`; the tokens that the worker computed meanwhile."""
        total = 0
        while self.batch is not None or self.step is not None:
            if self.batch is not None:
                self.finish_batch()
            elif self.step is not None:
                total += int(self.step.num_input_tokens.sum())
                self.finish_step()
        return total

    def assert_empty(self) -> None:
        stats = self.memory.stats()
        assert self.machine.idle
        assert stats.num_requests == 0
        assert stats.num_sequences == 0
        assert self.num_unused_blocks == self.num_blocks
        assert stats.levels.num_free_host_blocks == self.num_host_blocks
        # The worker hears with the next step of what it may forget.
        self.arrive("last", [1], max_tokens=1)
        self.run()
        assert len(self.worker.known) == 1
        del self.callers["last"]

    @property
    def num_unused_blocks(self) -> int:
        """Free, or kept for their content alone."""
        levels = self.memory.levels()
        return levels.num_free_blocks + levels.num_cached_blocks

    def assert_right(self, caller: Caller) -> None:
        """Every candidate is what it would be alone, token for token."""
        assert caller.done, caller
        for candidate in range(caller.request.params.n):
            assert tuple(caller.tokens[candidate]) == solo_run(caller.request, candidate)

    def assert_all_right(self) -> None:
        """Every caller got all of what it asked for."""
        for caller in self.callers.values():
            self.assert_right(caller)

    def _handle(self, event: events.Event) -> None:
        self.now_s += 1.0
        delivered = []
        for command in self.machine.handle(event, self.now_s):
            match command:
                case events.ApplyBatch(batch):
                    assert self.batch is None, "two batches in flight"
                    self.batch = batch
                case events.ExecuteStep(step):
                    self.steps.append(step)
                    num_inflight = len(self.steps) + len(self.results)
                    assert num_inflight <= self.max_inflight_steps, "too many steps in flight"
                case events.Accepted(request_id):
                    self.callers[request_id].accepted = True
                case events.Adopted(request_id):
                    self.adopted.append(request_id)
                case events.Emit(request_id, deltas, times):
                    assert request_id not in self.detached
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
            assert delta.candidate not in caller.finish, "output after the finish reason"
            tokens = caller.tokens.setdefault(delta.candidate, [])
            assert delta.token_offset == len(tokens), "a token is missing, or comes twice"
            tokens.extend(delta.token_ids)
            caller.text[delta.candidate] = caller.text.get(delta.candidate, "") + delta.text
            caller.logprobs[delta.candidate] = delta.cumulative_logprob
            if delta.finish_reason is not None:
                caller.finish[delta.candidate] = delta.finish_reason
        caller.done = last
        if last:
            assert len(caller.finish) == caller.request.params.n
