"""The trace of one request, put together from a heap of spans. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One finished span. Ids in hex; links: ids of the traces it is linked to."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    links: tuple[str, ...] = ()
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True)
class Node:
    """A span with the spans below it, in the order of their start."""

    span: Span
    children: tuple[Node, ...]

    def walk(self) -> Iterable[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Total:
    """All spans of one name."""

    name: str
    service: str
    count: int
    total_ms: float


@dataclass(frozen=True)
class RequestTrace:
    """roots: the request's own trace; more than one where a parent never arrived.
    steps: roots of other traces that are linked to it, in the order of their start.
    missing_services: those that sent nothing for the request's own trace."""

    roots: tuple[Node, ...]
    steps: tuple[Node, ...]
    missing_services: tuple[str, ...]

    def totals(self) -> tuple[Total, ...]:
        """What the linked steps consist of, in the order of first appearance."""
        spans: dict[str, list[Span]] = defaultdict(list)
        for step in self.steps:
            for node in step.walk():
                spans[node.span.name].append(node.span)
        return tuple(
            Total(name, same[0].service, len(same), sum(span.duration_ms for span in same))
            for name, same in spans.items()
        )


def build(spans: Sequence[Span], trace_id: str, expected_services: Sequence[str]) -> RequestTrace:
    """The trace `trace_id`, and the steps that link to it."""
    children: dict[tuple[str, str], list[Span]] = defaultdict(list)
    known = {(span.trace_id, span.span_id) for span in spans}
    for span in spans:
        children[span.trace_id, span.parent_id].append(span)
    own = [span for span in spans if span.trace_id == trace_id]
    roots = [span for span in own if (trace_id, span.parent_id) not in known]
    steps = [span for span in spans if span.trace_id != trace_id and trace_id in span.links]
    heard_of = {span.service for span in own}
    return RequestTrace(
        _nodes(roots, children),
        _nodes(steps, children),
        tuple(service for service in expected_services if service not in heard_of),
    )


def _nodes(
    spans: Iterable[Span], children: Mapping[tuple[str, str], Sequence[Span]]
) -> tuple[Node, ...]:
    return tuple(
        Node(span, _nodes(children.get((span.trace_id, span.span_id), ()), children))
        for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    )
