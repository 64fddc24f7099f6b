"""The life of steps over one connection, with one batch and a few steps in flight at most.

In steady decode nothing waits for anything: blocks were reserved ahead, so that step k+2 is issued
as soon as step k comes back and k+1 runs, its input tokens those that k+1 is drawing. The commit of
k rides beside it. A step that needs blocks waits for its batch:

    plan --> ApplyBatch (reserve, admit) --> (out of blocks: make room, ask again) --> ExecuteStep

Room is made only once no step is in flight, so that nobody loses blocks that one of them uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler_svc.core import adoption, events, ops
from scheduler_svc.core.decoding import DecodingStrategy, ForkInto
from scheduler_svc.core.lookahead import Lookahead
from scheduler_svc.core.outbox import Outbox, expect_ok, expect_room_or_none
from scheduler_svc.core.planner import Budget, Planner, Row, StepPlan, View
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.preemption import Preemption, PreemptionMode
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.step_outcome import StepOutcome, close_group, read_step
from scheduler_svc.core.stopping import FinishReason
from scheduler_svc.core.worker_mirror import WorkerMirror


@dataclass(frozen=True)
class Strategies:
    """What steps are planned by."""

    policy: Policy
    decoding: DecodingStrategy
    planner: Planner
    budget: Budget
    eos_token_ids: tuple[int, ...]
    preemption: PreemptionMode


class Stepper:
    """Plans steps, asks for their blocks, has them executed and commits their results.

    Lives from `Connected` to `Disconnected`: nothing of it is worth more than its connection.
    """

    def __init__(
        self,
        connected: events.Connected,
        groups: Mapping[str, SequenceGroup],
        strategies: Strategies,
        make_checker: adoption.MakeChecker,
        note: Callable[[SequenceGroup], None],
    ) -> None:
        """`groups`: all of them, at any time. `note` is called when there may be news of one."""
        self.outbox = Outbox()
        self.outbox.next_batch_seq = connected.next_batch_seq
        self.mirror = WorkerMirror()
        self.mirror.take_pending_copies(connected.pending_copies)
        self.mirror.take_swaps(connected.pending_swap_ins, connected.pending_swap_outs)
        self.now_s = 0.0
        self.block_size = connected.block_size
        self._groups = groups
        self._strategies = strategies
        self._preemption = Preemption(strategies.preemption, connected.rates, connected.block_size)
        self._make_checker = make_checker
        self._note = note
        self._commands: list[events.Command] = []
        self._num_blocks = connected.num_blocks
        self._levels = connected.levels
        self._freed_estimate = 0
        self._lookahead = Lookahead(self.outbox, connected.block_size)
        self._plan: StepPlan | None = None
        self._starved: list[SequenceGroup] = []
        # Those of them whose tenant has all that its quota allows.
        self._starved_by_quota: list[SequenceGroup] = []
        # Tenants of whom nobody is admitted until one of theirs gives blocks back.
        self._held_back: set[str] = set()
        # Issued steps that have not come back, oldest first, by step id.
        self._executing: deque[tuple[int, StepPlan]] = deque()
        self._max_inflight_steps = connected.max_inflight_steps
        # Somebody got no blocks: no step is begun until those in flight have come back.
        self._draining = False
        self._last_step_id = self._acknowledged_step = connected.last_step_id

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not (self._executing or self.outbox.in_flight or self.outbox)

    # ---- events ----

    def on_batch_applied(self, result: ops.BatchResult) -> None:
        self._levels, self._freed_estimate = result.levels, 0
        if self._held_back and self.outbox.sent(ops.Free, ops.Preempt, ops.SwapOut):
            self._held_back.clear()
        self.mirror.take_deltas(result)
        self.outbox.settle(result)

    def on_step_executed(self, result: ops.StepResult) -> None:
        step_id, plan = self._executing.popleft()
        assert result.step_id == step_id, (result.step_id, step_id)
        self._acknowledged_step = step_id
        self._take_step(plan, result)

    def take_retained(self, retained: ops.RetainedStep) -> None:
        """A step that a former session had executed: what was not committed of it is, now."""
        self._take_step(
            *adoption.match_retained(retained, self.mirror.sequences, self._strategies.decoding)
        )

    def advance(self) -> list[events.Command]:
        """What can be sent now. To be called after every event."""
        self._commands = []
        self._advance()
        return self._commands

    def _advance(self) -> None:
        if self._plan is not None:
            if not self.outbox.in_flight:
                self._go_on_with_plan(self._plan)
            return
        if not self._executing:
            self._draining = False
        if len(self._executing) < self._max_inflight_steps and not self._draining:
            self._begin_step()
        else:
            self._flush()

    def _flush(self) -> None:
        """Send what is queued, unless a batch is in flight."""
        if self.outbox and not self.outbox.in_flight:
            self._send_batch()

    def _groups_in(self, *statuses: GroupStatus) -> list[SequenceGroup]:
        return [group for group in self._groups.values() if group.status in statuses]

    # ---- results ----

    def _take_step(self, plan: StepPlan, result: ops.StepResult) -> None:
        outcome = read_step(plan, result, self._strategies.decoding, self.now_s)
        if outcome.commit is not None:
            standing = [_standing(sequence) for sequence in outcome.committed]
            self.outbox.add(outcome.commit, lambda _: self._on_committed(standing))
        for fork in outcome.forks:
            words = adoption.state_words(
                [fork.sequence.cumulative_logprob + logprob for logprob in fork.logprobs]
            )
            self.outbox.add(
                ops.Fork(fork.sequence.sequence_id, fork.token_ids, tuple(words.tolist())),
                lambda forked, fork=fork: self._on_forked(fork, forked),
            )
        self.free(outcome.ended)

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
            self.mirror.add(child)
            child.num_computed_tokens = parent.num_computed_tokens
            child.block_table = list(result.tables[0].block_ids)
            child.table_version = result.tables[0].table_version
        outcome = StepOutcome()
        for sequence, token_id, logprob in zip(
            group.sequences, fork.token_ids, fork.logprobs, strict=True
        ):
            sequence.num_writable_slots = sequence.num_computed_tokens
            outcome.extend(sequence, token_id, logprob, self.now_s)
        self._on_committed([_standing(sequence) for sequence in group.sequences])
        self.free(outcome.ended)

    # ---- what ends ----

    def free(self, ended: list[Sequence]) -> None:
        """Give back the blocks of sequences that ended; close groups that have no other."""
        for reason in FinishReason:
            of_reason = [s for s in ended if s.finish_reason is reason]
            if of_reason:
                self.outbox.add(
                    ops.Free(tuple(s.sequence_id for s in of_reason), reason),
                    lambda result, freed=of_reason: self._on_freed(freed, result),
                )
        self._freed_estimate += _num_freed_blocks(ended)
        for sequence in ended:
            self.mirror.drop(sequence)
            close_group(sequence.group)

    def _on_freed(self, freed: list[Sequence], result: ops.OpResult) -> None:
        expect_ok(result)
        for sequence in freed:
            sequence.end_committed = True
            self._note(sequence.group)

    def end_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """End every live candidate of a group for a reason of ours."""
        live = group.live
        for sequence in live:
            sequence.end(reason)
        self.free(live)

    # ---- steps ----

    def _begin_step(self) -> None:
        running = self._groups_in(GroupStatus.RUNNING)
        waiting = self._groups_in(GroupStatus.WAITING, GroupStatus.SWAPPED)
        plan = self._strategies.planner.plan(
            View(
                running,
                waiting,
                self._levels.num_free_blocks + self._freed_estimate,
                self._num_blocks,
                self.block_size,
                frozenset(self._held_back),
            ),
            self._strategies.budget,
        )
        if not plan.rows and self.mirror.has_swaps:
            self._execute(plan)
        elif not plan.rows:
            self._rest(running, waiting)
        elif not (plan.admissions or plan.reserving()):
            self._execute(plan)
        elif not self.outbox.in_flight:
            self._ask_for_blocks(plan)

    def _ask_for_blocks(self, plan: StepPlan) -> None:
        self._plan = plan
        self._queue_reserve(plan.reserving())
        for admission in plan.admissions:
            self.outbox.add(
                admission.op,
                lambda result, group=admission.group: self._on_admitted(group, result),
            )
        self._send_batch(prepares_step=True)

    def _rest(self, running: list[SequenceGroup], waiting: list[SequenceGroup]) -> None:
        """Nothing can run: flush what is queued, and free what only an acknowledgement holds."""
        if self.outbox.in_flight or self.outbox or self._executing:
            self._flush()
        elif waiting and not running and not self._levels.num_quarantined_blocks:
            # Nobody has anything that could come back and the first in line does not fit (beside
            # what is pinned, or in its tenant's quota): it never will.
            first = next(self._strategies.policy.admission_order(waiting, running))
            self.end_group(first, FinishReason.KV_CAPACITY)
            self._send_batch()
        elif self._levels.num_quarantined_blocks and self.outbox.news(self._acknowledged_step):
            self._send_batch()
        elif self._levels.num_quarantined_blocks and not self.mirror.forget_copies():
            # They wait for the step being prepared, of which nothing is left to run, or which a
            # session before this one could have issued. Nobody will: it counts as done.
            self._last_step_id += 1
            self._acknowledged_step = self._last_step_id
            self._send_batch()

    def _queue_reserve(self, by_group: list[tuple[SequenceGroup, list[Row]]]) -> None:
        if by_group:
            self.outbox.add(
                self.mirror.reserve(by_group), lambda result: self._on_reserved(by_group, result)
            )

    def _on_reserved(
        self, by_group: list[tuple[SequenceGroup, list[Row]]], result: ops.OpResult
    ) -> None:
        expect_room_or_none(result)
        failed, by_quota = set(result.failed_groups), set(result.quota_groups)
        for index, (group, rows) in enumerate(by_group):
            if index in failed:
                (self._starved_by_quota if index in by_quota else self._starved).append(group)
                continue
            for row in rows:
                sequence = row.sequence
                sequence.num_writable_slots = len(sequence.block_table) * self.block_size

    def _on_admitted(self, group: SequenceGroup, result: ops.OpResult) -> None:
        assert self._plan is not None
        if result.status in (ops.OpStatus.NO_FREE_BLOCKS, ops.OpStatus.TENANT_QUOTA):
            # The free count was an estimate; it waits on, where it stood.
            self._plan = self._plan.without({id(group)})
            if result.status is ops.OpStatus.TENANT_QUOTA:
                self._held_back.add(group.request.tenant)
            return
        assert result.status is ops.OpStatus.OK, result
        group.move_to(GroupStatus.RUNNING)
        if group.first_scheduled_at_s is None:
            group.first_scheduled_at_s = self.now_s
        self.mirror.take_tables(group, result.tables, self.block_size)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = group.live[0].num_computed_tokens
        self._plan = self._strategies.planner.after_admission(self._plan, group)

    def _go_on_with_plan(self, plan: StepPlan) -> None:
        """The step's blocks were asked for: execute it, or make room and ask again."""
        starved = [g for g in self._starved if g.status is GroupStatus.RUNNING]
        by_quota = [g for g in self._starved_by_quota if g.status is GroupStatus.RUNNING]
        self._starved, self._starved_by_quota = [], []
        if by_quota and self._executing:
            plan, by_quota = self._wait(plan, by_quota), []
        if starved and (self._executing or self._levels.num_quarantined_blocks):
            # Blocks are coming, or others have to wait until room can be made: preempt nobody.
            plan, starved = self._wait(plan, starved), []
        if not (starved or by_quota):
            self._plan = None
            self._execute(plan)
            return
        # When somebody ended meanwhile, whose blocks go back with the next batch, ask again before
        # anybody has to go. And children that are yet to be named cannot go with their parent.
        hungry = [*starved, *by_quota]
        if not self.outbox.holds(ops.Free, ops.Fork, ops.Preempt):
            victim = self._make_room(starved, by_quota)
            plan = plan.without({id(victim)})
            if victim.status is GroupStatus.SWAPPED:
                # Its blocks are free once the step has been executed that moves them.
                plan, hungry = self._wait(plan, hungry), []
        self._ask_again(plan, hungry)

    def _wait(self, plan: StepPlan, starved: list[SequenceGroup]) -> StepPlan:
        """The plan without those who got no blocks; they ask again once the steps are done."""
        self._draining = bool(self._executing)
        return plan.without({id(group) for group in starved})

    def _make_room(
        self, starved: list[SequenceGroup], by_quota: list[SequenceGroup]
    ) -> SequenceGroup:
        """Somebody gives way, and is returned: of the same tenant, where its quota is full."""
        running = self._groups_in(GroupStatus.RUNNING)
        if not starved:
            tenant = by_quota[0].request.tenant
            running = [group for group in running if group.request.tenant == tenant]
        victim = self._strategies.policy.victim(running)
        if running == [victim]:
            self.end_group(victim, FinishReason.KV_CAPACITY)
        else:
            self._preempt(victim)
        return victim

    def _ask_again(self, plan: StepPlan, starved: list[SequenceGroup]) -> None:
        """Reserve once more for the groups of the plan that got no blocks."""
        self._plan = plan
        hungry = {id(group) for group in starved}
        self._queue_reserve([pair for pair in plan.reserving() if id(pair[0]) in hungry])
        self._send_batch(prepares_step=True)

    def _preempt(self, group: SequenceGroup) -> None:
        """The whole group gives its blocks back, and waits for others (paper §4.5): by swapping, or
        by recomputation, where the tokens are all that stays."""
        group.num_preemptions += 1
        for sequence in group.live:
            self.mirror.drop(sequence)
        if self._preemption.swaps(group, self._levels.num_free_host_blocks):
            self.outbox.add(
                ops.SwapOut(_ids(group)), lambda result: self._on_swapped_out(group, result)
            )
            for sequence in group.live:
                sequence.leave_pool()
            group.move_to(GroupStatus.SWAPPED)
        else:
            self.outbox.add(ops.Preempt(_ids(group)))
            for sequence in group.live:
                sequence.forget_blocks()
            group.move_to(GroupStatus.WAITING)

    def _on_swapped_out(self, group: SequenceGroup, result: ops.OpResult) -> None:
        if result.status is ops.OpStatus.NO_FREE_HOST_BLOCKS:
            self.outbox.add(ops.Preempt(_ids(group)))
            for sequence in group.live:
                sequence.num_computed_tokens = 0
            group.move_to(GroupStatus.WAITING)
        else:
            expect_ok(result)

    def _execute(self, plan: StepPlan) -> None:
        step_id = self._last_step_id + 1
        step, rows = self.mirror.build_step(step_id, plan, self._strategies.eos_token_ids)
        if rows or step.swap_ins or step.swap_outs:
            self._last_step_id = step_id
            self._executing.append((step_id, StepPlan(rows, [])))
            self._commands.append(events.ExecuteStep(step, _links(rows)))
        elif not self._executing:
            # All of it was aborted meanwhile. Nobody will run this step: it counts as done, unless
            # others still need the copies it was to make.
            if not self.mirror.forget_copies():
                self._last_step_id = self._acknowledged_step = step_id
        else:
            self._flush()
            return
        self._advance()

    def _send_batch(self, *, prepares_step: bool = False) -> None:
        self._lookahead.top_up(
            self._groups_in(GroupStatus.RUNNING),
            self._plan.rows if self._plan is not None else (),
            self._levels.num_free_blocks,
        )
        batch = self.outbox.send(
            self._last_step_id + 1, self._acknowledged_step, prepares_step=prepares_step
        )
        links = _links(self._plan.rows) if prepares_step and self._plan is not None else ()
        self._commands.append(events.ApplyBatch(batch, links))


def _ids(group: SequenceGroup) -> tuple[int, ...]:
    return tuple(sequence.sequence_id for sequence in group.live)


def _links(rows: list[Row]) -> tuple[str, ...]:
    """Trace contexts of the requests that have rows."""
    traceparents = (row.sequence.group.request.traceparent for row in rows)
    return tuple(dict.fromkeys(filter(None, traceparents)))


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
