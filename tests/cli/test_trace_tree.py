"""Spans put together: the request's own tree, the steps linked to it, and what is missing."""

from __future__ import annotations

import io
import random

from rich.console import Console

from octavo.cli import render
from octavo.cli.trace_tree import Node, Span, build

EXPECTED = ("octavo-scheduler", "octavo-kvmem", "octavo-worker")


def span(
    name: str,
    span_id: str,
    parent_id: str = "",
    start_ms: int = 0,
    end_ms: int = 1,
    trace_id: str = "own",
    **rest: object,
) -> Span:
    service = f"octavo-{name.split('.', maxsplit=1)[0].replace('octavo', 'client')}"
    times = (start_ms * 10**6, end_ms * 10**6)
    return Span(trace_id, span_id, parent_id, name, service, *times, **rest)  # type: ignore[arg-type]


REQUEST = [
    span("octavo.generate", "c", "outside", 0, 100),
    span("scheduler.generate", "g", "c", 1, 99),
    span("kvmem.arrive", "a", "g", 2, 3),
    span("scheduler.decode", "d", "g", 40, 98),
    span("worker.prefill", "p", "g", 10, 40),
]


def step(number: int, links: tuple[str, ...] = ("own",)) -> list[Span]:
    trace_id, start = f"step{number}", 10 + 20 * number
    return [
        span("scheduler.step", "s", "", start, start + 18, trace_id, links=links),
        span("kvmem.apply", "k", "s", start, start + 2, trace_id),
        span("worker.execute", "w", "s", start + 2, start + 18, trace_id),
    ]


def names(node: Node) -> tuple[str, list]:
    return node.span.name, [names(child) for child in node.children]


def shown(spans: list[Span]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render.trace(build(spans, "own", EXPECTED)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tree_stands_in_the_order_of_time_whatever_the_order_of_arrival() -> None:
    spans = REQUEST + step(1) + step(0)
    for seed in range(5):
        random.Random(seed).shuffle(spans)
        request = build(spans, "own", EXPECTED)
        assert [names(root) for root in request.roots] == [
            (
                "octavo.generate",
                [
                    (
                        "scheduler.generate",
                        [("kvmem.arrive", []), ("worker.prefill", []), ("scheduler.decode", [])],
                    )
                ],
            )
        ]
        assert [root.span.trace_id for root in request.steps] == ["step0", "step1"]
        assert names(request.steps[0])[1] == [("kvmem.apply", []), ("worker.execute", [])]
        assert request.missing_services == ()


def test_a_step_of_somebody_else_is_left_out() -> None:
    request = build(REQUEST + step(0) + step(1, links=("other",)), "own", EXPECTED)
    assert [root.span.trace_id for root in request.steps] == ["step0"]


def test_a_span_whose_parent_never_came_stands_at_the_top() -> None:
    request = build([s for s in REQUEST if s.span_id != "g"], "own", EXPECTED)
    assert [root.span.name for root in request.roots] == [
        "octavo.generate",
        "kvmem.arrive",
        "worker.prefill",
        "scheduler.decode",
    ]


def test_totals_count_every_span_of_every_step() -> None:
    totals = build(REQUEST + step(0) + step(1) + step(2), "own", EXPECTED).totals()
    assert [(t.name, t.count, t.total_ms) for t in totals] == [
        ("scheduler.step", 3, 54.0),
        ("kvmem.apply", 3, 6.0),
        ("worker.execute", 3, 48.0),
    ]


def test_a_service_missing_from_the_requests_trace_is_named_even_when_its_steps_are_there() -> None:
    spans = [s for s in REQUEST if s.service != "octavo-worker"] + step(0)
    assert build(spans, "own", EXPECTED).missing_services == ("octavo-worker",)
    assert "No span of octavo-worker arrived in this request's trace." in shown(spans)
    assert "No span of" not in shown(REQUEST + step(0))


def test_the_first_steps_are_shown_and_the_rest_counted() -> None:
    text = shown(REQUEST + [s for n in range(8) for s in step(n)])
    assert "The 8 steps that computed it" in text
    assert "… 5 more" in text
    assert text.count("scheduler.step  18 ms") == 3
    assert "the worker was computing for 128 ms (128%)" in text


def test_no_step_at_all_is_said() -> None:
    assert "No step that computed it arrived." in shown(REQUEST)


def test_nothing_at_all_is_said() -> None:
    text = shown([])
    assert all(f"No span of {service}" in text for service in EXPECTED)


def test_counts_on_a_span_are_read_with_and_without_the_prefix() -> None:
    attributes = {"octavo.num_prompt_tokens": 37, "num_sequences": 1, "step_id": 4, "x": "y"}
    text = shown([span("scheduler.generate", "g", attributes=attributes), *step(0)])
    assert "scheduler.generate  1.00 ms  37 prompt tokens, 1 sequence\n" in "\n".join(
        line.rstrip() for line in text.splitlines()
    )
