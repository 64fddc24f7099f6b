"""How much of a prompt was cached is told once to each caller, with the first news."""

from __future__ import annotations

from scheduler_svc.core import events
from scheduler_svc.core.delivery import Recipients
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import GroupStatus, Request, Sequence, SequenceGroup
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.mailbox import Mailbox
from simulator.worker import EOS, Letters
from tests.scheduler.world import World

REQUEST = Request("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=8))


def group_with(num_tokens: int, num_cached_tokens: int | None) -> SequenceGroup:
    group = SequenceGroup(REQUEST, 0.0, GroupStatus.RUNNING, num_cached_tokens=num_cached_tokens)
    sequence = Sequence(1, 0, group, StopChecker(REQUEST.params, (EOS,), Letters()))
    for token_id in range(num_tokens):
        sequence.take(50 + token_id, 0.0)
    sequence.num_committed_tokens = num_tokens
    group.sequences = [sequence]
    return group


def emits(recipients: Recipients, group: SequenceGroup) -> list[int | None]:
    recipients.note(group)
    return [emit.num_cached_tokens for emit in recipients.collect()]


def test_it_comes_with_the_first_deltas_only() -> None:
    recipients = Recipients()
    recipients.attach("a", {})
    assert emits(recipients, group_with(0, 4)) == []
    assert emits(recipients, group_with(1, 4)) == [4]
    assert emits(recipients, group_with(2, 4)) == [None]
    # Whoever attaches again may have missed it.
    recipients.attach("a", {0: events.Received((50, 51))})
    assert emits(recipients, group_with(3, 4)) == [4]


def test_where_it_is_not_known_nothing_is_said() -> None:
    recipients = Recipients()
    recipients.attach("a", {})
    assert emits(recipients, group_with(1, None)) == [None]


def test_it_counts_tokens_of_the_prompt() -> None:
    recipients = Recipients()
    recipients.attach("a", {})
    assert emits(recipients, group_with(3, 7)) == [5]


def test_a_slow_reader_still_gets_it() -> None:
    mailbox = Mailbox(REQUEST)
    mailbox.accept()
    delta = events.CandidateDelta(0, "x", (1,), 0.0)
    mailbox.put(events.Emit("a", (delta,), None, 4))
    mailbox.put(events.Emit("a", (delta,)))
    delivery = mailbox.take()
    assert delivery is not None
    assert (delivery.num_cached_tokens, delivery.deltas[0].token_ids) == (4, (1, 1))
    mailbox.put(events.Emit("a", (delta,)))
    delivery = mailbox.take()
    assert delivery is not None
    assert delivery.num_cached_tokens is None


def test_a_prompt_that_was_there_before_is_found() -> None:
    world = World(num_blocks=40, config=SchedulerConfig(use_prefix_cache=True))
    told: dict[str, list[int | None]] = {}
    receive = world.machine.handle

    def listen(event: events.Event, now_s: float) -> list[events.Command]:
        commands = receive(event, now_s)
        for command in commands:
            if isinstance(command, events.Emit):
                told.setdefault(command.request_id, []).append(command.num_cached_tokens)
        return commands

    world.machine.handle = listen  # type: ignore[method-assign]
    prompt = list(range(20, 31))
    for request_id in ("first", "second"):
        world.arrive(request_id, prompt, max_tokens=3, ignore_eos=True)
        world.run()
    # Of 11 tokens, in blocks of 4, two whole blocks.
    assert (told["first"][0], told["second"][0]) == (0, 8)
    assert not any(told["second"][1:])
