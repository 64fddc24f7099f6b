"""What a seed is mostly about: each theme reaches what the others rarely do."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulator.clock import SECOND

LONG_US = 15 * SECOND
SHORT_US = SECOND // 2

# A kind of fault and whom it hits. "scheduler" is mostly the one that serves.
Target = tuple[str, tuple[str, ...]]

KILLS: tuple[Target, ...] = tuple(("kill", (who,)) for who in ("scheduler", "kvmem", "worker"))
# Several at nearly the same time.
MASSACRES: tuple[Target, ...] = (
    ("kill", ("kvmem", "worker")),
    ("kill", ("scheduler", "kvmem")),
    ("kill", ("scheduler", "worker")),
    ("kill", ("scheduler", "kvmem", "worker")),
)
# The memory service dies with its journal deleted, in the middle of a record, or right after it.
JOURNAL: tuple[Target, ...] = (
    ("lose", ("kvmem",)),
    ("lose", ("kvmem", "scheduler")),
    ("tear", ("kvmem",)),
    ("die", ("kvmem",)),
)
PAUSES: tuple[Target, ...] = tuple(("pause", (who,)) for who in ("scheduler", "kvmem", "worker"))
CUTS: tuple[Target, ...] = (
    ("cut", ("scheduler", "kvmem")),
    ("cut", ("scheduler", "worker")),
    ("cut", ("callers", "scheduler")),
    ("isolate", ("scheduler",)),
)


@dataclass(frozen=True)
class Recipe:
    """A fault that always happens: right after the n-th message of a kind, with the least and the
    greatest n, for a number of microseconds, or of keepalives, between the two ends of a range."""

    kind: str
    targets: tuple[str, ...]
    after: tuple[str, int, int]
    duration_us: tuple[int, int] = (0, 0)
    duration_keepalives: tuple[float, float] = (0.0, 0.0)

    def draw_moment(self, draw: Random) -> tuple[str, int]:
        kind, least, most = self.after
        return kind, draw.randint(least, most)

    def draw_duration_us(self, draw: Random, keepalive_us: int) -> int:
        return draw.randint(*self.duration_us) + int(
            keepalive_us * draw.uniform(*self.duration_keepalives)
        )


@dataclass(frozen=True)
class Theme:
    """`fault_probability`: of each of `faults`, to happen once or a few times.

    A crowd is groups that fork into a pool full of others; late bursts are requests at these
    times, in keepalives.
    """

    name: str
    weight: int
    num_schedulers: tuple[int, ...] = (1,)
    keepalives_us: tuple[int, ...] = (SHORT_US, LONG_US)
    fault_probability: float = 0.0
    faults: tuple[Target, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    loses_messages: bool = True
    break_connection: tuple[float, ...] = (0.0,)
    tokens_in_pool: tuple[int, ...] = (28, 48, 64, 90, 300)
    max_num_seqs: tuple[int, ...] = (2, 4, 8)
    watermarks: tuple[float, ...] = (0.0, 0.0, 0.01, 0.2)
    crowded: bool = False
    long_prompts: bool = False
    # Prompts begin alike, go on from answers, and are asked again; blocks stay cached.
    cached: bool = False
    # Groups are swapped out and in, mostly.
    swapping: bool = False
    # Everybody leaves and comes back under the same id, again and again, while answers are slow.
    churn: bool = False
    max_waiting: tuple[int, ...] = (3, 12, 40)
    num_late_bursts: tuple[int, ...] = (0, 0, 1, 2)
    late_keepalives: tuple[float, float] = (1.0, 2.2)
    orphan_ttls_ms: tuple[int, ...] = (5_000, 60_000)
    detach_ttls_ms: tuple[int, ...] = (300, 2_000, 10_000)
    # Callers who leave, of all: one of these shares.
    impatience: tuple[float, ...] = (0.0, 0.1, 0.5)

    def num_host_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """What the host tier may hold, beside a pool of so many blocks."""
        if self.swapping:
            return (num_blocks // 2, num_blocks, 2 * num_blocks)
        return (0, 0, num_blocks // 3, 2 * num_blocks)


THEMES = (
    # Nothing is lost; the pool is too small for what is asked of it.
    Theme(
        "pressure",
        4,
        loses_messages=False,
        tokens_in_pool=(28, 36, 48, 64),
        max_num_seqs=(8, 10),
        max_waiting=(12, 40, 40),
    ),
    Theme(
        "crowd",
        4,
        loses_messages=False,
        tokens_in_pool=(36,),
        max_num_seqs=(10,),
        watermarks=(0.0,),
        max_waiting=(40,),
        crowded=True,
    ),
    Theme(
        "long prompts",
        3,
        loses_messages=False,
        tokens_in_pool=(34, 36),
        max_num_seqs=(8,),
        long_prompts=True,
    ),
    Theme(
        "churn",
        5,
        loses_messages=False,
        tokens_in_pool=(48, 90),
        max_num_seqs=(8,),
        max_waiting=(3,),
        churn=True,
    ),
    Theme(
        "shared prefixes",
        12,
        loses_messages=False,
        tokens_in_pool=(36, 48, 64, 90),
        max_num_seqs=(4, 8),
        max_waiting=(12, 40),
        cached=True,
    ),
    Theme(
        "shared prefixes and faults",
        6,
        num_schedulers=(1, 2),
        fault_probability=0.12,
        faults=(*KILLS, *MASSACRES[:2], *JOURNAL),
        break_connection=(0.0, 0.0, 0.01),
        tokens_in_pool=(48, 64, 90),
        max_num_seqs=(4, 8),
        max_waiting=(12, 40),
        cached=True,
    ),
    # Anything may happen.
    Theme(
        "faults",
        8,
        num_schedulers=(1, 2, 2),
        fault_probability=0.15,
        faults=(*KILLS, *MASSACRES, *JOURNAL, *PAUSES, *CUTS),
        break_connection=(0.0, 0.0, 0.002, 0.01),
    ),
    # The memory service dies, again and again.
    Theme(
        "journal",
        4,
        num_schedulers=(1, 1, 2),
        fault_probability=0.6,
        faults=(KILLS[1], MASSACRES[0], *JOURNAL),
        break_connection=(0.0, 0.01),
    ),
    # One dies after the other, and at once.
    Theme(
        "massacre",
        3,
        num_schedulers=(1, 2),
        fault_probability=0.5,
        faults=(*KILLS, *MASSACRES),
        impatience=(0.0,),
    ),
    # Connections break, and sessions are resumed.
    Theme(
        "shaky",
        3,
        fault_probability=0.3,
        faults=(*KILLS[1:2], *PAUSES[:2], *CUTS[:1]),
        break_connection=(0.01, 0.03),
    ),
    # One after the other stands still for a while.
    Theme("frozen", 6, num_schedulers=(1, 2), fault_probability=0.6, faults=(*PAUSES, CUTS[1])),
    # Callers are cut off, vanish and return.
    Theme(
        "absent callers",
        3,
        num_schedulers=(1, 2),
        keepalives_us=(SHORT_US,),
        fault_probability=0.4,
        faults=(CUTS[2], KILLS[0]),
        break_connection=(0.0, 0.01),
        detach_ttls_ms=(300, 2_000),
        impatience=(0.5, 0.8),
    ),
    # Nobody holds the session for so long that the memory service expires what it has.
    Theme(
        "orphans",
        4,
        loses_messages=False,
        recipes=(
            Recipe("kill", ("scheduler",), ("Execute", 5, 40), duration_us=(4_000_000, 9_000_000)),
        ),
        orphan_ttls_ms=(1_000, 3_000),
        num_late_bursts=(0,),
    ),
    # One is away for so long that its lease is over.
    Theme(
        "nap",
        2,
        keepalives_us=(LONG_US,),
        loses_messages=False,
        recipes=(
            Recipe(
                "pause", ("scheduler",), ("ApplyBatch", 10, 40), duration_us=(4_000_000, 4_000_000)
            ),
        ),
        num_late_bursts=(0,),
    ),
    # Two schedulers; the one that serves falls asleep with its first step in hand, ...
    Theme(
        "asleep",
        5,
        num_schedulers=(2,),
        keepalives_us=(LONG_US,),
        loses_messages=False,
        recipes=(
            Recipe("pause", ("scheduler",), ("ApplyBatch", 2, 3), duration_keepalives=(0.3, 2.0)),
        ),
        num_late_bursts=(3,),
        late_keepalives=(0.2, 1.7),
    ),
    # ... or reaches the worker and no longer the memory service.
    Theme(
        "half cut off",
        7,
        num_schedulers=(2,),
        keepalives_us=(LONG_US,),
        loses_messages=False,
        recipes=(
            Recipe(
                "cut", ("scheduler", "kvmem"), ("Execute", 5, 30), duration_keepalives=(0.3, 2.0)
            ),
        ),
        num_late_bursts=(3,),
        late_keepalives=(0.2, 1.7),
    ),
    # ... or dies, and the other is there.
    Theme(
        "succession",
        4,
        num_schedulers=(2,),
        fault_probability=0.3,
        faults=KILLS,
        recipes=(
            Recipe("kill", ("scheduler",), ("Execute", 5, 40), duration_us=(10_000, 3 * SECOND)),
        ),
        num_late_bursts=(0, 2),
    ),
    # ... just when it has asked for copies that nobody makes, or has forked, or resumed a group.
    *(
        Theme(
            f"heirs of a {moment}",
            4,
            num_schedulers=(1, 2),
            loses_messages=False,
            tokens_in_pool=(36, 36, 64),
            max_num_seqs=(10,),
            watermarks=(0.0,),
            max_waiting=(40,),
            crowded=True,
            recipes=(Recipe("kill", ("scheduler",), (moment, 1, 3), duration_us=(1_000, SECOND)),),
        )
        for moment in ("batch with copies", "fork", "shared admission")
    ),
    # Groups are swapped out and in; ...
    Theme(
        "swapping",
        4,
        loses_messages=False,
        tokens_in_pool=(40, 48, 64),
        max_num_seqs=(8, 10),
        watermarks=(0.0,),
        max_waiting=(40,),
        crowded=True,
        swapping=True,
    ),
    # ... and somebody dies just then.
    *(
        Theme(
            f"death of the {who} in a swap",
            weight,
            num_schedulers=(1, 2),
            loses_messages=False,
            tokens_in_pool=(40, 48, 64),
            max_num_seqs=(8, 10),
            watermarks=(0.0,),
            max_waiting=(40,),
            crowded=True,
            swapping=True,
            recipes=(
                Recipe("kill", (who,), ("batch with swaps", 1, 2), duration_us=(1_000, SECOND)),
            ),
        )
        for who, weight in (("scheduler", 9), ("kvmem", 4), ("worker", 5))
    ),
    # A scheduler takes over from itself, since a connection broke, and then another one breaks.
    Theme(
        "broken twice",
        5,
        loses_messages=False,
        recipes=(
            Recipe("break", ("scheduler", "worker"), ("Execute", 5, 40)),
            Recipe("break", ("scheduler", "kvmem"), ("Install", 2, 2)),
        ),
    ),
    # The memory service dies in the middle of a record, or before it answers, or forgets all.
    Theme(
        "torn",
        3,
        num_schedulers=(1, 2),
        recipes=(Recipe("tear", ("kvmem",), ("ApplyBatch", 2, 40), duration_us=(1_000, SECOND)),),
    ),
    Theme(
        "unanswered",
        3,
        num_schedulers=(1, 2),
        recipes=(Recipe("die", ("kvmem",), ("ApplyBatch", 2, 40), duration_us=(1_000, SECOND)),),
    ),
    Theme(
        "forgotten",
        4,
        num_schedulers=(1, 2),
        recipes=(Recipe("lose", ("kvmem",), ("Execute", 2, 40), duration_us=(1_000, SECOND)),),
        impatience=(0.0, 0.1),
    ),
    # The worker, or the memory service, is another one before anybody has looked.
    Theme(
        "quick restart of the worker",
        4,
        recipes=(Recipe("kill", ("worker",), ("OpenSession", 1, 1), duration_us=(50, 300)),),
    ),
    Theme(
        "quick restart of kvmem",
        2,
        recipes=(Recipe("lose", ("kvmem",), ("OpenSession", 1, 1), duration_us=(50, 300)),),
    ),
)


def draw_theme(draw: Random) -> Theme:
    return draw.choices(THEMES, [theme.weight for theme in THEMES])[0]
