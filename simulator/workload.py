"""Who asks for what, and when they lose interest: drawn before the world starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request
from simulator.clock import MS
from simulator.knobs import Knobs
from simulator.messages import Generate
from simulator.prefix_tree import VOCAB
from simulator.worker import solo_run


@dataclass(frozen=True)
class Script:
    """One caller. `leaves`: how it gives up early, after so many messages or microseconds, in
    its first `num_leaves` tries.

    `attaches`: it has a secret, and goes on wherever its stream breaks.
    `comes_back`: after it vanished or let go of its stream, if it attaches, it goes on within
    `returns_within_us`; after it was aborted or refused it asks again under the same id, which is
    another request, at most `max_attempts` times in all.
    """

    message: Generate
    # Of one that follows another: after that one's end.
    at_us: int
    leaves: str = ""  # "cancel", "abort" (by the unary call), "vanish" or "detach"
    leaves_after_messages: int | None = None
    leaves_after_us: int | None = None
    num_leaves: int = 1
    comes_back: bool = False
    max_attempts: int = 1
    returns_within_us: int = 500 * MS
    attaches: bool = False
    detach_ttl_ms: int = 0
    # Somebody else asks under the same id.
    has_twin: bool = False
    # It goes on from the answer to this one, once that is there: its prompt begins with the
    # `num_asked_tokens` of that one's, and with the answer.
    follows: str = ""
    num_asked_tokens: int = 0

    def request(self) -> Request:
        """As a scheduler will see it, less what only its shell cares about."""
        message = self.message
        return Request(
            message.request_id,
            message.prompt_token_ids,
            message.params,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
        )


@dataclass(frozen=True)
class Workload:
    scripts: tuple[Script, ...]
    # When requests come, and the end of the time in which they do.
    busy_us: tuple[int, ...]
    horizon_us: int

    @staticmethod
    def draw(draw: Random, knobs: Knobs) -> Workload:
        # The first mostly when everybody is ready.
        first_us = draw.choice([0, 150 * MS, 150 * MS])
        more = draw.choice([0, 0, 1, 3])
        bursts = [first_us + draw.randint(0, 200 * MS) for _ in range(more)]
        bursts.append(first_us)
        # And some when others may have been given up.
        theme = knobs.theme
        bursts += [
            int(knobs.keepalive_us * draw.uniform(*theme.late_keepalives))
            for _ in range(draw.choice(theme.num_late_bursts))
        ]
        habits = Habits.draw(draw, knobs)
        scripts = [
            _draw_script(draw, knobs, f"r{i}", draw.choice(bursts), habits)
            for i in range(draw.randint(8, 26) + (10 if theme.churn else 0))
        ]
        if theme.cached:
            scripts = [_draw_cached(draw, knobs, script, habits) for script in scripts]
            scripts += _draw_turns(draw, knobs, scripts)
        if draw.random() < 0.2:
            which = draw.randrange(len(scripts))
            twin = scripts[which] = replace(scripts[which], has_twin=True)
            scripts.append(replace(twin, at_us=twin.at_us + draw.randint(0, 5 * MS)))
        return Workload(tuple(scripts), tuple(bursts), max(bursts) + 100 * MS)


@dataclass(frozen=True)
class Habits:
    """What the callers of one seed have in common. `stems`: how their prompts may begin."""

    stems: tuple[tuple[int, ...], ...]
    max_tokens: int
    impatience: float
    ns: tuple[int, ...]
    spread_us: int

    @staticmethod
    def draw(draw: Random, knobs: Knobs) -> Habits:
        if knobs.theme.crowded:
            stems = tuple(_tokens(draw, 10) for _ in range(3))
            spread_us = draw.choice([0, 5 * MS, 60 * MS])
            return Habits(stems, 24, draw.choice([0.1, 0.5]), (2, 3, 4), spread_us)
        if knobs.theme.long_prompts:
            stems = tuple(_tokens(draw, 14) for _ in range(3))
            return Habits(stems, 6, draw.choice([0.0, 0.1]), (1, 2, 3, 4), 0)
        if knobs.theme.cached:
            longest = draw.choice([8, 12, 16])
            stems = tuple(_tokens(draw, longest) for _ in range(2))
            spread_us = draw.choice([0, 0, 5 * MS, 60 * MS, 200 * MS])
            return Habits(stems, 8, draw.choice([0.0, 0.1]), (1, 1, 1, 2, 3), spread_us)
        # Several requests fit the pool, so that they get into each other's way as they grow.
        capacity = knobs.num_blocks * knobs.block_size
        longest = min(16, draw.choice([3, 5, capacity // 8, capacity // 4]))
        return Habits(
            tuple(_tokens(draw, longest) for _ in range(3)),
            min(28, draw.choice([6, capacity // 5, capacity // 4, capacity // 3, capacity // 2])),
            draw.choice(knobs.theme.impatience),
            draw.choice([(1, 1, 2), (1, 1, 1, 2, 3, 4), (2, 3, 4)]),
            draw.choice([0, 5 * MS, 60 * MS]),
        )


def _draw_priority(draw: Random) -> int:
    return draw.choice([0, 0, 0, 0, 1, -1])


def _tokens(draw: Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(1, VOCAB - 1) for _ in range(count))


def _draw_script(draw: Random, knobs: Knobs, name: str, burst_us: int, habits: Habits) -> Script:
    stem = draw.choice(habits.stems)
    start = stem[: draw.randint(0, len(stem))] if draw.random() < 0.4 else ()
    prompt = start + _tokens(draw, draw.randint(0 if start else 1, len(stem)))
    if knobs.theme.churn:
        return _draw_churning(draw, knobs, name, prompt, burst_us)
    if draw.random() < 0.02:  # it does not fit the pool, nor perhaps the model
        prompt = _tokens(draw, knobs.num_blocks * knobs.block_size + 3)
    room = max(1, knobs.max_model_len - len(prompt))
    n = min(draw.choice(habits.ns), knobs.max_num_seqs)
    most_tokens = habits.max_tokens
    if draw.random() < 0.7:
        most_tokens = -(-most_tokens // n)
    params = SamplingParams(
        seed=draw.randint(0, 3),
        n=n,
        max_tokens=min(draw.choice([1, draw.randint(1, most_tokens), most_tokens]), room),
        ignore_eos=draw.random() < 0.7,
    )
    ways = ("cancel", "abort", "vanish", "vanish", "detach")
    leaves = draw.choice(ways) if draw.random() < habits.impatience else ""
    by_messages = draw.random() < 0.5
    return Script(
        Generate(name, prompt, params, *draw.choice(knobs.domains), _draw_priority(draw)),
        burst_us + draw.randint(0, habits.spread_us),
        leaves,
        draw.randint(0, 5) if leaves and by_messages else None,
        draw.randint(0, 30 * MS) if leaves and not by_messages else None,
        comes_back=draw.random() < 0.6,
        max_attempts=draw.randint(1, 4),
        returns_within_us=draw.choice([500 * MS, knobs.detach_ttl_ms * 2 * MS]),
        attaches=draw.random() < 0.85,
        detach_ttl_ms=knobs.detach_ttl_ms,
    )


def _draw_churning(
    draw: Random, knobs: Knobs, name: str, prompt: tuple[int, ...], burst_us: int
) -> Script:
    params = SamplingParams(
        seed=draw.randint(0, 3), n=draw.choice([1, 2]), max_tokens=draw.randint(1, 8)
    )
    return Script(
        Generate(name, prompt, params, *draw.choice(knobs.domains), _draw_priority(draw)),
        burst_us + draw.randint(0, 20 * MS),
        "cancel",
        leaves_after_us=draw.choice([draw.randint(0, 3 * MS), draw.randint(3 * MS, 40 * MS)]),
        num_leaves=draw.randint(3, 7),
        comes_back=True,
        max_attempts=8,
        returns_within_us=1 * MS,
        attaches=draw.random() < 0.3,
        detach_ttl_ms=knobs.detach_ttl_ms,
    )


# ---- prompts that begin alike ----


def _draw_cached(draw: Random, knobs: Knobs, script: Script, habits: Habits) -> Script:
    """With a prompt that begins with a stem, mostly; often whole blocks, so that it may be found
    to its end."""
    if draw.random() < 0.15:
        return script
    stem = draw.choice(habits.stems)
    size = knobs.block_size
    shared = draw.choice([len(stem), len(stem) // size * size, draw.randint(1, len(stem))])
    own = draw.choice([0, 0, draw.randint(0, 2 * size), -shared % size])
    prompt = (stem[:shared] + _tokens(draw, own))[: knobs.max_model_len - 1] or stem[:1]
    return _with_prompt(knobs, script, prompt)


def _with_prompt(knobs: Knobs, script: Script, prompt: tuple[int, ...]) -> Script:
    message = script.message
    room = knobs.max_model_len - len(prompt)
    params = replace(message.params, max_tokens=min(message.params.max_tokens, room))
    return replace(script, message=replace(message, prompt_token_ids=prompt, params=params))


def _draw_turns(draw: Random, knobs: Knobs, scripts: Sequence[Script]) -> list[Script]:
    """Conversations that go on: the next prompt is the last one, its answer and something new."""
    turns: list[Script] = []
    room = min(knobs.max_model_len, knobs.num_blocks * knobs.block_size // 2)
    for script in scripts:
        last = script
        while draw.random() < 0.5:
            answer = solo_run(last.request(), draw.randrange(last.message.params.n))
            asked = last.message.prompt_token_ids
            prompt = asked + answer + _tokens(draw, draw.randint(0, 3))
            if len(prompt) + 2 > room:
                break
            name = f"{script.message.request_id}.{len(turns)}"
            following = replace(
                _with_prompt(knobs, script, prompt),
                at_us=draw.choice([0, 5 * MS, 100 * MS]),
                leaves="",
                follows=last.message.request_id,
                num_asked_tokens=len(asked),
            )
            last = replace(following, message=replace(following.message, request_id=name))
            turns.append(last)
    return turns
