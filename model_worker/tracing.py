"""Spans of a step, recorded after its reply is on its way."""

from __future__ import annotations

from model_worker.step import StepInput, StepOutput
from octavo.service.telemetry import Telemetry, traceparent


def record_step(telemetry: Telemetry, step: StepInput, output: StepOutput) -> None:
    """Record the step's spans in its own trace, and each new sequence's in its request's."""
    if not telemetry.enabled:
        return
    timings, started = output.timings, output.started_unix_ns
    prepared = started + timings.prepare_us * 1000
    forwarded = prepared + timings.forward_us * 1000
    ended = forwarded + timings.sample_us * 1000
    parent = step.traceparent
    if parent:
        span = telemetry.start(
            "worker.execute",
            parent=parent,
            start_ns=started,
            attributes={
                "step_id": step.step_id,
                "num_sequences": int(step.sequence_ids.size),
                "num_tokens": int(step.input_token_ids.size),
                "gap_us": timings.gap_us,
                "idle_us": timings.idle_us,
                "forward_us": timings.forward_us,
                "sample_us": timings.sample_us,
            },
        )
        parent = traceparent(span)
        moved = {
            "num_blocks": int(step.copy_src_block_ids.size),
            "num_swapped_in_blocks": int(step.swap_in_block_ids.size),
            "num_swapped_out_blocks": int(step.swap_out_block_ids.size),
        }
        if any(moved.values()):
            telemetry.record(
                "worker.copies",
                (prepared - timings.copy_us * 1000, prepared),
                parent=parent,
                attributes=moved,
            )
        telemetry.record("worker.forward", (prepared, forwarded), parent=parent)
        telemetry.record("worker.sample", (forwarded, ended), parent=parent)
        span.end(ended)
    _record_starts(telemetry, step, (started, ended), parent)


def _record_starts(
    telemetry: Telemetry, step: StepInput, span_ns: tuple[int, int], step_span: str
) -> None:
    rows = {sequence_id: row for row, sequence_id in enumerate(step.sequence_ids.tolist())}
    for start in step.starts:
        row = rows.get(start.sequence_id)
        if row is None or not start.traceparent:
            continue
        telemetry.record(
            "worker.prefill",
            span_ns,
            parent=start.traceparent,
            links=[step_span] if step_span else [],
            attributes={
                "request_id": start.request_id,
                "sequence_id": start.sequence_id,
                "step_id": step.step_id,
                "num_tokens": int(step.num_input_tokens[row]),
                "num_computed_tokens": int(step.num_computed_tokens[row]),
            },
        )
