"""The scheduler as a state machine: `handle(event, now_s) -> commands`. No I/O, no clock.

The life of a step, with one batch and one step in flight at most:

    StepExecuted(k) --> commit k, plan k+1, reserve --> ApplyBatch
    BatchApplied    --> (out of blocks: preempt, reserve again) --> ExecuteStep(k+1), Emit(k)

Arrivals, aborts and confirmations ride in the next batch, at once when none is in flight.

After `Disconnected` everything waits. `Connected` brings the memory service's records, and the
view is built anew from them, whether they were of this scheduler or of one that died; what that
memory service does not know, because it lost its state, is entered once more from the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler_svc.core import adoption, events, ops
from scheduler_svc.core.decoding import DecodingStrategy, ForkInto, ParallelSampling
from scheduler_svc.core.delivery import Recipients
from scheduler_svc.core.outbox import Outbox, expect_ok
from scheduler_svc.core.planner import Budget, Planner, Row, StepPlan, View
from scheduler_svc.core.policy import FirstComeFirstServed, Policy
from scheduler_svc.core.sequence import (
    ArrivingCandidate,
    GroupStatus,
    Request,
    Sequence,
    SequenceGroup,
)
from scheduler_svc.core.step_outcome import StepOutcome, close_group, read_step
from scheduler_svc.core.stopping import FinishReason, StopChecker, TextStream
from scheduler_svc.core.worker_mirror import WorkerMirror


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler. `watermark`: share of the pool an admission leaves free."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 1024
    watermark: float = 0.01


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
        self._eos = eos_token_ids
        self._make_text = make_text
        self._policy = policy or FirstComeFirstServed()
        self._decoding = decoding or ParallelSampling()
        self._planner = Planner(self._policy, self._decoding, config.watermark)
        self._budget = Budget(config.max_num_batched_tokens, config.max_num_seqs)
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
            events.Disconnected: lambda _: self._disconnect(),
            events.RequestArrived: self._on_arrived,
            events.Attached: self._on_attached,
            events.Detached: lambda event: self._recipients.detach(event.request_id),
            events.AbortRequested: self._on_abort_requested,
            events.Delivered: self._on_delivered,
            events.BatchApplied: self._on_batch_applied,
            events.StepExecuted: self._on_step_executed,
        }
        self._disconnect()

    def _disconnect(self) -> None:
        self._connected = False
        self._num_blocks = 0
        self._block_size = 1
        self._levels = ops.PoolLevels()
        self._freed_estimate = 0
        self._outbox = Outbox()
        self._mirror = WorkerMirror()
        self._plan: StepPlan | None = None
        self._starved: list[SequenceGroup] = []
        self._executing: StepPlan | None = None
        self._last_step_id = 0
        self._acknowledged_step = 0

    # ---- events ----

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Take one event; what is to be done about it, in order. Emits come last: the worker
        gets its next step before anybody is told about the previous one."""
        self._now_s = now_s
        self._commands, self._emits = [], []
        self._handlers[type(event)](event)
        if self._connected:
            self._advance()
        return self._commands + self._emits + self._recipients.collect()

    @property
    def idle(self) -> bool:
        """Nothing is running, waiting or under way."""
        return not (self.groups or self._executing or self._outbox.in_flight or self._outbox)

    def is_live(self, request_id: str) -> bool:
        """Whether a caller may attach to the request."""
        return request_id in self.groups and not self._is_unwanted(request_id)

    def _groups_in(self, status: GroupStatus) -> list[SequenceGroup]:
        return [group for group in self.groups.values() if group.status is status]

    # ---- adoption ----

    def _on_connected(self, event: events.Connected) -> None:
        assert not self._connected
        self._connected = True
        self._num_blocks, self._block_size = event.num_blocks, event.block_size
        self._levels = event.levels
        self._outbox.next_batch_seq = event.next_batch_seq
        self._last_step_id = self._acknowledged_step = event.last_step_id
        former, self.groups = self.groups, {}
        ending, self._ending = self._ending, {}
        for record in event.adopted:
            request_id = record.request.request_id
            if ending.get(request_id) == record.arrival_number:
                self._bury(record)
            else:
                self._adopt(record, former.pop(request_id, None))
        for group in former.values():
            self._enter_again(group)
        self._mirror.take_pending_copies(event.pending_copies)
        for retained in event.retained:
            self._take_step(
                *adoption.match_retained(retained, self._mirror.sequences, self._decoding)
            )

    def _bury(self, record: ops.AdoptedRequest) -> None:
        """Free and confirm what was to be, when the connection broke."""
        live = [s for s in record.sequences if s.finish_reason is None and not s.pruned]
        if live:
            sequence_ids = tuple(sequence.sequence_id for sequence in live)
            self._outbox.add(ops.Free(sequence_ids, FinishReason.ABORT))
        self._confirm(record.request.request_id, record.arrival_number)

    def _adopt(self, record: ops.AdoptedRequest, former: SequenceGroup | None) -> None:
        request_id = record.request.request_id
        group, unfreed = adoption.rebuild_group(
            record, self._make_checker, self._block_size, self._now_s
        )
        self.groups[request_id] = group
        for sequence in group.sequences:
            self._mirror.sequences[sequence.sequence_id] = sequence
        self._free(unfreed)
        if former is not None:
            group.take_times(former)
        if request_id not in self._recipients:
            self._commands.append(events.Adopted(request_id))
        elif former is not None and former.status is GroupStatus.ARRIVING:
            self._accept(request_id)
        self._note(group)

    def _enter_again(self, group: SequenceGroup) -> None:
        """The memory service knows nothing of the group: enter what was acknowledged before."""
        fresh = SequenceGroup(group.request, group.arrived_at_s)
        fresh.take_times(group)
        self.groups[group.request.request_id] = fresh
        # Only a group that was never acknowledged has a caller who waits to hear of it.
        is_new = group.status is GroupStatus.ARRIVING
        candidates = group.arriving if is_new else adoption.remembered(group)
        self._arrive(fresh, candidates, tell=is_new)

    # ---- requests ----

    def _on_arrived(self, event: events.RequestArrived) -> None:
        request = event.request
        if not self._connected:
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
            self._enter(event)

    def _on_attached(self, event: events.Attached) -> None:
        group = self.groups[event.request_id]
        self._recipients.attach(event.request_id, event.received)
        if group.status is not GroupStatus.ARRIVING:
            self._accept(event.request_id)
            self._note(group)

    def _on_abort_requested(self, event: events.AbortRequested) -> None:
        self._recipients.detach(event.request_id)
        waiting = [
            other
            for other in self._deferred
            if isinstance(other, events.RequestArrived)
            and other.request.request_id == event.request_id
        ]
        if waiting:
            # It has not entered yet, and never will. Its predecessor's abort stands.
            self._deferred.remove(waiting[-1])
        else:
            self._deferred.append(event)

    def _enter(self, event: events.RequestArrived) -> None:
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
        self._arrive(group, adoption.received_candidates(request, event.received), tell=True)

    def _arrive(
        self, group: SequenceGroup, candidates: tuple[ArrivingCandidate, ...], *, tell: bool
    ) -> None:
        """Enter the group. `tell`: its caller waits to hear that its record is safe."""
        group.arriving = candidates
        arrive, sequences = adoption.entering(group, candidates, self._make_checker)
        self._outbox.add(
            arrive, lambda result: self._on_arrive_result(group, sequences, result, tell=tell)
        )

    def _on_arrive_result(
        self, group: SequenceGroup, sequences: list[Sequence], result: ops.OpResult, *, tell: bool
    ) -> None:
        request_id = group.request.request_id
        if result.status is not ops.OpStatus.OK:
            group.move_to(GroupStatus.FINISHED)
            del self.groups[request_id]
            reason = {
                ops.OpStatus.ALREADY_EXISTS: "REQUEST_EXISTS",
                ops.OpStatus.NO_FREE_SEQUENCES: "QUEUE_FULL",
            }.get(result.status, "INTERNAL")
            if not self._is_unwanted(request_id):
                self._reject(request_id, reason, result.message)
            return
        group.arrival_number = result.arrival_number
        group.move_to(GroupStatus.WAITING)
        sequence_ids = result.candidate_sequence_ids or (result.sequence_id,)
        for sequence, sequence_id in zip(sequences, sequence_ids, strict=True):
            sequence.sequence_id = sequence_id
            self._add_sequence(sequence)
        close_group(group)
        if tell and not self._is_unwanted(request_id):
            self._accept(request_id)
        self._note(group)

    def _make_checker(self, request: Request) -> StopChecker:
        return StopChecker(request.params, self._eos, self._make_text())

    def _add_sequence(self, sequence: Sequence) -> None:
        sequence.group.sequences.append(sequence)
        self._mirror.sequences[sequence.sequence_id] = sequence

    def _on_delivered(self, event: events.Delivered) -> None:
        group = self.groups.get(event.request_id)
        if group is not None and group.status is GroupStatus.FINISHED:
            self._forget(group)

    # ---- results ----

    def _on_batch_applied(self, event: events.BatchApplied) -> None:
        if not self._connected:
            return
        result = event.result
        self._levels, self._freed_estimate = result.levels, 0
        self._mirror.take_deltas(result)
        self._outbox.settle(result)

    def _on_step_executed(self, event: events.StepExecuted) -> None:
        if self._executing is None:
            return
        result = event.result
        assert result.step_id == self._last_step_id, (result.step_id, self._last_step_id)
        plan, self._executing = self._executing, None
        self._acknowledged_step = result.step_id
        self._take_step(plan, result)

    def _take_step(self, plan: StepPlan, result: ops.StepResult) -> None:
        outcome = read_step(plan, result, self._decoding, self._now_s)
        if outcome.commit is not None:
            standing = [_standing(sequence) for sequence in outcome.committed]
            self._outbox.add(outcome.commit, lambda _: self._on_committed(standing))
        for fork in outcome.forks:
            words = adoption.state_words(
                [fork.sequence.cumulative_logprob + logprob for logprob in fork.logprobs]
            )
            self._outbox.add(
                ops.Fork(fork.sequence.sequence_id, fork.token_ids, tuple(words.tolist())),
                lambda forked, fork=fork: self._on_forked(fork, forked),
            )
        self._free(outcome.ended)

    def _on_committed(self, standing: list[tuple[Sequence, int, float]]) -> None:
        for sequence, num_tokens, cumulative_logprob in standing:
            sequence.num_committed_tokens = num_tokens
            sequence.committed_logprob = cumulative_logprob
            self._note(sequence.group)

    def _on_forked(self, fork: ForkInto, result: ops.OpResult) -> None:
        assert result.status is ops.OpStatus.OK, result
        parent = fork.sequence
        group = parent.group
        for candidate, sequence_id in enumerate(result.child_sequence_ids, start=1):
            child = Sequence(sequence_id, candidate, group, self._make_checker(group.request))
            self._add_sequence(child)
            child.num_computed_tokens = parent.num_computed_tokens
            child.block_table = list(result.tables[0].block_ids)
            child.table_version = result.tables[0].table_version
        outcome = StepOutcome()
        for sequence, token_id, logprob in zip(
            group.sequences, fork.token_ids, fork.logprobs, strict=True
        ):
            sequence.num_writable_slots = sequence.num_computed_tokens
            outcome.extend(sequence, token_id, logprob, self._now_s)
        self._on_committed([_standing(sequence) for sequence in group.sequences])
        self._free(outcome.ended)

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

    def _free(self, ended: list[Sequence]) -> None:
        """Give back the blocks of sequences that ended; close groups that have no other."""
        for reason in FinishReason:
            of_reason = [s for s in ended if s.finish_reason is reason]
            if of_reason:
                self._outbox.add(
                    ops.Free(tuple(s.sequence_id for s in of_reason), reason),
                    lambda result, freed=of_reason: self._on_freed(freed, result),
                )
        self._freed_estimate += _num_freed_blocks(ended)
        for sequence in ended:
            self._mirror.drop(sequence)
            close_group(sequence.group)

    def _on_freed(self, freed: list[Sequence], result: ops.OpResult) -> None:
        expect_ok(result)
        for sequence in freed:
            sequence.end_committed = True
            self._note(sequence.group)

    def _end_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End every live candidate of a group for a reason of ours."""
        live = group.live
        for sequence in live:
            sequence.end(reason)
        self._free(live)

    def _forget(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        for sequence in group.sequences:
            self._mirror.forget(sequence)
        del self.groups[request_id]
        self._recipients.detach(request_id)
        self._confirm(request_id, group.arrival_number)

    def _confirm(self, request_id: str, arrival_number: int) -> None:
        self._ending[request_id] = arrival_number
        self._outbox.add(
            ops.Confirm(request_id),
            lambda result: self._on_confirmed(request_id, arrival_number, result),
        )

    def _on_confirmed(self, request_id: str, arrival_number: int, result: ops.OpResult) -> None:
        expect_ok(result)
        if self._ending.get(request_id) == arrival_number:
            del self._ending[request_id]

    def _abort(self, request_id: str) -> None:
        group = self.groups.get(request_id)
        if group is None:
            return
        if group.status is GroupStatus.ARRIVING:
            # Its Arrive was not sent yet, or aborts would still be deferred.
            self._outbox.retract(
                lambda op: isinstance(op, ops.Arrive) and op.request is group.request
            )
            del self.groups[request_id]
            return
        self._end_group(group, FinishReason.ABORT)
        if group.status is not GroupStatus.FINISHED:
            group.move_to(GroupStatus.FINISHED)
        self._forget(group)

    # ---- going on ----

    def _advance(self) -> None:
        """Send what can be sent. Called after every event; one batch at a time."""
        if self._outbox.in_flight:
            return
        if not self._outbox.holds(ops.Fork):
            # A fork must be answered first: its children are not known by name until then.
            self._carry_out_deferred()
        if self._executing is not None:
            self._send_batch(when_empty=False)
        elif self._plan is not None:
            self._go_on_with_plan(self._plan)
        elif self._outbox.holds(ops.Fork):
            self._send_batch(when_empty=False)
        else:
            self._begin_step()

    def _carry_out_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            if isinstance(event, events.AbortRequested):
                self._abort(event.request_id)
            else:
                self._on_arrived(event)

    def _begin_step(self) -> None:
        running = self._groups_in(GroupStatus.RUNNING)
        waiting = self._groups_in(GroupStatus.WAITING)
        plan = self._planner.plan(
            View(
                running,
                waiting,
                self._levels.num_free_blocks + self._freed_estimate,
                self._num_blocks,
                self._block_size,
            ),
            self._budget,
        )
        if not plan.rows:
            self._rest(waiting)
            return
        self._plan = plan
        self._queue_reserve(plan.reserving())
        for admission in plan.admissions:
            self._outbox.add(
                ops.Admit(admission.members),
                lambda result, group=admission.group: self._on_admitted(group, result),
            )
        self._send_batch(prepares_step=True)

    def _rest(self, waiting: list[SequenceGroup]) -> None:
        """Nothing can run: flush what is queued, and free what only an acknowledgement holds."""
        if self._outbox:
            self._send_batch()
        elif waiting and self._levels.num_free_blocks == self._num_blocks:
            # The whole pool is free and the first in line still does not fit: it never will.
            self._end_group(self._policy.admission_order(waiting)[0], FinishReason.KV_CAPACITY)
            self._send_batch()
        elif self._levels.num_quarantined_blocks and self._outbox.news(self._acknowledged_step):
            self._send_batch()

    def _queue_reserve(self, by_group: list[tuple[SequenceGroup, list[Row]]]) -> None:
        if by_group:
            self._outbox.add(
                self._mirror.reserve(by_group), lambda result: self._on_reserved(by_group, result)
            )

    def _on_reserved(
        self, by_group: list[tuple[SequenceGroup, list[Row]]], result: ops.OpResult
    ) -> None:
        assert result.status in (ops.OpStatus.OK, ops.OpStatus.NO_FREE_BLOCKS), result
        failed = set(result.failed_groups)
        for index, (group, rows) in enumerate(by_group):
            if index in failed:
                self._starved.append(group)
                continue
            for row in rows:
                sequence = row.sequence
                sequence.num_writable_slots = len(sequence.block_table) * self._block_size

    def _on_admitted(self, group: SequenceGroup, result: ops.OpResult) -> None:
        if result.status is ops.OpStatus.NO_FREE_BLOCKS:
            # The free count was an estimate; it waits on, where it stood.
            assert self._plan is not None
            self._plan = self._plan.without({id(group)})
            return
        assert result.status is ops.OpStatus.OK, result
        group.move_to(GroupStatus.RUNNING)
        if group.first_scheduled_at_s is None:
            group.first_scheduled_at_s = self._now_s
        self._mirror.take_tables(group, result.tables, self._block_size)

    def _go_on_with_plan(self, plan: StepPlan) -> None:
        """The step's blocks were asked for: execute it, or make room and ask again."""
        starved = [g for g in self._starved if g.status is GroupStatus.RUNNING]
        self._starved = []
        if starved and self._levels.num_quarantined_blocks:
            # Blocks are coming, with the acknowledgement of this step: wait, preempt nobody.
            plan = plan.without({id(group) for group in starved})
            starved = []
        if not starved:
            self._plan = None
            self._execute(plan)
            return
        if self._outbox.holds(ops.Free):
            # An abort came meanwhile, and its blocks go back with the next batch: ask again
            # before anybody has to go.
            self._ask_again(plan, starved)
            return
        victim = self._policy.victim(self._groups_in(GroupStatus.RUNNING))
        if victim.live and self._groups_in(GroupStatus.RUNNING) == [victim]:
            self._end_group(victim, FinishReason.KV_CAPACITY)
        else:
            self._preempt(victim)
        self._ask_again(
            plan.without({id(victim)}), [group for group in starved if group is not victim]
        )

    def _ask_again(self, plan: StepPlan, starved: list[SequenceGroup]) -> None:
        """Reserve once more for the groups of the plan that got no blocks."""
        self._plan = plan
        hungry = {id(group) for group in starved}
        self._queue_reserve([pair for pair in plan.reserving() if id(pair[0]) in hungry])
        self._send_batch(prepares_step=True)

    def _preempt(self, group: SequenceGroup) -> None:
        """By recomputation: blocks go, tokens stay, the whole group waits again (paper §4.5)."""
        self._outbox.add(ops.Preempt(tuple(s.sequence_id for s in group.live)))
        for sequence in group.live:
            self._mirror.drop(sequence)
            sequence.forget_blocks()
        group.num_preemptions += 1
        group.move_to(GroupStatus.WAITING)

    def _execute(self, plan: StepPlan) -> None:
        step_id = self._last_step_id + 1
        self._last_step_id = step_id
        step, rows = self._mirror.build_step(step_id, plan, self._eos)
        if not rows:
            # All of it was aborted meanwhile. Nobody will run this step: it counts as done.
            self._acknowledged_step = step_id
            self._advance()
            return
        self._executing = StepPlan(rows, [])
        self._commands.append(events.ExecuteStep(step))
        self._advance()

    def _send_batch(self, *, when_empty: bool = True, prepares_step: bool = False) -> None:
        if not (self._outbox or when_empty):
            return
        batch = self._outbox.send(
            self._last_step_id + 1, self._acknowledged_step, prepares_step=prepares_step
        )
        links: tuple[str, ...] = ()
        if prepares_step and self._plan is not None:
            traceparents = (row.sequence.group.request.traceparent for row in self._plan.rows)
            links = tuple(dict.fromkeys(filter(None, traceparents)))
        self._commands.append(events.ApplyBatch(batch, links))


def _standing(sequence: Sequence) -> tuple[Sequence, int, float]:
    """How far a sequence will be once the op that is about to be sent is acknowledged."""
    return sequence, len(sequence.output_token_ids), sequence.cumulative_logprob


def _num_freed_blocks(ended: list[Sequence]) -> int:
    """Blocks of sequences that ended which no live sibling shares, about."""
    freed: set[int] = set()
    for sequence in ended:
        freed.update(sequence.block_table)
    for group in {id(s.group): s.group for s in ended}.values():
        for sibling in group.live:
            freed.difference_update(sibling.block_table)
    return len(freed)
