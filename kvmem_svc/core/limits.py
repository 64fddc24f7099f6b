"""What the memory service accepts, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """The integers low .. high, both included."""

    low: int
    high: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low} .. {self.high}"


GEOMETRY_RANGES: Mapping[str, Range] = {
    "num_blocks": Range(1, 2**31 - 1),
    "block_size": Range(1, 1024),
    "max_model_len": Range(1, 2**20),
    "kv_bytes_per_block": Range(0, 2**40),
    "num_host_blocks": Range(0, 2**31 - 1),
}

# Sizes of an Arrive: bytes of text and opaque fields, tokens, candidates.
ARRIVE_RANGES: Mapping[str, Range] = {
    "request_id_bytes": Range(1, 256),
    "tenant_bytes": Range(0, 256),
    "request_spec_bytes": Range(0, 64 * 1024),
    "request_digest_bytes": Range(0, 64),
    "cache_salt_bytes": Range(0, 256),
    "num_candidates": Range(1, 64),
}

MAX_SCHEDULER_STATE_BYTES = 4096
MAX_OPS_PER_BATCH = 8192
# Cells of the token matrix, max_sequences x (max_model_len + 1): 8 GiB of address space,
# of which only the pages that hold tokens are ever touched.
MAX_TOKEN_CELLS = 2**31
# Records (waiting, running or ended and not yet confirmed) for each row of the sequence table.
MAX_RECORDS_PER_SEQUENCE = 4
# Batches whose results are kept for a caller that sends one again.
REPLY_WINDOW_BATCHES = 8
# What one look at the clock adds at most to the time that leases run by. The shell looks far
# more often: a longer gap means that the service itself was not there.
MAX_CLOCK_STEP_MS = 500
# Pins at a time. All together they hold at most half the pool.
MAX_PINS = 256
MAX_PIN_TTL_MS = 24 * 3_600_000
# Requests that one Expire names.
MAX_EXPIRED_REQUESTS = 1024
