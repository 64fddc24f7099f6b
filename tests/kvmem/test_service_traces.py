"""The spans a real process exports, as a collector receives them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from octavo.v1 import kvmem_pb2 as pb
from tests.kvmem.process import DEADLINE_S, Client, admit, arrive, free, kvmem_process

REQUEST_TRACE, STEP_TRACE = "a" * 32, "b" * 32
REQUEST_PARENT, STEP_PARENT = (f"00-{trace}-{'1' * 16}-01" for trace in (REQUEST_TRACE, STEP_TRACE))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: queue.SimpleQueue[Span] = queue.SimpleQueue()

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def received(self, count: int) -> list[Span]:
        return [self.spans.get(timeout=DEADLINE_S) for _ in range(count)]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait(DEADLINE_S)


def attributes(span: Span) -> dict[str, object]:
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }


def test_steps_and_requests_are_traced_each_in_their_own_trace(
    tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    servicer, endpoint = collector
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with kvmem_process(tmp_path, environment=environment) as (address, _):
        client = Client(address)
        client.open()
        client.attach()
        arrived = client.apply(arrive("r", 6, traceparent=REQUEST_PARENT), traceparent=STEP_PARENT)
        parent = arrived.results[0].arrived.sequence_id
        client.apply(admit(parent, 6))
        fork = pb.Op(fork=pb.Fork(sequence_id=parent, num_children=1))
        [child] = client.apply(fork).results[0].forked.child_sequence_ids
        append = pb.Op(append=pb.Append(sequence_id=child, token_ids=[7]))
        client.apply(append, traceparent=STEP_PARENT)
        client.apply(free(parent, child), pb.Op(confirm=pb.Confirm(request_id="r")))
        client.apply(arrive("r", 6), traceparent="")  # untraced: nothing of it is exported
        client.apply(arrive("s", 6, traceparent=REQUEST_PARENT))
        spans = servicer.received(8)
    in_request = [s for s in spans if s.trace_id.hex() == REQUEST_TRACE]
    assert [s.name for s in in_request] == [
        "kvmem.arrive",
        "kvmem.admit",
        "kvmem.fork",
        "kvmem.copy_on_write",
        "kvmem.free",
        "kvmem.arrive",
    ]
    assert {s.parent_span_id.hex() for s in in_request} == {"1" * 16}
    assert attributes(in_request[2])["octavo.num_children"] == 1
    assert attributes(in_request[3])["octavo.num_copied_blocks"] == 1
    assert attributes(in_request[4])["octavo.finish_reason"] == "STOP"
    first, second = [s for s in spans if s.trace_id.hex() == STEP_TRACE]
    assert first.name == second.name == "kvmem.apply"
    assert attributes(second) == {
        "octavo.step_id": 1,
        "octavo.batch_seq": 4,
        "octavo.num_ops": 1,
        "octavo.num_allocated_blocks": 1,
        "octavo.num_freed_blocks": 0,
        "octavo.num_copied_blocks": 1,
        "octavo.num_swapped_in_blocks": 0,
        "octavo.num_swapped_out_blocks": 0,
        "octavo.num_free_blocks": 5,
        "octavo.num_in_use_blocks": 3,
        "octavo.num_quarantined_blocks": 0,
    }
    assert first.end_time_unix_nano >= first.start_time_unix_nano
