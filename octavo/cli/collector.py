"""An OpenTelemetry collector in this process: a real OTLP/gRPC trace service on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from octavo.cli.trace_tree import Span

MAX_SPANS = 100_000
EXPORTER_DELAY_MS = 200


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span it is sent, up to MAX_SPANS; num_dropped counts those beyond."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_dropped = 0
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = 0

    async def start(self) -> None:
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=0)

    def environment(self) -> dict[str, str]:
        """What makes a process with an OTLP exporter send its spans here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_BSP_SCHEDULE_DELAY": str(EXPORTER_DELAY_MS),
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_METRICS_EXPORTER": "none",
            # A proxy configured for the outside has no business between us.
            "no_grpc_proxy": "127.0.0.1",
        }

    async def wait_until_quiet(
        self, condition: Callable[[list[Span]], bool], *, quiet_s: float, timeout_s: float
    ) -> None:
        """Wait until the spans meet `condition` and no more have come for quiet_s seconds, or
        until timeout_s have passed: what is missing then will not come."""
        deadline_s = time.monotonic() + timeout_s
        num_spans, unchanged_since_s = -1, time.monotonic()
        while (now_s := time.monotonic()) < deadline_s:
            if len(self.spans) != num_spans:
                num_spans, unchanged_since_s = len(self.spans), now_s
            elif now_s - unchanged_since_s >= quiet_s and condition(self.spans):
                return
            await asyncio.sleep(0.05)

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: Any,  # noqa: ARG002
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            attributes = _attributes(resource_spans.resource.attributes)
            service = str(attributes.get("service.name", "unknown"))
            for scope_spans in resource_spans.scope_spans:
                self._keep(service, scope_spans.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def _keep(self, service: str, spans: Any) -> None:
        room = MAX_SPANS - len(self.spans)
        self.num_dropped += max(0, len(spans) - room)
        self.spans.extend(_read(service, span) for span in spans[:room])


def _read(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        links=tuple(link.trace_id.hex() for link in span.links),
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, object]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "", None) for pair in pairs
    }
