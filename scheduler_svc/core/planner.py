"""`plan(view, budget) -> StepPlan`: which sequences run next, and how many tokens each.

Pure: it reads the view and changes nothing. Prefill and decode share one token budget;
a prompt that is longer than what is left of it is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.chunking import first_shares, reserved_for_short
from scheduler_svc.core.decoding import DecodingStrategy
from scheduler_svc.core.ops import Admit, AdmitMember, SwapIn, SwapInMember
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.shared_prefix import PrefixesUnderWay


@dataclass(frozen=True)
class Budget:
    """Limits of one step."""

    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True)
class View:
    """What the planner may know.

    waiting: for blocks; some of them are swapped out. held_back: tenants that have all their quota
    allows; nobody of theirs is admitted.
    """

    running: SequenceOf[SequenceGroup]
    waiting: SequenceOf[SequenceGroup]
    num_free_blocks: int
    num_blocks: int
    block_size: int
    held_back: frozenset[str] = frozenset()


class Row(NamedTuple):
    """One sequence in the batch. num_samples 0: its prompt goes on in a later step."""

    sequence: Sequence
    # Position of the first input token.
    start: int
    num_input_tokens: int
    num_samples: int

    @property
    def num_slots(self) -> int:
        """Slots the sequence must have for this row, from its start."""
        return self.start + self.num_input_tokens

    def issue(self) -> None:
        """The row's step goes to the worker."""
        assert self.start == self.sequence.num_scheduled_tokens, self
        self.sequence.num_inflight_tokens += self.num_input_tokens
        self.sequence.num_inflight_draws += bool(self.num_samples)


@dataclass(frozen=True)
class Admission:
    """A group that gets blocks: its first ones, or those it had before it was swapped out."""

    group: SequenceGroup
    members: tuple[AdmitMember, ...]

    @property
    def op(self) -> Admit | SwapIn:
        if self.group.status is not GroupStatus.SWAPPED:
            return Admit(self.members)
        return SwapIn(tuple(SwapInMember(m.sequence_id, m.num_slots) for m in self.members))


@dataclass
class StepPlan:
    """Rows in order, and the groups that are admitted with them."""

    rows: list[Row] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_input_tokens for row in self.rows)

    def reserving(self) -> list[tuple[SequenceGroup, list[Row]]]:
        """Rows whose slots are yet to be made, by group (an Admit makes its own)."""
        admitted = {id(admission.group) for admission in self.admissions}
        by_group: dict[int, tuple[SequenceGroup, list[Row]]] = {}
        for row in self.rows:
            group = row.sequence.group
            # One that has ended meanwhile needs nothing any more.
            needs = not row.sequence.finished and row.num_slots > row.sequence.num_writable_slots
            if needs and id(group) not in admitted:
                by_group.setdefault(id(group), (group, []))[1].append(row)
        return list(by_group.values())

    def without(self, groups: set[int]) -> StepPlan:
        """The plan less the groups with these id()s."""
        return StepPlan(
            [row for row in self.rows if id(row.sequence.group) not in groups],
            [a for a in self.admissions if id(a.group) not in groups],
        )


