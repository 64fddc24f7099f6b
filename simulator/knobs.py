"""What a seed draws beside what happens: sizes and limits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvmem_svc.core.batch import PoolGeometry
from kvmem_svc.core.leases import LeaseTimes
from kvmem_svc.core.mutations import Configure
from kvmem_svc.core.tenants import Quota
from scheduler_svc.core.preemption import PreemptionMode, TierRates
from simulator.clock import MS, SECOND
from simulator.themes import Theme, draw_theme

KV_BYTES_PER_BLOCK = 1000
DOMAINS = (
    (("one", ""),),
    (("one", ""), ("one", "salt")),
    (("one", ""), ("two", "")),
    (("one", ""), ("two", ""), ("", "salt")),
)


@dataclass(frozen=True)
class Knobs:
    """Sizes in tokens and blocks; `step_duration_us`: least and most."""

    theme: Theme
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
    keepalive_us: int
    lease_times: LeaseTimes
    # How long a scheduler waits for a lost peer before it tells callers, and for the caller of a
    # request that has ended.
    recovery_us: int
    result_us: int
    detach_ttl_ms: int
    step_duration_us: tuple[int, int]
    max_inflight_steps: int
    # How groups are preempted, and what the worker says that costs.
    num_host_blocks: int
    preemption: PreemptionMode
    rates: TierRates
    # What schedulers ask for, and what the memory service is started with.
    use_prefix_cache: bool
    configuration: Configure
    # In its later lives it may be started with the cache switched the other way.
    switches_cache: bool
    # Schedulers after the first do not use it.
    is_mixed: bool
    # Tenant and cache_salt: whom requests may be of.
    domains: tuple[tuple[str, str], ...]

    @staticmethod
    def draw(draw: Random) -> Knobs:
        theme = draw_theme(draw)
        small = theme.crowded or theme.long_prompts
        block_size = draw.choice([2, 3, 4, 4] if small else [1, 2, 3, 4, 4, 6])
        # Tight pools are where the bugs are; roomy ones are there for the rest.
        tokens_in_pool = draw.choice(theme.tokens_in_pool)
        num_blocks = max(4, tokens_in_pool // block_size + draw.randint(-2, 2))
        max_num_batched_tokens = draw.choice([draw.randint(8, 12), draw.randint(8, 40)])
        if theme.crowded:
            max_num_batched_tokens = 8
        elif theme.cached:  # several prompts may begin in one step
            max_num_batched_tokens = draw.choice([8, 24, 48])
        return Knobs(
            theme=theme,
            block_size=block_size,
            num_blocks=num_blocks,
            num_blocks_jitter=draw.choice([0, 0, 2]),
            max_model_len=draw.choice([40, 64, 128]),
            watermark=draw.choice(theme.watermarks),
            max_num_batched_tokens=max_num_batched_tokens,
            worker_max_num_batched_tokens=draw.choice([max_num_batched_tokens, 64, 64, 8]),
            max_num_seqs=draw.choice(theme.max_num_seqs),
            max_waiting=draw.choice(theme.max_waiting),
            num_schedulers=draw.choice(theme.num_schedulers),
            keepalive_us=draw.choice(theme.keepalives_us),
            lease_times=LeaseTimes(
                lease_ttl_ms=draw.choice([600, 3_000]),
                resume_grace_ms=draw.choice([100, 500, 500]),
                recovery_grace_ms=draw.choice([500, 3_000]),
                orphan_ttl_ms=draw.choice(theme.orphan_ttls_ms),
                result_ttl_ms=draw.choice([2_000, 30_000]),
            ),
            recovery_us=draw.choice([300 * MS, 300 * MS, 3 * SECOND, 30 * SECOND]),
            result_us=draw.choice([500 * MS, 5 * SECOND]),
            detach_ttl_ms=draw.choice(theme.detach_ttls_ms),
            step_duration_us=draw.choice([(200, 2_000), (500, 8_000), (50, 300)]),
            max_inflight_steps=draw.choice([1, 2, 2]),
            num_host_blocks=draw.choice(theme.num_host_blocks(num_blocks)),
            preemption=PreemptionMode.SWAP if theme.swapping else draw.choice([*PreemptionMode]),
            rates=TierRates(1000.0, draw.choice([0.0, 1e5, 1e6]), KV_BYTES_PER_BLOCK),
            use_prefix_cache=theme.cached or draw.random() < 0.4,
            configuration=Configure(draw.random() < 0.95, _draw_quota(draw, num_blocks)),
            switches_cache=draw.random() < 0.15,
            is_mixed=draw.random() < 0.15,
            domains=draw.choice(DOMAINS),
        )

    def configuration_of(self, kvmem_life: int) -> Configure:
        """What the memory service is started with, 1 being the first time."""
        first = self.configuration
        if not self.switches_cache or kvmem_life % 2:
            return first
        return Configure(not first.use_prefix_cache, first.quota)

    def geometry(self, worker_life: int) -> PoolGeometry:
        """The pool of the worker's `worker_life`-th life, 1 being the first."""
        jitter = (worker_life % 3 - 1) * self.num_blocks_jitter
        return PoolGeometry(
            max(3, self.num_blocks + jitter),
            self.block_size,
            self.max_model_len,
            KV_BYTES_PER_BLOCK,
            num_host_blocks=self.num_host_blocks,
        )


def _draw_quota(draw: Random, num_blocks: int) -> Quota:
    """Mostly none."""
    if draw.random() < 0.75:
        return Quota()
    return Quota(draw.choice([0, num_blocks // 2, num_blocks - 2]), draw.choice([0, 4, 8]))
