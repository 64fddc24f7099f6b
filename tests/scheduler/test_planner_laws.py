"""What every plan keeps to, whatever the view: the laws of the planner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.chunking import first_shares, hand_out, reserved_for_short
from scheduler_svc.core.decoding import ParallelSampling
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.planner import Budget, Planner, StepPlan, View
from scheduler_svc.core.policy import FairTurns
from scheduler_svc.core.sequence import GroupStatus, Request, Sequence, SequenceGroup
from scheduler_svc.core.stopping import StopChecker
from simulator.worker import Letters
from tests.scheduler.test_machine import prompt
from tests.scheduler.world import World

BLOCK_SIZE = 4


@st.composite
def groups(draw: st.DrawFn, arrival_number: int, status: GroupStatus) -> SequenceGroup:
    num_prompt = draw(st.integers(1, 60))
    n = draw(st.integers(1, 3))
    params = SamplingParams(n=n, max_tokens=20)
    tokens = tuple(1 + (arrival_number * 7 + i) % 40 for i in range(num_prompt))
    group = SequenceGroup(Request(f"r{arrival_number}", tokens, params), 0.0, status)
    group.arrival_number = arrival_number
    forked = status is GroupStatus.RUNNING and draw(st.booleans())
    for candidate in range(n if forked else 1):
        checker = StopChecker(params, (), Letters())
        sequence = Sequence(100 * arrival_number + candidate, candidate, group, checker)
        if forked:
            sequence.output_token_ids = [1] * draw(st.integers(1, 5))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        elif status is GroupStatus.RUNNING:
            sequence.num_computed_tokens = draw(st.integers(0, num_prompt - 1))
        num_blocks = -(-sequence.num_tokens // BLOCK_SIZE)
        if status is GroupStatus.RUNNING:
            sequence.block_table = list(range(num_blocks))
            sequence.num_writable_slots = num_blocks * BLOCK_SIZE
        group.sequences.append(sequence)
    return group


@st.composite
def views(draw: st.DrawFn) -> tuple[View, Budget]:
    num_running, num_waiting = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    running = [draw(groups(i + 1, GroupStatus.RUNNING)) for i in range(num_running)]
    waiting = [draw(groups(num_running + i + 1, GroupStatus.WAITING)) for i in range(num_waiting)]
    num_blocks = draw(st.integers(20, 200))
    num_seats = sum(group.num_seats for group in running)
    max_num_seqs = draw(st.integers(max(num_seats, 1), 30))
    view = View(running, waiting, draw(st.integers(0, num_blocks)), num_blocks, BLOCK_SIZE)
    return view, Budget(draw(st.integers(max_num_seqs, 80)), max_num_seqs)


def plan_of(view: View, budget: Budget) -> StepPlan:
    planner = Planner(FairTurns(), ParallelSampling(), watermark=0.01, use_prefix_cache=True)
    return planner.plan(view, budget)


@given(views())
def test_limits_are_kept(drawn: tuple[View, Budget]) -> None:
    view, budget = drawn
    plan = plan_of(view, budget)
    assert plan.num_tokens <= budget.max_num_batched_tokens
    admitted = [admission.group for admission in plan.admissions]
    seats = sum(group.num_seats for group in [*view.running, *admitted])
    assert seats <= budget.max_num_seqs or not admitted
    sequences = [id(row.sequence) for row in plan.rows]
    assert len(set(sequences)) == len(sequences)
    for row in plan.rows:
        assert 1 <= row.num_input_tokens <= row.sequence.num_unscheduled_tokens
        # A token is drawn if and only if nothing is left to compute before it.
        assert bool(row.num_samples) == (
            row.num_input_tokens == row.sequence.num_unscheduled_tokens
        )


@given(views())
def test_whoever_decodes_goes_on(drawn: tuple[View, Budget]) -> None:
    """No prompt, however long, takes a running sequence's turn."""
    view, budget = drawn
    rows = {id(row.sequence) for row in plan_of(view, budget).rows}
    for group in view.running:
        for sequence in group.live:
            if sequence.num_unscheduled_tokens == 1:
                assert id(sequence) in rows


@given(views())
def test_no_token_of_the_budget_is_left_while_a_prompt_wants_it(
    drawn: tuple[View, Budget],
) -> None:
    view, budget = drawn
    plan = plan_of(view, budget)
    if plan.num_tokens < budget.max_num_batched_tokens:
        running = [sequence for group in view.running for sequence in group.live]
        tokens = {id(row.sequence): row.num_input_tokens for row in plan.rows}
        for sequence in running:
            assert tokens.get(id(sequence)) == sequence.num_unscheduled_tokens


@given(views())
def test_a_group_is_admitted_as_one_and_in_its_turn(drawn: tuple[View, Budget]) -> None:
    view, budget = drawn
    plan = plan_of(view, budget)
    admitted = [admission.group for admission in plan.admissions]
    for admission in plan.admissions:
        ids = [member.sequence_id for member in admission.members]
        assert ids == [sequence.sequence_id for sequence in admission.group.live]
    in_order = sorted(view.waiting, key=lambda group: group.arrival_number)
    # All these prompts begin differently: nobody is overtaken.
    assert admitted == in_order[: len(admitted)]


wants = st.lists(st.integers(1, 600), min_size=1, max_size=8)


@given(wants, st.integers(0, 600))
def test_shares_of_a_step(wanted: list[int], num_tokens: int) -> None:
    reserved = reserved_for_short(num_tokens, len(wanted) + 1)
    shares = first_shares(wanted, num_tokens, reserved)
    assert sum(shares) <= num_tokens
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    # The first comer has all but what is reserved; whoever misses least then, has it if that is
    # enough to complete it.
    assert shares[0] >= min(wanted[0], num_tokens - reserved)
    at_first = hand_out(wanted, [0] * len(wanted), num_tokens - reserved)
    missing = [want - share for want, share in zip(wanted, at_first, strict=True)]
    if min(missing) <= reserved:
        shortest = missing.index(min(missing))
        assert shares[shortest] == wanted[shortest]
    after = hand_out(wanted, shares, num_tokens - sum(shares))
    assert sum(after) == min(num_tokens, sum(wanted))


def test_b42_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Eight tokens behind a thousand, of which a step takes sixteen: it has its first token a few
    steps after it came, and the long one takes no more steps than the tokens of both need."""
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8)
    world = World(num_blocks=400, config=config)
    long = world.arrive("long", prompt(1000), max_tokens=2, ignore_eos=True)
    world.finish_batch()
    short = world.arrive("short", prompt(8, 20), max_tokens=1, ignore_eos=True)
    before = world.num_steps
    while not short.tokens:
        world.finish_batch() if world.batch else world.finish_step()
    # One runs, one was planned; then two at a quarter each, and its commit.
    assert world.num_steps - before <= 6
    assert not long.tokens
    world.run()
    assert world.num_steps <= -(-1008 // 16) + 4
    world.assert_right(long)
    world.assert_right(short)
