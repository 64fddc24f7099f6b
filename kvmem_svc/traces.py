"""Spans of the memory service: one per batch in the step's trace, and one per op that belongs to
a single request in that request's own trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.util.types import AttributeValue

from kvmem_svc.core import batch as b
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.views import request_id_of
from octavo.service.telemetry import Telemetry

Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class BatchTrace:
    """A batch about to be applied. `traceparent` is its step's; `arrivals` maps the ids of
    requests that arrive in it to theirs; `requests` are those each op is about."""

    start_ns: int
    batch: b.Batch
    traceparent: str
    arrivals: Mapping[str, str]
    requests: Sequence[Sequence[str]]


class BatchTracer:
    """Records spans after the fact. Keeps the traceparents of unconfirmed requests only."""

    def __init__(self, telemetry: Telemetry, memory: KvMemory) -> None:
        self.enabled = telemetry.enabled
        self._telemetry = telemetry
        self._memory = memory
        self._traceparents: dict[str, str] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """The records are gone: so are their traces."""
        for request_id in request_ids:
            self._traceparents.pop(request_id, None)

    def begin(self, batch: b.Batch, traceparent: str, arrivals: Mapping[str, str]) -> BatchTrace:
        """Look the requests up before the batch is applied: it may end them."""
        requests = [self._requests(_sequences_of(op)) for op in batch.ops]
        return BatchTrace(time.time_ns(), batch, traceparent, arrivals, requests)

    def end(self, trace: BatchTrace, result: b.BatchResult) -> None:
        """The batch was applied: record its span, and one for each op and request."""
        span_ns = (trace.start_ns, time.time_ns())
        if trace.traceparent:
            attributes = _of_batch(trace.batch, result)
            self._telemetry.record(
                "kvmem.apply", span_ns, parent=trace.traceparent, attributes=attributes
            )
        confirmed = []
        for op, requests, op_result in zip(
            trace.batch.ops, trace.requests, result.results, strict=True
        ):
            if isinstance(op, b.Arrive) and op_result.status == b.OpStatus.OK:
                self._traceparents[op.request_id] = trace.arrivals.get(op.request_id, "")
                requests = [op.request_id]  # noqa: PLW2901 (it has no sequence before)
            elif isinstance(op, b.Confirm) and op_result.status == b.OpStatus.OK:
                confirmed.append(op.request_id)
            for request_id in requests:
                name = f"kvmem.{b.op_name(op)}"
                self._record_in_request(name, request_id, span_ns, _of_op(op), op_result)
        for request_id, num_copies in self._copies_by_request(result).items():
            attributes = {"octavo.num_copied_blocks": num_copies}
            self._record_in_request("kvmem.copy_on_write", request_id, span_ns, attributes, b.OK)
        for request_id in confirmed:
            self._traceparents.pop(request_id, None)

    def _record_in_request(
        self,
        name: str,
        request_id: str,
        span_ns: tuple[int, int],
        attributes: Attributes,
        result: b.OpResult,
    ) -> None:
        parent = self._traceparents.get(request_id)
        if parent:
            common = {"octavo.request_id": request_id, "octavo.status": result.status.name}
            self._telemetry.record(
                name, span_ns, parent=parent, attributes={**common, **attributes}
            )

    def _requests(self, sequence_ids: Iterable[int]) -> list[str]:
        manager = self._memory.manager
        if manager is None:
            return []
        found = (request_id_of(manager, sequence_id) for sequence_id in sequence_ids)
        return list(dict.fromkeys(request_id for request_id in found if request_id))

    def _copies_by_request(self, result: b.BatchResult) -> Counter[str]:
        """How many blocks the batch copies on behalf of each request."""
        copies: Counter[str] = Counter()
        if result.copies.dst_block_ids.size:
            destinations = set(result.copies.dst_block_ids.tolist())
            deltas = result.deltas
            for sequence_id, block in zip(
                deltas.sequence_ids.tolist(), deltas.block_ids.tolist(), strict=True
            ):
                if block in destinations:
                    copies.update(self._requests([sequence_id]))
        return copies


def _sequences_of(op: b.Op) -> Sequence[int]:
    """The sequences of an op that is worth a span of its own in their requests' traces."""
    match op:
        case b.Admit(members):
            return [member.sequence_id for member in members]
        case b.Fork(sequence_id):
            return [sequence_id]
        case b.Preempt(sequence_ids) | b.SwapOut(sequence_ids) | b.Free(sequence_ids):
            return sequence_ids
        case b.SwapIn(members):
            return [member.sequence_id for member in members]
        case _:
            return ()


def _of_op(op: b.Op) -> Attributes:
    match op:
        case b.Arrive():
            return {"octavo.num_prompt_tokens": int(op.prompt_token_ids.size)}
        case b.Admit(members):
            return {
                "octavo.num_slots": sum(member.num_slots for member in members),
                "octavo.num_shared_blocks": sum(m.num_shared_blocks for m in members),
            }
        case b.SwapIn(members):
            return {"octavo.num_slots": sum(member.num_slots for member in members)}
        case b.Fork():
            return {"octavo.num_children": op.num_children}
        case b.Free() if op.finish_reason in b.FINISH_REASONS:
            return {"octavo.finish_reason": b.FinishReason(op.finish_reason).name}
        case _:
            return {}


def _of_batch(batch: b.Batch, result: b.BatchResult) -> Attributes:
    return {
        "octavo.step_id": batch.step_id,
        "octavo.batch_seq": batch.batch_seq,
        "octavo.num_ops": len(batch.ops),
        "octavo.num_allocated_blocks": result.num_allocated_blocks,
        "octavo.num_freed_blocks": result.num_freed_blocks,
        "octavo.num_copied_blocks": int(result.copies.src_block_ids.size),
        "octavo.num_swapped_in_blocks": int(result.swap_ins.src_block_ids.size),
        "octavo.num_swapped_out_blocks": int(result.swap_outs.src_block_ids.size),
        "octavo.num_free_blocks": result.levels.num_free_blocks,
        "octavo.num_in_use_blocks": result.levels.num_in_use_blocks,
        "octavo.num_quarantined_blocks": result.levels.num_quarantined_blocks,
    }