class Planner:
    """Plans steps under a policy and a decoding strategy."""

    def __init__(
        self,
        policy: Policy,
        decoding: DecodingStrategy,
        watermark: float,
        *,
        use_prefix_cache: bool,
    ) -> None:
        """`watermark`: share of the pool that an admission must leave free, in [0, 1)."""
        self._use_prefix_cache = use_prefix_cache
        self._policy = policy
        self._decoding = decoding
        self._watermark = watermark

    def plan(self, view: View, budget: Budget) -> StepPlan:
        """Decodes first, then prompts under way, then admissions in the policy's order."""
        plan = StepPlan()
        tokens_left = budget.max_num_batched_tokens
        running = [
            sequence
            for group in self._policy.running_order(view.running)
            for sequence in group.live
        ]
        prefilling: list[Sequence] = []
        for sequence in running:
            num_unscheduled_tokens = sequence.num_unscheduled_tokens
            if num_unscheduled_tokens == 1:
                tokens_left -= self._add_row(plan, sequence, tokens_left)
            elif num_unscheduled_tokens > 1:
                prefilling.append(sequence)
        tokens_left -= self._add_chunks(plan, prefilling, tokens_left, bool(view.waiting))
        tokens_left -= self._admit(plan, view, budget, tokens_left)
        self._lengthen(plan, prefilling, tokens_left)
        return plan

    def _add_chunks(
        self, plan: StepPlan, prefilling: SequenceOf[Sequence], tokens_left: int, others_wait: bool
    ) -> int:
        """Rows for prompts under way; the tokens they took."""
        wanted = [sequence.num_unscheduled_tokens for sequence in prefilling]
        reserved = reserved_for_short(tokens_left, len(prefilling) + others_wait)
        shares = first_shares(wanted, tokens_left, reserved)
        return sum(
            self._add_row(plan, sequence, share)
            for sequence, share in zip(prefilling, shares, strict=True)
        )

    def _lengthen(self, plan: StepPlan, prefilling: SequenceOf[Sequence], tokens_left: int) -> None:
        """What nobody else could use goes to the prompts under way. Their blocks were all given
        when they were admitted."""
        chunks = {id(row.sequence): at for at, row in enumerate(plan.rows)}
        for sequence in prefilling:
            at = chunks.get(id(sequence))
            if at is None:
                tokens_left -= self._add_row(plan, sequence, tokens_left)
                continue
            row = plan.rows[at]
            more = min(sequence.num_unscheduled_tokens - row.num_input_tokens, tokens_left)
            if more > 0 and not _must_wait_for_commit(sequence, row.num_input_tokens + more):
                plan.rows[at] = self._row(sequence, row.num_input_tokens + more)
                tokens_left -= more

    def _add_row(self, plan: StepPlan, sequence: Sequence, tokens_left: int) -> int:
        """Append a row of at most `tokens_left` tokens; the number it took."""
        num_tokens = min(sequence.num_unscheduled_tokens, tokens_left)
        if num_tokens < 1 or sequence.waits_for_draw:
            return 0
        if not self._prefix_is_there(plan, sequence) or _must_wait_for_commit(sequence, num_tokens):
            return 0
        plan.rows.append(self._row(sequence, num_tokens))
        return num_tokens

    def _row(self, sequence: Sequence, num_tokens: int) -> Row:
        completes = num_tokens == sequence.num_unscheduled_tokens
        num_samples = self._decoding.num_samples(sequence) if completes else 0
        return Row(sequence, sequence.num_scheduled_tokens, num_tokens, num_samples)

    def after_admission(self, plan: StepPlan, group: SequenceGroup) -> StepPlan:
        """The plan, now that it is known how much of the group's tokens was cached: its row
        begins after that, and is no longer than it was."""
        rows = [
            self._row(row.sequence, min(row.num_input_tokens, row.sequence.num_unscheduled_tokens))
            if row.sequence.group is group
            else row
            for row in plan.rows
        ]
        return StepPlan(rows, plan.admissions)

    def _prefix_is_there(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Whether the shared prefix a sequence resumes on is computed by the end of this step.

        In the same step is soon enough: a layer writes all its K and V before it reads any.
        """
        source = sequence.prefix_source
        if source is None:
            return True
        in_step = sum(row.num_input_tokens for row in plan.rows if row.sequence is source)
        return source.num_scheduled_tokens + in_step >= sequence.prefix_source_tokens

    def _admit(self, plan: StepPlan, view: View, budget: Budget, num_tokens: int) -> int:
        """Admit whom there is room for, and add their rows; the tokens they took."""
        tokens_left = num_tokens
        seats = budget.max_num_seqs - sum(group.num_seats for group in view.running)
        if not view.waiting or tokens_left < 1 or seats < 1:
            return 0
        free = view.num_free_blocks - self._growth(plan, view.block_size)
        num_running = len(plan.rows)
        under_way = PrefixesUnderWay(
            view.running if self._use_prefix_cache else (), view.block_size
        )
        for group in self._policy.admission_order(view.waiting, view.running):
            is_swapped = group.status is GroupStatus.SWAPPED
            if group.request.tenant in view.held_back:
                continue
            if not is_swapped and under_way.will_serve(group):
                continue
            members = admit_members(group, view.block_size, use_prefix_cache=self._use_prefix_cache)
            needed = sum(
                -(-member.num_slots // view.block_size) - member.num_shared_blocks
                for member in members
            )
            # Alone, a group may take everything: nobody is there to be squeezed.
            alone = not view.running and not plan.admissions
            # One block a running sequence, so that an admission is not undone at once.
            spare = 0 if alone else max(int(self._watermark * view.num_blocks), num_running)
            if tokens_left < 1 or group.num_seats > seats or needed + spare > free:
                break
            plan.admissions.append(Admission(group, members))
            # Candidates after the first begin once the prefix they share is known to be there.
            for sequence in group.live if is_swapped else group.live[:1]:
                tokens_left -= self._add_row(plan, sequence, tokens_left)
            seats -= group.num_seats
            free -= needed
            num_running += group.num_seats
            if self._use_prefix_cache:
                under_way.add(group)
        return num_tokens - tokens_left

    @staticmethod
    def _growth(plan: StepPlan, block_size: int) -> int:
        """Blocks the planned rows are about to need, copies of shared blocks left aside."""
        return sum(
            max(
                0,
                -(-row.num_slots // block_size) - len(row.sequence.block_table),
            )
            for row in plan.rows
        )


def _must_wait_for_commit(sequence: Sequence, num_tokens: int) -> bool:
    """Whether it would ask for slots while a step computes the prefix that its siblings share: the
    memory service has yet to hear of that, and would copy the shared blocks, as if they were to be
    written."""
    if not sequence.num_inflight_tokens:
        return False
    if sequence.num_scheduled_tokens + num_tokens <= sequence.num_writable_slots:
        return False
    return any(
        sibling.prefix_source is sequence
        and sequence.num_computed_tokens < sibling.prefix_source_tokens
        for sibling in sequence.group.live
    )


def admit_members(
    group: SequenceGroup, block_size: int, *, use_prefix_cache: bool
) -> tuple[AdmitMember, ...]:
    """Slots for every live candidate; those after the first share the prompt's full blocks."""
    first, *others = group.live
    num_shared = len(group.request.prompt_token_ids) // block_size
    return (
        AdmitMember(first.sequence_id, first.num_tokens, use_prefix_cache=use_prefix_cache),
        *(
            AdmitMember(
                sibling.sequence_id,
                sibling.num_tokens,
                first.sequence_id,
                num_shared,
                use_prefix_cache,
            )
            for sibling in others
        ),
    )
