"""Read-only views of sequences, for tools and watchers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvmem_svc.core.batch import NO_INT32, Column, FinishReason
from kvmem_svc.core.errors import UnknownRequest, UnknownSequence
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import ROW_MASK, SequenceTable, Status

# Table entries that one answer may hold: it must fit a message.
MAX_VIEWED_BLOCKS = 512 * 1024


@dataclass(frozen=True, slots=True)
class SequenceView:
    """block_ids and ref_counts: int32[table_len], empty unless RUNNING."""

    sequence_id: int
    request_id: str
    candidate: int
    status: Status
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    table_version: int
    block_ids: Column
    ref_counts: Column
    finish_reason: FinishReason


def sequence_view(manager: BlockManager, sequence_id: int) -> SequenceView:
    """Raises UnknownSequence."""
    table = manager.sequences
    finished = table.finished.get(sequence_id)
    if finished is not None:
        return SequenceView(
            sequence_id,
            finished.request_id,
            finished.candidate,
            Status.FINISHED,
            finished.token_ids.size,
            finished.num_computed_tokens,
            finished.num_prompt_tokens,
            finished.table_version,
            NO_INT32,
            NO_INT32,
            finished.finish_reason,
        )
    if not table.is_live(sequence_id):
        raise UnknownSequence(f"there is no sequence {sequence_id}")
    row = sequence_id & ROW_MASK
    blocks = table.table(row)
    return SequenceView(
        sequence_id,
        table.record_of(row).request_id,
        int(table.candidate[row]),
        table.status_of(row),
        int(table.length[row]),
        int(table.num_computed[row]),
        int(table.num_prompt_tokens[row]),
        int(table.table_version[row]),
        blocks,
        manager.pool.ref_counts[blocks],
        FinishReason.UNSPECIFIED,
    )


def sequence_views(
    manager: BlockManager, sequence_ids: list[int], request_id: str, max_sequences: int
) -> tuple[list[SequenceView], bool]:
    """The named sequences, a request's, or all in order of arrival; and whether some are
    missing, because there are more than `max_sequences` or a message could not hold them.

    Raises UnknownSequence, UnknownRequest.
    """
    if not sequence_ids and request_id and request_id not in manager.requests:
        raise UnknownRequest(f"there is no request {request_id!r}")
    views: list[SequenceView] = []
    num_blocks = 0
    for sequence_id in sequence_ids or _sequence_ids(manager, request_id):
        view = sequence_view(manager, sequence_id)
        num_blocks += view.block_ids.size
        if len(views) == max_sequences or num_blocks > MAX_VIEWED_BLOCKS:
            return views, True
        views.append(view)
    return views, False


def _sequence_ids(manager: BlockManager, request_id: str) -> Iterator[int]:
    records = [manager.requests[request_id]] if request_id else manager.requests.values()
    for record in records:
        yield from sequence_ids_of(record)


def sequence_ids_of(record: RequestRecord) -> list[int]:
    """Ids of a request's sequences, live ones first."""
    return [*record.live.values(), *(f.sequence_id for f in record.finished.values())]


@dataclass(frozen=True, slots=True)
class SequenceSummary:
    """A sequence without its table. num_shared_blocks: those with ref_count >= 2."""

    sequence_id: int
    request_id: str
    arrival_number: int
    candidate: int
    tenant: str
    status: Status
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_shared_blocks: int
    num_host_blocks: int
    finish_reason: FinishReason


def sequence_summaries(
    manager: BlockManager, after_sequence_id: int, page_size: int
) -> tuple[list[SequenceSummary], bool]:
    """The first `page_size` sequences above `after_sequence_id`, in order of their ids, and
    whether there are more."""
    table = manager.sequences
    live = table.live_ids[table.live_ids > after_sequence_id].tolist()
    finished = [i for i in table.finished if i > after_sequence_id]
    page = heapq.nsmallest(page_size + 1, [*live, *finished])
    return [_summary(manager, i) for i in page[:page_size]], len(page) > page_size


def _summary(manager: BlockManager, sequence_id: int) -> SequenceSummary:
    view = sequence_view(manager, sequence_id)
    record = manager.requests[view.request_id]
    is_live = view.status is not Status.FINISHED
    return SequenceSummary(
        sequence_id,
        view.request_id,
        record.arrival_number,
        view.candidate,
        record.tenant,
        view.status,
        view.num_prompt_tokens,
        view.num_tokens,
        view.num_computed_tokens,
        view.block_ids.size,
        int((view.ref_counts >= 2).sum()),
        manager.sequences.num_host_blocks(sequence_id & ROW_MASK) if is_live else 0,
        view.finish_reason,
    )


def request_id_of(manager: BlockManager, sequence_id: int) -> str | None:
    """The request of a live or finished sequence; None when there is no such sequence."""
    table = manager.sequences
    if sequence_id in table.finished:
        return table.finished[sequence_id].request_id
    if table.is_live(sequence_id):
        return table.record_of(sequence_id & ROW_MASK).request_id
    return None


@dataclass(frozen=True, slots=True)
class AdoptedSequence:
    """output_token_ids: int32, without the prompt. block_ids: int32, empty unless RUNNING."""

    sequence_id: int
    candidate: int
    status: Status
    output_token_ids: Column
    num_computed_tokens: int
    block_ids: Column
    table_version: int
    finish_reason: FinishReason
    scheduler_state: bytes


@dataclass(frozen=True, slots=True)
class AdoptedRequest:
    """Everything there is of a request. prompt_token_ids: int32. sequences: live ones first; one
    that finished without a reason was pruned."""

    request_id: str
    arrival_number: int
    num_candidates: int
    prompt_token_ids: Column
    tenant: str
    request_spec: bytes
    request_digest: bytes
    cache_salt: str
    sequences: tuple[AdoptedSequence, ...]


def adopted_requests(manager: BlockManager) -> list[AdoptedRequest]:
    """All requests as they are now, in order of arrival; nothing in it is shared with the state."""
    return [_adopted_request(manager, record) for record in manager.requests.values()]


def _adopted_request(manager: BlockManager, record: RequestRecord) -> AdoptedRequest:
    table = manager.sequences
    live = [_adopted_live(table, i & ROW_MASK) for i in record.live.values()]
    finished = [_adopted_finished(one) for one in record.finished.values()]
    if live:
        row = next(iter(record.live.values())) & ROW_MASK
        prompt = table.tokens[row, : record.num_prompt_tokens].copy()
    else:
        prompt = next(iter(record.finished.values())).token_ids[: record.num_prompt_tokens]
    return AdoptedRequest(
        record.request_id,
        record.arrival_number,
        record.num_candidates,
        prompt,
        record.tenant,
        record.request_spec,
        record.request_digest,
        record.cache_salt,
        (*live, *finished),
    )


def _adopted_live(table: SequenceTable, row: int) -> AdoptedSequence:
    return AdoptedSequence(
        table.id_of(row),
        int(table.candidate[row]),
        table.status_of(row),
        table.tokens[row, table.num_prompt_tokens[row] : table.length[row]].copy(),
        int(table.num_computed[row]),
        table.table(row),
        int(table.table_version[row]),
        FinishReason.UNSPECIFIED,
        table.scheduler_state(row),
    )


def _adopted_finished(finished: FinishedSequence) -> AdoptedSequence:
    return AdoptedSequence(
        finished.sequence_id,
        finished.candidate,
        Status.FINISHED,
        finished.token_ids[finished.num_prompt_tokens :],
        finished.num_computed_tokens,
        NO_INT32,
        finished.table_version,
        finished.finish_reason,
        finished.scheduler_state,
    )
