"""The client's part of a trace: one span a request, its context sent as `traceparent`.

With no tracer given and no OpenTelemetry SDK set up in the process nothing is recorded; a
context that merely passes through is handed on.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from octavo.errors import OctavoError
from octavo.service.telemetry import traceparent

SPAN_NAME = "octavo.generate"
METADATA_KEY = "traceparent"


class RequestSpan:
    """The span of one request, open until `end`; `metadata` is what goes with the call."""

    def __init__(self, span: trace.Span, *, owned: bool) -> None:
        self._span = span
        self._owned = owned
        context = traceparent(span)
        self.metadata = ((METADATA_KEY, context),) if context else ()

    def end(
        self,
        error: OctavoError | None,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_reconnects: int = 0,
        cancelled: bool = False,
    ) -> None:
        """Close the span, if it is ours, with what became of the request."""
        if not self._owned:
            return
        self._span.set_attribute("octavo.num_prompt_tokens", num_prompt_tokens)
        self._span.set_attribute("octavo.num_output_tokens", num_output_tokens)
        if num_reconnects:
            self._span.set_attribute("octavo.num_reconnects", num_reconnects)
        if cancelled:
            self._span.set_attribute("octavo.cancelled", True)
        if error is not None:
            self._span.set_attribute("error.type", error.reason)
            self._span.set_status(Status(StatusCode.ERROR, error.message))
        self._span.end()


_NO_SPAN = RequestSpan(trace.INVALID_SPAN, owned=False)


def start(tracer: trace.Tracer | None, method: str, request_id: str) -> RequestSpan:
    """Open the span of a request under the caller's current one."""
    if tracer is None:
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            current = trace.get_current_span()
            if current is trace.INVALID_SPAN:
                return _NO_SPAN
            return RequestSpan(current, owned=False)
        tracer = provider.get_tracer("octavo")
    span = tracer.start_span(
        SPAN_NAME,
        kind=SpanKind.CLIENT,
        attributes={
            "rpc.system": "grpc",
            "rpc.service": "octavo.v1.Inference",
            "rpc.method": method,
            "octavo.request_id": request_id,
        },
    )
    return RequestSpan(span, owned=True)
