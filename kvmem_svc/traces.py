"""Spans of the memory service: one per batch in the step's trace, and one per op that belongs to
a single request in that request's own trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.util.types import AttributeValue

from kvmem_svc.core import batch as b
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.views import request_id_of
from octavo.service.telemetry import Telemetry

Attributes = Mapping[str, AttributeValue]


class BatchTracer:
    """Records spans after the fact. Keeps the traceparents of unconfirmed requests only."""

    def __init__(self, telemetry: Telemetry, memory: KvMemory) -> None:
        self.enabled = telemetry.enabled
        self._telemetry = telemetry
        self._memory = memory
        self._traceparents: dict[str, str] = {}

    def forget_all(self) -> None:
        """The records are gone: so are their traces."""
        self._traceparents.clear()

    def record(
        self,
        batch: b.Batch,
        result: b.BatchResult,
        traceparent: str,
        arrivals: Mapping[str, str],
        span_ns: tuple[int, int],
    ) -> None:
        """`batch` was applied in `span_ns` (unix ns). `traceparent` is its step's; `arrivals`
        maps the request ids that came with a trace context to it."""
        if traceparent:
            self._telemetry.record(
                "kvmem.apply", span_ns, parent=traceparent, attributes=_of_batch(batch, result)
            )
        copies = self._copies_by_request(result)
        for op, op_result in zip(batch.ops, result.results, strict=True):
            if isinstance(op, b.Arrive) and op_result.status == b.OpStatus.OK:
                self._traceparents[op.request_id] = arrivals.get(op.request_id, "")
            for name, request_id, attributes in self._of_one_request(op, op_result, copies):
                self._record_in_request(name, request_id, span_ns, attributes, op_result)
            if isinstance(op, b.Confirm) and op_result.status == b.OpStatus.OK:
                self._traceparents.pop(op.request_id, None)
        for request_id, num_copies in copies.items():
            attributes = {"octavo.num_copied_blocks": num_copies}
            self._record_in_request("kvmem.copy_on_write", request_id, span_ns, attributes, b.OK)

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

    def _of_one_request(
        self, op: b.Op, result: b.OpResult, copies: Counter[str]
    ) -> Iterator[tuple[str, str, Attributes]]:
        """(span name, request id, attributes) for each request the op is about."""
        match op:
            case b.Arrive() if result.status == b.OpStatus.OK:
                num_tokens = int(op.prompt_token_ids.size)
                yield "kvmem.arrive", op.request_id, {"octavo.num_prompt_tokens": num_tokens}
            case b.Admit(members):
                attributes = {
                    "octavo.num_slots": sum(member.num_slots for member in members),
                    "octavo.num_shared_blocks": sum(m.num_shared_blocks for m in members),
                }
                for request_id in self._requests(m.sequence_id for m in members):
                    yield "kvmem.admit", request_id, attributes
            case b.Fork(sequence_id, num_children):
                for request_id in self._requests([sequence_id]):
                    yield (
                        "kvmem.fork",
                        request_id,
                        {
                            "octavo.num_children": num_children,
                            "octavo.num_copied_blocks": copies[request_id],
                        },
                    )
            case b.Preempt(sequence_ids):
                for request_id in self._requests(sequence_ids):
                    yield "kvmem.preempt", request_id, {}
            case b.Free(sequence_ids, finish_reason) if result.status == b.OpStatus.OK:
                reason = b.FinishReason(finish_reason).name
                for request_id in self._requests(sequence_ids):
                    yield "kvmem.free", request_id, {"octavo.finish_reason": reason}
            case _:
                pass

    def _requests(self, sequence_ids: Iterable[int]) -> list[str]:
        manager = self._memory.manager
        assert manager is not None, "ops were applied, so there is a pool"
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


def _of_batch(batch: b.Batch, result: b.BatchResult) -> Attributes:
    return {
        "octavo.step_id": batch.step_id,
        "octavo.batch_seq": batch.batch_seq,
        "octavo.num_ops": len(batch.ops),
        "octavo.num_allocated_blocks": result.num_allocated_blocks,
        "octavo.num_freed_blocks": result.num_freed_blocks,
        "octavo.num_copied_blocks": int(result.copies.src_block_ids.size),
        "octavo.num_free_blocks": result.levels.num_free_blocks,
        "octavo.num_in_use_blocks": result.levels.num_in_use_blocks,
        "octavo.num_quarantined_blocks": result.levels.num_quarantined_blocks,
    }
