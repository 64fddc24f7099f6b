"""What a scheduler's shell keeps of one connection to its peers, and of one caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmem_svc.core import batch as kv
from scheduler_svc.core import ops
from scheduler_svc.core.sequence import Request
from simulator.messages import WorkerInfo
from simulator.network import End


@dataclass(eq=False)
class Mailbox:
    """One request's way to its caller, and what went that way."""

    end: End
    request: Request
    emitted: dict[int, list[int]] = field(default_factory=dict)


@dataclass(eq=False)
class Connection:
    """From `_connect` to the loss of a peer. What belongs to a former one is dropped."""

    started_us: int
    worker: WorkerInfo | None = None
    session: End | None = None
    execute: End | None = None
    watches: list[End] = field(default_factory=list)
    fence: kv.Fence | None = None
    serving: bool = False
    lost: str = ""
    batch: ops.Batch | None = None
    step: ops.Step | None = None
    num_copies_planned: int = 0
    last_result_batch_seq: int = 0
    resuming_since_us: int | None = None
