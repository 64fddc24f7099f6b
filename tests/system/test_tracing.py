"""Spans of one request across the three services, collected over real OTLP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from octavo import AsyncClient, SamplingParams
from octavo.cli.collector import Collector
from octavo.cli.trace_tree import Span
from tests.system.models import TINY_WORKER
from tests.system.requests import greedy, token_prompt
from tests.system.stack import PATIENCE_S, Stack

SERVICES = ("octavo-scheduler", "octavo-kvmem", "octavo-worker")
BOTH = ("one", "two")


@pytest.fixture(scope="module")
def client_spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def spans(tiny_model: Path, client_spans: InMemorySpanExporter) -> list[Span]:
    """What two requests at once, one with four candidates and one that its caller left have
    left with a collector."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(client_spans))
    return asyncio.run(collect(tiny_model, provider.get_tracer("test")))


async def collect(tiny_model: Path, tracer: Tracer) -> list[Span]:
    collector = Collector()
    await collector.start()
    stack = Stack(
        model=tiny_model,
        num_blocks=200,
        worker=TINY_WORKER,
        environment=collector.environment(),
    )
    try:
        await asyncio.to_thread(stack.__enter__)
        async with AsyncClient(stack.address, tracer=tracer) as client:
            prompt = token_prompt(100)
            await asyncio.gather(
                *(client.generate(prompt, greedy(60), request_id=name) for name in BOTH)
            )
            four = SamplingParams(n=4, seed=1, max_tokens=30, ignore_eos=True)
            await client.generate(prompt, four, request_id="four")
            async with client.stream(prompt, greedy(300), request_id="left") as chunks:
                await anext(chunks)
                await anext(chunks)
        await asyncio.to_thread(stack.wait_until_empty)

        def all_there(spans: list[Span]) -> bool:
            ended = [span for span in spans if span.name == "scheduler.generate"]
            return len(ended) == 4 and {span.service for span in spans} == {*SERVICES}

        await collector.wait_until_quiet(all_there, quiet_s=2, timeout_s=PATIENCE_S)
        assert collector.num_dropped == 0
        return list(collector.spans)
    finally:
        await asyncio.to_thread(stack.stop)
        await collector.stop()


def root_of(spans: list[Span], request_id: str) -> Span:
    (root,) = (
        span
        for span in spans
        if span.name == "scheduler.generate" and span.attributes["octavo.request_id"] == request_id
    )
    return root


def trace_of(spans: list[Span], request_id: str) -> list[Span]:
    trace_id = root_of(spans, request_id).trace_id
    return [span for span in spans if span.trace_id == trace_id]


@pytest.mark.parametrize("request_id", [*BOTH, "four", "left"])
def test_one_requests_trace_has_spans_of_all_three(spans: list[Span], request_id: str) -> None:
    trace = trace_of(spans, request_id)
    assert {span.service for span in trace} == {*SERVICES}
    names = {span.name for span in trace}
    assert names >= {"scheduler.generate", "kvmem.arrive", "kvmem.admit", "kvmem.free"}
    assert "worker.prefill" in names
    # One tree: everything hangs below the request's own span, which hangs below the client's.
    known = {span.span_id for span in trace}
    root = root_of(spans, request_id)
    assert root.parent_id
    assert root.parent_id not in known
    assert {span.parent_id for span in trace if span is not root} <= known


def test_the_phases_of_a_request_follow_one_another(spans: list[Span]) -> None:
    trace = {span.name: span for span in trace_of(spans, "one")}
    queue, prefill, decode = (
        trace[f"scheduler.{phase}"] for phase in ("queue", "prefill", "decode")
    )
    assert queue.start_ns <= queue.end_ns <= prefill.start_ns
    assert prefill.start_ns < prefill.end_ns <= decode.start_ns < decode.end_ns


def test_the_fork_and_its_copies_are_in_the_requests_trace(spans: list[Span]) -> None:
    names = [span.name for span in trace_of(spans, "four")]
    assert names.count("kvmem.fork") == 1
    assert "kvmem.copy_on_write" in names
    assert "kvmem.fork" not in [span.name for span in trace_of(spans, "one")]


def test_a_request_that_was_left_says_so(spans: list[Span]) -> None:
    assert root_of(spans, "left").attributes["octavo.aborted"] is True
    assert root_of(spans, "one").attributes["octavo.aborted"] is False
    (freed,) = (span for span in trace_of(spans, "left") if span.name == "kvmem.free")
    assert freed.attributes["octavo.finish_reason"] == "ABORT"


def test_a_step_that_served_two_requests_links_to_both(spans: list[Span]) -> None:
    traces = {name: root_of(spans, name).trace_id for name in BOTH}
    steps = [span for span in spans if span.name == "scheduler.step"]
    shared = [step for step in steps if {*step.links} == {*traces.values()}]
    # Sixty tokens each, side by side but for the first steps.
    assert len(shared) > 20
    assert all(step.attributes["octavo.num_sequences"] == 2 for step in shared)
    # What a step made the others do is in its own trace. (Its commit may be in the next one's, when
    # that came back before the commit could leave.)
    below = [{(s.service, s.name) for s in spans if s.trace_id == step.trace_id} for step in shared]
    assert all(("octavo-worker", "worker.execute") in names for names in below)
    assert sum(("octavo-kvmem", "kvmem.apply") in names for names in below) > len(shared) // 2


def test_the_clients_span_is_the_parent(
    spans: list[Span], client_spans: InMemorySpanExporter
) -> None:
    ids = {
        (span.attributes or {})["octavo.request_id"]: span.get_span_context()
        for span in client_spans.get_finished_spans()
    }
    for name in BOTH:
        root, context = root_of(spans, name), ids[name]
        assert context is not None
        assert root.trace_id == f"{context.trace_id:032x}"
        assert root.parent_id == f"{context.span_id:016x}"
