"""Spans of a step: in the step's own trace, and a prefill in its request's."""

from __future__ import annotations

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from model_worker.step import SequenceStart, StepInput, StepOutput, StepTimings
from model_worker.tracing import record_step
from octavo.service.telemetry import Telemetry, disabled

STEP = "00-11111111111111111111111111111111-2222222222222222-01"
REQUEST = "00-33333333333333333333333333333333-4444444444444444-01"


def recorded(step: StepInput) -> dict[str, ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    timings = StepTimings(
        gap_us=9, idle_us=7, prepare_us=10, copy_us=4, forward_us=200, sample_us=30
    )
    empty = np.empty(0, np.int32)
    output = StepOutput(step.step_id, 1_000_000, empty, np.empty(0, np.float32), timings)
    record_step(Telemetry(provider.get_tracer("t"), enabled=True), step, output)
    record_step(disabled(), step, output)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert len(spans) == len(exporter.get_finished_spans())
    return spans


def step(**changes) -> StepInput:
    return StepInput(
        step_id=5,
        sequence_ids=np.array([8, 9], np.uint64),
        num_input_tokens=np.array([1, 6], np.int32),
        num_computed_tokens=np.array([3, 2], np.int32),
        input_token_ids=np.zeros(7, np.int32),
        **changes,
    )


def start(sequence_id: int, traceparent: str = REQUEST) -> SequenceStart:
    return SequenceStart(
        sequence_id, np.zeros(1, np.int32), 1, traceparent=traceparent, request_id="r-1"
    )


def context(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    return span.context


def extent(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_step_and_its_parts():
    copies = np.array([1, 2], np.int32)
    spans = recorded(
        step(
            traceparent=STEP,
            copy_src_block_ids=copies,
            copy_dst_block_ids=copies + 2,
            swap_out_block_ids=copies[:1],
            swap_out_host_block_ids=copies[:1],
        )
    )
    assert spans.keys() == {"worker.execute", "worker.copies", "worker.forward", "worker.sample"}
    whole = spans["worker.execute"]
    assert context(whole).trace_id == int("1" * 32, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int("2" * 16, 16)
    assert dict(whole.attributes or {}) == {
        "step_id": 5,
        "num_sequences": 2,
        "num_tokens": 7,
        "gap_us": 9,
        "idle_us": 7,
        "forward_us": 200,
        "sample_us": 30,
    }
    for name in spans.keys() - {"worker.execute"}:
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == context(whole).span_id
    assert extent(whole) == (1_000_000, 1_240_000)
    assert extent(spans["worker.copies"]) == (1_006_000, 1_010_000)
    assert dict(spans["worker.copies"].attributes or {}) == {
        "num_blocks": 2,
        "num_swapped_in_blocks": 0,
        "num_swapped_out_blocks": 1,
    }
    assert extent(spans["worker.forward"]) == (1_010_000, 1_210_000)
    assert extent(spans["worker.sample"]) == (1_210_000, 1_240_000)


def test_a_prefill_is_recorded_in_its_requests_trace_and_linked_to_the_step():
    spans = recorded(step(traceparent=STEP, starts=(start(9), start(8, ""), start(77))))
    prefill = spans["worker.prefill"]
    assert context(prefill).trace_id == int("3" * 32, 16)
    assert dict(prefill.attributes or {}) == {
        "request_id": "r-1",
        "sequence_id": 9,
        "step_id": 5,
        "num_tokens": 6,
        "num_computed_tokens": 2,
    }
    assert [link.context.span_id for link in prefill.links] == [
        context(spans["worker.execute"]).span_id
    ]


def test_a_step_nobody_traces_records_nothing():
    assert recorded(step(starts=(start(8, ""),))) == {}
