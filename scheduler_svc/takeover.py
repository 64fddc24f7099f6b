"""Taking over: from two peers that nobody speaks for to a session that may write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from scheduler_svc.core import events
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.ports import (
    Holder,
    KvMemoryPort,
    PeerLostError,
    WorkerDescription,
    WorkerPort,
)

log = structlog.get_logger()


async def take_over(
    holder: Holder,
    kvmem: KvMemoryPort,
    worker: WorkerPort,
    description: WorkerDescription,
    on_opened: Callable[[], None],
    num_sequences_needed: int,
) -> events.Connected:
    """In the one order that leaves no moment with two writers. Raises PeerLostError.

    `on_opened`: the session is there, and must be kept alive from here on; the worker may take
    long to end the step that runs.
    """
    opened = await kvmem.open(holder, description)
    on_opened()
    installed = await worker.install()
    attached = await kvmem.attach(description, installed.last_step_id)
    adopted = await kvmem.adopt()
    num_sequences = attached.levels.num_free_sequences + sum(
        len(record.sequences) for record in adopted
    )
    if num_sequences < num_sequences_needed:
        raise PeerLostError(
            "INTERNAL",
            f"the memory service holds {num_sequences} sequences; max_waiting + 2 * max_num_seqs"
            f" is {num_sequences_needed}",
        )
    log.info(
        "connected",
        model=description.model_name,
        num_blocks=description.num_blocks,
        block_size=description.block_size,
        num_adopted=len(adopted),
        num_retained=len(installed.retained),
    )
    return events.Connected(
        next_batch_seq=opened.next_batch_seq,
        # What a former session was preparing, and has not begun, begins now.
        last_step_id=max(opened.last_step_id - 1, installed.last_step_id, 0),
        num_blocks=description.num_blocks,
        block_size=description.block_size,
        levels=attached.levels,
        adopted=adopted,
        pending_copies=attached.pending_copies,
        retained=installed.retained,
        max_inflight_steps=description.max_inflight_steps,
        pending_swap_ins=attached.pending_swap_ins,
        pending_swap_outs=attached.pending_swap_outs,
        rates=description.rates,
    )


def machine_key(worker: WorkerDescription) -> tuple[str, tuple[int, ...], int]:
    """What a machine is made for; another worker may serve another model, or smaller steps."""
    return worker.model_path, worker.eos_token_ids, worker.max_num_batched_tokens


def within_limits(config: SchedulerConfig, worker: WorkerDescription) -> SchedulerConfig:
    """The configuration, with steps no larger than the worker takes."""
    max_num_batched_tokens = min(config.max_num_batched_tokens, worker.max_num_batched_tokens)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    if max_num_batched_tokens < config.max_num_batched_tokens:
        log.warning(
            "steps are bounded by the worker", max_num_batched_tokens=max_num_batched_tokens
        )
    return replace(config, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
