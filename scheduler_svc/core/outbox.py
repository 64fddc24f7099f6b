"""Ops waiting for the next batch, and the one batch whose result is awaited."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core import ops

OnResult = Callable[[ops.OpResult], None]

# Prompts of one batch, in tokens: at most 5 MB on the wire, whose limit is 16. And how many: the
# other ops of a batch are bounded by the sequences that run and wait.
MAX_ARRIVING_TOKENS = 2**20
MAX_ARRIVALS = 1024


def expect_ok(result: ops.OpResult) -> None:
    """For ops that cannot fail unless there is a bug."""
    assert result.status is ops.OpStatus.OK, result


def expect_room_or_none(result: ops.OpResult) -> None:
    """For ops that fail when there is no room, and never otherwise unless there is a bug."""
    no_room = (ops.OpStatus.NO_FREE_BLOCKS, ops.OpStatus.TENANT_QUOTA)
    assert result.status is ops.OpStatus.OK or result.status in no_room, result


class Outbox:
    """Collects ops, numbers batches, and hands each result to the one who asked."""

    def __init__(self) -> None:
        self.next_batch_seq = 1
        self.in_flight: ops.Batch | None = None
        self._queued: list[tuple[ops.Op, OnResult]] = []
        self._awaiting: list[OnResult] = []
        self._sent_acknowledged_step = -1

    def __bool__(self) -> bool:
        return bool(self._queued)

    def add(self, op: ops.Op, on_result: OnResult = expect_ok) -> None:
        self._queued.append((op, on_result))

    def holds(self, *kinds: type) -> bool:
        return any(isinstance(op, kinds) for op, _ in self._queued)

    def sent(self, *kinds: type) -> bool:
        """Whether the batch in flight has such an op."""
        return self.in_flight is not None and any(
            isinstance(op, kinds) for op in self.in_flight.ops
        )

    def retract(self, matches: Callable[[ops.Op], bool]) -> None:
        """Take back queued ops that were not sent."""
        self._queued = [entry for entry in self._queued if not matches(entry[0])]

    def news(self, acknowledged_step: int) -> bool:
        """Whether the memory service has yet to hear of this acknowledgement."""
        return acknowledged_step > self._sent_acknowledged_step

    def send(self, step_id: int, acknowledged_step: int, *, prepares_step: bool) -> ops.Batch:
        """Turn everything queued into the batch in flight, arrivals beyond its size excepted."""
        assert self.in_flight is None
        queued, self._queued = _split(self._queued)
        self._awaiting = [on_result for _, on_result in queued]
        self._sent_acknowledged_step = acknowledged_step
        self.in_flight = ops.Batch(
            self.next_batch_seq,
            step_id,
            acknowledged_step,
            tuple(op for op, _ in queued),
            prepares_step,
        )
        self.next_batch_seq += 1
        return self.in_flight

    def settle(self, result: ops.BatchResult) -> None:
        """The batch in flight was applied: tell everyone how their op went."""
        assert self.in_flight is not None
        assert result.batch_seq == self.in_flight.batch_seq
        awaiting, self._awaiting, self.in_flight = self._awaiting, [], None
        for on_result, op_result in zip(awaiting, result.results, strict=True):
            on_result(op_result)


def _split(
    queued: list[tuple[ops.Op, OnResult]],
) -> tuple[list[tuple[ops.Op, OnResult]], list[tuple[ops.Op, OnResult]]]:
    """What fits one batch, and the arrivals that come with a later one. Always one arrives."""
    sent, left = [], []
    num_arrivals, num_tokens = 0, 0
    for entry in queued:
        op = entry[0]
        if isinstance(op, ops.Arrive):
            num_arrivals += 1
            num_tokens += len(op.request.prompt_token_ids)
            too_many = num_tokens > MAX_ARRIVING_TOKENS or num_arrivals > MAX_ARRIVALS
            if too_many and num_arrivals > 1:
                left.append(entry)
                continue
        sent.append(entry)
    return sent, left
