"""The collector, fed by OpenTelemetry's own exporter from a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys

from octavo.cli.collector import Collector

EMITTER = """
from octavo.service import telemetry
traces = telemetry.setup("octavo-worker")
assert traces.enabled
root = traces.start("root", attributes={"octavo.request_id": "r", "octavo.num_tokens": 3})
traces.record("child", (1_000_000, 3_500_000), parent=telemetry.traceparent(root))
step = traces.start("step", links=[telemetry.traceparent(root)])
step.end()
root.end()
traces.shutdown()
"""


def test_spans_arrive_whole() -> None:
    async def main() -> Collector:
        collector = Collector()
        await collector.start()
        env = {**os.environ, **collector.environment()}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", EMITTER, env=env)
        assert await process.wait() == 0
        await collector.wait_until_quiet(lambda spans: len(spans) == 3, quiet_s=0.01, timeout_s=30)
        await collector.stop()
        return collector

    spans = {span.name: span for span in asyncio.run(main()).spans}
    root, child, step = spans["root"], spans["child"], spans["step"]
    assert {span.service for span in spans.values()} == {"octavo-worker"}
    assert (child.trace_id, child.parent_id) == (root.trace_id, root.span_id)
    assert child.duration_ms == 2.5
    assert root.parent_id == ""
    assert root.attributes == {"octavo.request_id": "r", "octavo.num_tokens": 3}
    assert step.trace_id != root.trace_id
    assert step.links == (root.trace_id,)


def test_spans_that_never_come_are_not_waited_for_for_ever() -> None:
    async def main() -> None:
        await Collector().wait_until_quiet(lambda spans: False, quiet_s=0.01, timeout_s=0.1)

    asyncio.run(asyncio.wait_for(main(), timeout=30))


def test_there_is_a_bound_and_what_is_beyond_it_is_counted(monkeypatch) -> None:
    monkeypatch.setattr("octavo.cli.collector.MAX_SPANS", 2)

    async def main() -> Collector:
        collector = Collector()
        await collector.start()
        env = {**os.environ, **collector.environment()}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", EMITTER, env=env)
        assert await process.wait() == 0
        await collector.stop()
        return collector

    collector = asyncio.run(main())
    assert len(collector.spans) == 2
    assert collector.num_dropped == 1
