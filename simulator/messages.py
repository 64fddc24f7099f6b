"""What the simulated processes send one another: the wire's messages that matter here."""

from __future__ import annotations

from dataclasses import dataclass

from kvmem_svc.core import batch as kv
from scheduler_svc.core import events, ops
from scheduler_svc.core.params import SamplingParams

# ---- scheduler and memory service ----


@dataclass(frozen=True)
class OpenSession:
    holder: str
    resume: kv.Fence | None = None
    last_result_batch_seq: int = 0


@dataclass(frozen=True)
class SessionOpened:
    fence: kv.Fence
    next_batch_seq: int
    last_step_id: int


@dataclass(frozen=True)
class ApplyBatch:
    fence: kv.Fence
    batch: ops.Batch


@dataclass(frozen=True)
class AttachPool:
    fence: kv.Fence
    worker_boot_id: str
    geometry: kv.PoolGeometry


@dataclass(frozen=True)
class PoolAttached:
    fence: kv.Fence
    levels: ops.PoolLevels


# ---- scheduler and worker ----


@dataclass(frozen=True)
class WorkerInfo:
    boot_id: str
    geometry: kv.PoolGeometry
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Execute:
    fence: kv.Fence
    step: ops.Step


# ---- caller and scheduler ----


@dataclass(frozen=True)
class Generate:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Accepted:
    """The first reply."""


@dataclass(frozen=True)
class Output:
    deltas: tuple[events.CandidateDelta, ...]
    last: bool
