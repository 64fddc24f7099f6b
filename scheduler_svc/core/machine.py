"""The scheduler as a state machine: `handle(event, now_s) -> commands`. No I/O, no clock.

Here are the lives of requests: how they are entered, adopted, told to their callers and forgotten.
The life of steps is the `stepper`'s. Arrivals, aborts and confirmations ride in its next batch, at
once when none is in flight.

After `Disconnected` everything waits. `Connected` brings the memory service's records, and the
view is built anew from them, whether they were of this scheduler or of one that died; what that
memory service does not know, because it lost its state, is entered once more from the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core import adoption, events, ops
from scheduler_svc.core.decoding import DecodingStrategy, ParallelSampling
from scheduler_svc.core.delivery import Recipients
from scheduler_svc.core.outbox import expect_ok
from scheduler_svc.core.planner import Budget, Planner
from scheduler_svc.core.policy import FairTurns, Policy
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.sequence import (
    ArrivingCandidate,
    GroupStatus,
    Request,
    SequenceGroup,
)
from scheduler_svc.core.step_outcome import close_group
from scheduler_svc.core.stepper import Stepper, Strategies
from scheduler_svc.core.stopping import FinishReason, StopChecker, TextStream


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler. `watermark`: share of the pool an admission leaves free.

    use_prefix_cache: take cached blocks of the same prefix, and let what is computed be cached.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 1024
    watermark: float = 0.01
    use_prefix_cache: bool = True
    preemption: PreemptionMode = PreemptionMode.AUTO


class Machine:
    """The scheduler's core. Feed it events in order; carry out the commands in order."""

    def __init__(
        self,
        config: SchedulerConfig,
        eos_token_ids: tuple[int, ...],
        make_text: Callable[[], TextStream],
        policy: Policy | None = None,
        decoding: DecodingStrategy | None = None,
    ) -> None:
        """`make_text` opens the detokenization of one sequence."""
        self.config = config
        self.groups: dict[str, SequenceGroup] = {}
        self._make_text = make_text
        policy, decoding = policy or FairTurns(), decoding or ParallelSampling()
        self._strategies = Strategies(
            policy,
            decoding,
            Planner(policy, decoding, config.watermark, use_prefix_cache=config.use_prefix_cache),
            Budget(config.max_num_batched_tokens, config.max_num_seqs),
            eos_token_ids,
            config.preemption,
        )
        # None while there is no connection.
        self._stepper: Stepper | None = None
        self._now_s = 0.0
        self._commands: list[events.Command] = []
        self._emits: list[events.Command] = []
        self._recipients = Recipients()
        # Aborts and arrivals that wait for the batch in flight, or for the connection.
        self._deferred: list[events.AbortRequested | events.RequestArrived] = []
        # Requests whose Confirm is not acknowledged yet, with their arrival numbers.
        self._ending: dict[str, int] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Connected: self._on_connected,
            events.Disconnected: self._on_disconnected,
            events.RequestArrived: self._on_arrived,
            events.Attached: self._on_attached,
            events.Detached: lambda event: self._recipients.detach(event.request_id),
            events.AbortRequested: self._on_abort_requested,
            events.Delivered: self._on_delivered,
            events.BatchApplied: self._on_batch_applied,
            events.StepExecuted: self._on_step_executed,
        }

    # ---- events ----

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Take one event; what is to be done about it, in order. Emits come last: the worker
        gets its next step before anybody is told about the previous one."""
        self._now_s = now_s
        self._commands, self._emits = [], []
        if self._stepper is not None:
            self._stepper.now_s = now_s
        self._handlers[type(event)](event)
        if self._stepper is not None:
            if not (self._stepper.outbox.in_flight or self._stepper.outbox.holds(ops.Fork)):
                # A fork must be answered first: its children are not known by name until then.
                self._carry_out_deferred()
            self._commands.extend(self._stepper.advance())
        return self._commands + self._emits + self._recipients.collect()

    @property
    def idle(self) -> bool:
        """Nothing is running, waiting or under way."""
        return not self.groups and (self._stepper is None or self._stepper.idle)

    def request_of(self, request_id: str) -> Request | None:
        """The request a caller may attach to, also one that is yet to be entered."""
        waiting = self._waiting_arrival(request_id)
        if waiting is not None:
            return waiting.request
        if request_id in self.groups and not self._is_unwanted(request_id):
            return self.groups[request_id].request
        return None

    def is_live(self, request_id: str) -> bool:
        """Whether there is a request that a caller may attach to."""
        return self.request_of(request_id) is not None

    def has_ended(self, request_id: str) -> bool:
        """Whether all there will be of the request a caller may attach to is there."""
        group = self.groups.get(request_id)
        return (
            group is not None
            and group.request is self.request_of(request_id)
            and group.status is GroupStatus.FINISHED
        )

    # ---- connections ----

    def _on_disconnected(self, _: events.Disconnected) -> None:
        self._stepper = None

    def _on_connected(self, event: events.Connected) -> None:
        assert self._stepper is None
        former, self.groups = self.groups, {}
        stepper = self._stepper = Stepper(
            event, self.groups, self._strategies, self._make_checker, self._note
        )
        stepper.now_s = self._now_s
        ending, self._ending = self._ending, {}
        for record in event.adopted:
            request_id = record.request.request_id
            if ending.get(request_id) == record.arrival_number:
                self._bury(record, stepper)
            else:
                self._adopt(record, stepper, former.pop(request_id, None))
        for group in former.values():
            self._enter_again(group, stepper)
        for retained in event.retained:
            stepper.take_retained(retained)

    def _bury(self, record: ops.AdoptedRequest, stepper: Stepper) -> None:
        """Free and confirm what was to be, when the connection broke."""
        live = [s for s in record.sequences if s.finish_reason is None and not s.pruned]
        if live:
            sequence_ids = tuple(sequence.sequence_id for sequence in live)
            stepper.outbox.add(ops.Free(sequence_ids, FinishReason.ABORT))
        self._confirm(record.request.request_id, record.arrival_number)

    def _adopt(
        self, record: ops.AdoptedRequest, stepper: Stepper, former: SequenceGroup | None
    ) -> None:
        request_id = record.request.request_id
        group, unfreed = adoption.rebuild_group(
            record, self._make_checker, stepper.block_size, self._now_s
        )
        self.groups[request_id] = group
        for sequence in group.sequences:
            stepper.mirror.sequences[sequence.sequence_id] = sequence
        stepper.free(unfreed)
        if former is not None:
            group.take_times(former)
        if request_id not in self._recipients:
            if not self._is_unwanted(request_id):
                self._commands.append(events.Adopted(request_id))
        elif former is not None and former.status is GroupStatus.ARRIVING:
            self._accept(request_id)
        self._note(group)

    def _enter_again(self, group: SequenceGroup, stepper: Stepper) -> None:
        """The memory service knows nothing of the group: enter what was acknowledged before."""
        fresh = SequenceGroup(group.request, group.arrived_at_s)
        fresh.take_times(group)
        self.groups[group.request.request_id] = fresh
        is_new = group.status is GroupStatus.ARRIVING
        candidates = group.arriving if is_new else adoption.remembered(group)
        self._arrive(fresh, stepper, candidates)

    # ---- requests ----

    def _on_arrived(self, event: events.RequestArrived) -> None:
        request = event.request
        if self._stepper is None:
            self._reject(
                request.request_id,
                "NOT_READY",
                "the scheduler is (re)connecting to the memory service and the worker",
                retry_after_ms=500,
            )
        elif request.request_id in self.groups:
            # Its predecessor of the same name is on its way out: an abort not yet carried out.
            self._deferred.append(event)
        else:
            self._enter(event, self._stepper)

    def _on_attached(self, event: events.Attached) -> None:
        waiting = self._waiting_arrival(event.request_id)
        if waiting is not None:
            self._deferred.remove(waiting)
            self._deferred.append(events.RequestArrived(waiting.request, event.received))
            return
        group = self.groups[event.request_id]
        self._recipients.attach(event.request_id, event.received)
        if group.status is not GroupStatus.ARRIVING:
            self._accept(event.request_id)
            self._note(group)

    def _on_abort_requested(self, event: events.AbortRequested) -> None:
        self._recipients.detach(event.request_id)
        waiting = self._waiting_arrival(event.request_id)
        if waiting is not None:
            # It has not entered yet, and never will. Its predecessor's abort stands.
            self._deferred.remove(waiting)
        else:
            self._deferred.append(event)

    def _waiting_arrival(self, request_id: str) -> events.RequestArrived | None:
        """The arrival that waits for the abort of a predecessor of the same name: one at most."""
        for event in self._deferred:
            if isinstance(event, events.RequestArrived) and event.request.request_id == request_id:
                return event
        return None

    def _enter(self, event: events.RequestArrived, stepper: Stepper) -> None:
        request = event.request
        queued = sum(
            group.status in (GroupStatus.ARRIVING, GroupStatus.WAITING)
            for group in self.groups.values()
        )
        if queued >= self.config.max_waiting and not event.received:
            self._reject(
                request.request_id,
                "QUEUE_FULL",
                f"{queued} requests are waiting; at most {self.config.max_waiting} may",
                retry_after_ms=1000,
            )
            return
        group = SequenceGroup(request, arrived_at_s=self._now_s)
        self.groups[request.request_id] = group
        self._recipients.attach(request.request_id, event.received)
        candidates = adoption.received_candidates(request, event.received)
        self._arrive(group, stepper, candidates)

    def _arrive(
        self, group: SequenceGroup, stepper: Stepper, candidates: tuple[ArrivingCandidate, ...]
    ) -> None:
        """Enter the group. Whoever is attached by then hears that its record is safe."""
        group.arriving = candidates
        arrive, sequences = adoption.entering(group, candidates, self._make_checker)

        def on_result(result: ops.OpResult) -> None:
            if self._on_arrive_result(group, result):
                sequence_ids = result.candidate_sequence_ids or (result.sequence_id,)
                for sequence, sequence_id in zip(sequences, sequence_ids, strict=True):
                    sequence.sequence_id = sequence_id
                    stepper.mirror.add(sequence)
                close_group(group)
                self._note(group)

        stepper.outbox.add(arrive, on_result)

    def _on_arrive_result(self, group: SequenceGroup, result: ops.OpResult) -> bool:
        """Whether the group is entered."""
        request_id = group.request.request_id
        if result.status is not ops.OpStatus.OK:
            group.move_to(GroupStatus.FINISHED)
            del self.groups[request_id]
            reason = {
                ops.OpStatus.ALREADY_EXISTS: "REQUEST_EXISTS",
                ops.OpStatus.NO_FREE_SEQUENCES: "QUEUE_FULL",
                ops.OpStatus.TENANT_QUOTA: "TENANT_QUOTA",
            }.get(result.status, "INTERNAL")
            if not self._is_unwanted(request_id):
                self._reject(request_id, reason, result.message)
            return False
        group.arrival_number = result.arrival_number
        group.move_to(GroupStatus.WAITING)
        if request_id in self._recipients:
            self._accept(request_id)
        return True

    def _make_checker(self, request: Request) -> StopChecker:
        return StopChecker(request.params, self._strategies.eos_token_ids, self._make_text())

    def _on_delivered(self, event: events.Delivered) -> None:
        group = self.groups.get(event.request_id)
        if group is not None and group.status is GroupStatus.FINISHED:
            self._forget(group)

    def _on_batch_applied(self, event: events.BatchApplied) -> None:
        if self._stepper is not None:
            self._stepper.on_batch_applied(event.result)

    def _on_step_executed(self, event: events.StepExecuted) -> None:
        if self._stepper is not None:
            self._stepper.on_step_executed(event.result)

    # ---- telling callers ----

    def _note(self, group: SequenceGroup) -> None:
        """There may be news of the group, unless it was forgotten: its id may be another's."""
        if self.groups.get(group.request.request_id) is group:
            self._recipients.note(group)

    def _accept(self, request_id: str) -> None:
        self._emits.append(events.Accepted(request_id))

    def _is_unwanted(self, request_id: str) -> bool:
        """Its abort has come and waits for the batch in flight."""
        return events.AbortRequested(request_id) in self._deferred

    def _reject(
        self, request_id: str, reason: str, message: str, retry_after_ms: int | None = None
    ) -> None:
        self._recipients.detach(request_id)
        self._emits.append(events.Reject(request_id, reason, message, retry_after_ms))

    # ---- what goes ----

    def _forget(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        if self._stepper is not None:
            for sequence in group.sequences:
                self._stepper.mirror.forget(sequence)
        del self.groups[request_id]
        self._recipients.detach(request_id)
        self._confirm(request_id, group.arrival_number)

    def _confirm(self, request_id: str, arrival_number: int) -> None:
        self._ending[request_id] = arrival_number
        if self._stepper is not None:
            self._stepper.outbox.add(
                ops.Confirm(request_id),
                lambda result: self._on_confirmed(request_id, arrival_number, result),
            )

    def _on_confirmed(self, request_id: str, arrival_number: int, result: ops.OpResult) -> None:
        expect_ok(result)
        if self._ending.get(request_id) == arrival_number:
            del self._ending[request_id]

    def _abort(self, request_id: str, stepper: Stepper) -> None:
        group = self.groups.get(request_id)
        if group is None:
            return
        if group.status is GroupStatus.ARRIVING:
            # Its Arrive was not sent yet, or aborts would still be deferred.
            stepper.outbox.retract(
                lambda op: isinstance(op, ops.Arrive) and op.request is group.request
            )
            del self.groups[request_id]
            return
        stepper.end_group(group, FinishReason.ABORT)
        if group.status is not GroupStatus.FINISHED:
            group.move_to(GroupStatus.FINISHED)
        self._forget(group)

    def _carry_out_deferred(self) -> None:
        assert self._stepper is not None
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            if isinstance(event, events.AbortRequested):
                self._abort(event.request_id, self._stepper)
            else:
                self._on_arrived(event)
