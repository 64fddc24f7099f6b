"""What a seed draws beside what happens: sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvmem_svc.core.batch import PoolGeometry
from simulator.clock import MS, SECOND

# What a seed is mostly about; each reaches what the others rarely do.
# pressure: nothing is lost, and the pool is too small for what is asked of it
# faults:   everything may go wrong
# contest:  two schedulers, and the one that serves is cut off or paused
# shaky:    connections break, and sessions are resumed
THEMES = (*["pressure"] * 3, *["faults"] * 3, *["contest"] * 2, "shaky")


@dataclass(frozen=True)
class Knobs:
    """Sizes in tokens and blocks; `step_duration_us`: least and most."""

    theme: str
    block_size: int
    num_blocks: int
    # Pools of the worker's later lives may be larger or smaller by this many blocks.
    num_blocks_jitter: int
    max_model_len: int
    watermark: float
    max_num_batched_tokens: int
    worker_max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int
    num_schedulers: int
    # Whether a scheduler's shell resumes its session when only the connection broke.
    resumes_sessions: bool
    keepalive_us: int
    step_duration_us: tuple[int, int]

    @staticmethod
    def draw(draw: Random) -> Knobs:
        theme = draw.choice(THEMES)
        pressure = theme == "pressure"
        block_size = draw.choice([1, 2, 3, 4] if pressure else [1, 2, 3, 4, 4, 6])
        # Tight pools are where the bugs are; roomy ones are there for the rest.
        tokens_in_pool = draw.choice([28, 36, 48, 64] if pressure else [28, 48, 64, 90, 300])
        max_num_batched_tokens = draw.choice([draw.randint(6, 12), draw.randint(6, 40)])
        num_schedulers = {"contest": 2, "faults": draw.choice([1, 1, 2])}.get(theme, 1)
        return Knobs(
            theme=theme,
            block_size=block_size,
            num_blocks=max(4, tokens_in_pool // block_size + draw.randint(-2, 2)),
            num_blocks_jitter=draw.choice([0, 0, 2]),
            max_model_len=draw.choice([40, 64, 128]),
            watermark=draw.choice([0.0, 0.0, 0.01, 0.2]),
            max_num_batched_tokens=max_num_batched_tokens,
            worker_max_num_batched_tokens=draw.choice([max_num_batched_tokens, 64, 8]),
            max_num_seqs=draw.choice([2, 4, 8, 8, 10]),
            max_waiting=draw.choice([3, 12, 40, 40, 40]),
            num_schedulers=num_schedulers,
            resumes_sessions=theme == "shaky" or draw.random() < 0.3,
            keepalive_us=draw.choice([500 * MS, 2 * SECOND, 15 * SECOND]),
            step_duration_us=draw.choice([(200, 2_000), (500, 8_000), (50, 300)]),
        )

    def geometry(self, worker_life: int) -> PoolGeometry:
        """The pool of the worker's `worker_life`-th life, 1 being the first."""
        jitter = (worker_life % 3 - 1) * self.num_blocks_jitter
        return PoolGeometry(max(3, self.num_blocks + jitter), self.block_size, self.max_model_len)
