"""The client's span, and what goes to the server as `traceparent`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import octavo
from octavo.service.errors import ServiceError
from octavo.service.telemetry import span_context_of
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Hang, ScriptedPeer, accepted, delta

STOP = types_pb2.FINISH_REASON_STOP
DONE = [accepted("r1", num_prompt_tokens=7), delta(0, "x", 1, 2, finish_reason=STOP)]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_without_tracing_nothing_is_sent(client: Any, peer: ScriptedPeer) -> None:
    peer.script = list(DONE)
    client.generate("p")
    assert "traceparent" not in peer.calls[0].metadata


def test_the_span_is_the_parent_that_the_server_is_told(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
) -> None:
    peer.script = list(DONE)
    tracer = provider.get_tracer("test")
    with (
        client_class(address, tracer=tracer) as client,
        tracer.start_as_current_span("caller") as caller,
    ):
        client.chat("p", request_id="mine")
    span = next(s for s in exporter.get_finished_spans() if s.name == "octavo.generate")
    sent = span_context_of(str(peer.calls[0].metadata["traceparent"]))
    context = span.get_span_context()
    assert context is not None
    assert (sent.trace_id, sent.span_id) == (context.trace_id, context.span_id)
    assert sent.trace_flags.sampled
    assert span.parent is not None
    assert span.parent.span_id == caller.get_span_context().span_id
    assert span.kind is SpanKind.CLIENT
    attributes = dict(span.attributes or {})
    assert attributes["octavo.request_id"] == "mine"
    assert attributes["octavo.num_prompt_tokens"] == 7
    assert attributes["octavo.num_output_tokens"] == 2


def test_a_failed_request_fails_its_span(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
) -> None:
    peer.script = [ServiceError("QUEUE_FULL", "full")]
    with (
        client_class(address, tracer=provider.get_tracer("test")) as client,
        pytest.raises(octavo.OverloadedError),
    ):
        client.generate("p")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "QUEUE_FULL"


def test_a_stream_left_early_ends_its_span_as_cancelled(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
) -> None:
    peer.script = [accepted(), Hang()]
    with (
        client_class(address, tracer=provider.get_tracer("test")) as client,
        client.stream("p") as chunks,
    ):
        next(chunks)
        assert exporter.get_finished_spans() == ()
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {})["octavo.cancelled"] is True


def test_all_streams_of_a_request_are_one_span(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
) -> None:
    peer.earlier = [[accepted(), ServiceError("KVMEM_LOST", "gone")]]
    peer.script = list(DONE)
    with client_class(address, tracer=provider.get_tracer("test")) as client:
        client.generate("p")
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {})["octavo.num_reconnects"] == 1
    assert span.status.status_code is StatusCode.UNSET
    assert len(peer.calls) == 2
    assert len({call.metadata["traceparent"] for call in peer.calls}) == 1


def test_a_context_that_passes_through_is_handed_on(client: Any, peer: ScriptedPeer) -> None:
    peer.script = list(DONE)
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    with trace.use_span(trace.NonRecordingSpan(span_context_of(parent))):
        client.generate("p")
    assert peer.calls[0].metadata["traceparent"] == parent


GLOBAL_PROVIDER_SCRIPT = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from octavo import Client
client = Client(sys.argv[1])
trace.set_tracer_provider(TracerProvider())
client.generate("p")
"""


def test_the_global_provider_is_used_without_being_told(peer: ScriptedPeer, address: str) -> None:
    # In a process of its own: a global provider can be set once and never taken back.
    peer.script = list(DONE)
    subprocess.run([sys.executable, "-c", GLOBAL_PROVIDER_SCRIPT, address], check=True, timeout=60)
    assert str(peer.calls[0].metadata["traceparent"]).startswith("00-")
