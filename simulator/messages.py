"""What the simulated processes send one another: the wire's messages that matter here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmem_svc.core import batch as kv
from kvmem_svc.core import mutations
from kvmem_svc.core.mutations import PoolConfirmed
from kvmem_svc.core.views import AdoptedRequest
from scheduler_svc.core import events, ops
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.preemption import TierRates

# ---- scheduler and memory service ----


@dataclass(frozen=True)
class OpenSession:
    holder: str
    holder_address: str
    resume: kv.Fence | None = None
    last_result_batch_seq: int = 0


@dataclass(frozen=True)
class SessionOpened:
    fence: kv.Fence
    next_batch_seq: int
    last_step_id: int
    lease_ttl_ms: int
    mutations_open: bool


@dataclass(frozen=True)
class Heartbeat:
    """The holder is there. Not answered."""


@dataclass(frozen=True)
class ApplyBatch:
    fence: kv.Fence
    batch: ops.Batch


@dataclass(frozen=True)
class CloseSession:
    fence: kv.Fence


@dataclass(frozen=True)
class AttachPool:
    fence: kv.Fence
    worker_boot_id: str
    geometry: kv.PoolGeometry
    last_executed_step: int


@dataclass(frozen=True)
class PoolAttached:
    fence: kv.Fence
    levels: ops.PoolLevels
    confirmed: PoolConfirmed


@dataclass(frozen=True)
class AdoptSequences:
    fence: kv.Fence


@dataclass(frozen=True)
class Adopted:
    records: tuple[AdoptedRequest, ...]


# ---- operator and memory service ----


@dataclass(frozen=True)
class Pin:
    fence: kv.Fence
    pin: mutations.Pin


@dataclass(frozen=True)
class Unpin:
    fence: kv.Fence
    pin_id: int


# ---- scheduler and worker ----


@dataclass(frozen=True)
class WorkerInfo:
    boot_id: str
    geometry: kv.PoolGeometry
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_batched_tokens: int
    max_inflight_steps: int
    rates: TierRates


@dataclass(frozen=True)
class Install:
    fence: kv.Fence


@dataclass(frozen=True)
class Installed:
    last_step_id: int
    retained: tuple[ops.RetainedStep, ...]


@dataclass(frozen=True)
class Execute:
    fence: kv.Fence
    step: ops.Step


# ---- caller and scheduler ----


@dataclass(frozen=True)
class Attachment:
    """secret empty: nobody can come back."""

    secret: bytes = b""
    detach_ttl_ms: int = 0
    received: Mapping[int, events.Received] = field(default_factory=dict)


@dataclass(frozen=True)
class Generate:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    attachment: Attachment = Attachment()


@dataclass(frozen=True)
class Abort:
    request_id: str
    secret: bytes = b""


@dataclass(frozen=True)
class Accepted:
    """The first reply."""


@dataclass(frozen=True)
class Output:
    deltas: tuple[events.CandidateDelta, ...]
    last: bool
