"""Arrive: a request's record enters, with the sequences it begins with.

A new request has one candidate without output. One that another life of the memory service knew
comes with all its candidates and what they had; those that have ended never get a row.
"""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.errors import OpMistake
from kvmem_svc.core.limits import ARRIVE_RANGES
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import SequenceTable
from kvmem_svc.core.tokens import check_state, check_token_ids


def plan_arrival(table: SequenceTable, op: b.Arrive) -> int:
    """Check an Arrive; how many rows it needs. Raises OpMistake."""
    _check_record(op)
    longest = table.max_model_len
    num_tokens = op.prompt_token_ids.size
    if not 1 <= num_tokens <= longest:
        raise _mistake(f"the prompt has {num_tokens} tokens, it must have 1 .. {longest}")
    check_token_ids(op.prompt_token_ids)
    numbers: set[int] = set()
    for one in op.candidates:
        _check_candidate(op, one, longest)
        if one.candidate in numbers:
            raise _mistake(f"candidate {one.candidate} is named twice")
        numbers.add(one.candidate)
    return sum(map(_is_live, op.candidates)) if op.candidates else 1


def commit_arrival(table: SequenceTable, record: RequestRecord, op: b.Arrive) -> list[int]:
    """Create the sequences of a planned Arrive; their ids, in the order of its candidates."""
    candidates = op.candidates or (b.ArrivingCandidate(0, b.NO_INT32),)
    return [_create(table, record, op.prompt_token_ids, one) for one in candidates]


def _create(
    table: SequenceTable, record: RequestRecord, prompt: b.Column, one: b.ArrivingCandidate
) -> int:
    tokens = np.concatenate((prompt, one.output_token_ids), dtype=np.int32)
    if _is_live(one):
        row = table.create(record, one.candidate, tokens)
        table.set_state(row, one.scheduler_state)
        return table.id_of(row)
    finished = FinishedSequence(
        table.finished_id(),
        record.request_id,
        one.candidate,
        tokens,
        record.num_prompt_tokens,
        num_computed_tokens=0,
        table_version=0,
        finish_reason=b.FinishReason(one.finish_reason),
        scheduler_state=one.scheduler_state,
    )
    record.finished[one.candidate] = finished
    table.finished[finished.sequence_id] = finished
    return finished.sequence_id


def _is_live(one: b.ArrivingCandidate) -> bool:
    return one.finish_reason == b.FinishReason.UNSPECIFIED


def _check_record(op: b.Arrive) -> None:
    sizes = {
        "request_id_bytes": len(op.request_id.encode()),
        "tenant_bytes": len(op.tenant.encode()),
        "request_spec_bytes": len(op.request_spec),
        "request_digest_bytes": len(op.request_digest),
        "cache_salt_bytes": len(op.cache_salt.encode()),
        "num_candidates": op.num_candidates,
    }
    for name, size in sizes.items():
        if size not in ARRIVE_RANGES[name]:
            raise _mistake(f"{name} is {size}, it must be {ARRIVE_RANGES[name]}")


def _check_candidate(op: b.Arrive, one: b.ArrivingCandidate, longest: int) -> None:
    if not 0 <= one.candidate < op.num_candidates:
        raise _mistake(f"candidate {one.candidate} is not in 0 .. {op.num_candidates - 1}")
    who = f"candidate {one.candidate}"
    num_tokens = op.prompt_token_ids.size + one.output_token_ids.size
    if num_tokens > longest + 1:
        raise _mistake(f"{who} has {num_tokens} tokens, at most {longest + 1} are possible")
    check_token_ids(one.output_token_ids)
    if one.finish_reason not in b.FINISH_REASONS:
        raise _mistake(f"{who}: there is no finish_reason {one.finish_reason}")
    check_state(one.scheduler_state, f"arrive: scheduler_state of {who}")


def _mistake(what: str) -> OpMistake:
    return OpMistake(OpStatus.INVALID_ARGUMENT, f"arrive: {what}")
