"""What callers may be told, and what they have been told.

A token, and the end of a candidate, may be shown once the memory service has acknowledged it.
Each attached caller hears of each exactly once, in order, from where it says it is: so whoever
comes back after a death, here or at another scheduler, goes on where its stream broke.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_svc.core import events
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup


class Recipient:
    """What one attached caller has of each candidate."""

    def __init__(self, received: Mapping[int, events.Received]) -> None:
        self._num_tokens = {index: len(had.token_ids) for index, had in received.items()}
        self._ended = {index for index, had in received.items() if had.finish_reason is not None}
        self._was_told = False

    def news(self, group: SequenceGroup) -> tuple[events.CandidateDelta, ...]:
        """What may be shown and was not; it counts as told from now on."""
        deltas = [
            self._delta(sequence)
            for sequence in group.sequences
            if sequence.candidate not in self._ended
        ]
        deltas += [self._unborn(group, index) for index in sorted(_unborn(group) - self._ended)]
        return tuple([delta for delta in deltas if delta is not None])

    def num_cached_tokens(self, group: SequenceGroup) -> int | None:
        """To be told with the first news, and never again."""
        if self._was_told or group.num_cached_tokens is None:
            return None
        self._was_told = True
        # One that was entered with its output may have found the KV of that as well.
        return min(group.num_cached_tokens, len(group.request.prompt_token_ids))

    def has_everything(self, group: SequenceGroup) -> bool:
        """Whether the end of every candidate has been told."""
        if group.status is not GroupStatus.FINISHED:
            return False
        candidates = {sequence.candidate for sequence in group.sequences} | _unborn(group)
        return candidates <= self._ended

    def _unborn(self, group: SequenceGroup, index: int) -> events.CandidateDelta | None:
        """The end of a candidate that never was a sequence: that of the first one."""
        first = group.sequences[0]
        if not first.end_committed:
            return None
        self._ended.add(index)
        return events.CandidateDelta(index, "", (), 0.0, first.finish_reason)

    def _delta(self, sequence: Sequence) -> events.CandidateDelta | None:
        start = self._num_tokens.get(sequence.candidate, 0)
        end = sequence.num_committed_tokens
        ends = sequence.finished and sequence.end_committed
        if start >= end and not ends:
            return None
        self._num_tokens[sequence.candidate] = max(start, end)
        text = "".join(sequence.pieces[start:end])
        if ends:
            self._ended.add(sequence.candidate)
            text += sequence.tail
        return events.CandidateDelta(
            sequence.candidate,
            text,
            tuple(sequence.output_token_ids[start:end]),
            sequence.committed_logprob,
            sequence.finish_reason if ends else None,
            sequence.matched_stop if ends else None,
            start,
        )


def _unborn(group: SequenceGroup) -> set[int]:
    """Candidates which the group would have had, if it had not ended before its first token."""
    if group.status is not GroupStatus.FINISHED or len(group.sequences) != 1:
        return set()
    if group.sequences[0].output_token_ids:
        return set()
    return set(range(1, group.request.params.n))


class Recipients:
    """The callers of all requests, by request id, and the groups they are to hear of."""

    def __init__(self) -> None:
        self._by_request: dict[str, Recipient] = {}
        self._dirty: dict[str, SequenceGroup] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def attach(self, request_id: str, received: Mapping[int, events.Received]) -> None:
        """From now on this caller is told, and whoever was before it is not."""
        self._by_request[request_id] = Recipient(received)

    def detach(self, request_id: str) -> None:
        """Nobody is told any more."""
        self._by_request.pop(request_id, None)
        self._dirty.pop(request_id, None)

    def note(self, group: SequenceGroup) -> None:
        """There may be news of the group."""
        self._dirty[group.request.request_id] = group

    def collect(self) -> list[events.Emit]:
        """The news of all groups noted since the last time, one Emit a request."""
        dirty, self._dirty = self._dirty, {}
        emits = (self._emit(group) for group in dirty.values())
        return [emit for emit in emits if emit is not None]

    def _emit(self, group: SequenceGroup) -> events.Emit | None:
        recipient = self._by_request.get(group.request.request_id)
        if recipient is None:
            return None
        deltas = recipient.news(group)
        complete = recipient.has_everything(group)
        if not (deltas or complete):
            return None
        return events.Emit(
            group.request.request_id,
            deltas,
            _times_of(group) if complete else None,
            recipient.num_cached_tokens(group),
        )


def _times_of(group: SequenceGroup) -> events.RequestTimes:
    return events.RequestTimes(
        group.arrived_at_s,
        group.first_scheduled_at_s,
        group.first_token_at_s,
        group.num_preemptions,
    )
