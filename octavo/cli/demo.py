"""`octavo demo`: a real question to a real model, and a look inside while it is answered.

Everything shown is observed: the answers through the SDK, the blocks from the memory service's
event stream, the spans by a collector in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from octavo.admin import EventStream, KvMemoryInspector
from octavo.admin_types import PoolStats
from octavo.cli import render, trace_tree
from octavo.cli.block_mirror import RequestStory
from octavo.cli.collector import EXPORTER_DELAY_MS, Collector
from octavo.cli.merged_log import MergedLog
from octavo.cli.progress import generating, preparing_model, starting_services
from octavo.cli.stack import READY_TIMEOUT_S, Stack, StackError, StackOptions, run_stack
from octavo.cli.state import StateDir
from octavo.cli.supervisor import ServiceFailedError
from octavo.cli.talk import print_piece
from octavo.client import AsyncChunkStream, AsyncClient
from octavo.errors import OctavoError
from octavo.service import telemetry
from octavo.types import Generation, SamplingParams

QUESTION = "What is the capital of France?"
# Room for one sequence of the demo model's full length, and little more.
DEMO_MODEL_KV_MEMORY = "512MiB"
SURE = SamplingParams(temperature=0.0, max_tokens=48)
# A seed with which the demo model gives two answers that differ and fill several blocks.
TWO_ANSWERS = SamplingParams(n=2, temperature=0.9, min_p=0.1, seed=63, max_tokens=32)
SERVICES = ("octavo-scheduler", "octavo-kvmem", "octavo-worker")
REQUEST_TIMEOUT_S = 120.0
GIVE_BACK_TIMEOUT_S = 10.0
TRACE_TIMEOUT_S = 10.0
SHOWN_LOG_LINES = 25
INTERRUPTED_EXIT_CODE = 130


# `AsyncClient.stream_chat` or `AsyncClient.stream`.
Ask = Callable[..., AsyncChunkStream]


class DemoError(Exception):
    """The demo saw something that must not be; one sentence for a person."""


@dataclass(frozen=True)
class Observed:
    """What was seen of the request with two answers."""

    result: Generation
    story: RequestStory
    before: PoolStats
    after: PoolStats


async def run_demo(model: str, kv_memory: str | None, console: Console) -> int:
    """Run the whole demo in a folder of its own; the exit status."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-demo-") as folder:
        state = StateDir(Path(folder))
        if not model:
            kv_memory = kv_memory or DEMO_MODEL_KV_MEMORY
        options = StackOptions(model=model, kv_memory=kv_memory)
        log = MergedLog(state.log_path)
        try:
            with state.lock():
                status = await _observed(options, state, log, console)
        except (DemoError, StackError, ServiceFailedError, OctavoError) as error:
            _explain_failure(error, log, console)
            return 1
        finally:
            log.close()
    if status == 0:
        console.print(f"\nDone in {time.monotonic() - began_s:.1f} s.")
    return status


def _explain_failure(error: Exception, log: MergedLog, console: Console) -> None:
    console.print()
    console.print(render.error_line(str(error)))
    if lines := log.tail(SHOWN_LOG_LINES):
        console.print("The newest lines of the services' log:")
        console.print(Text("\n".join(lines), "dim"), soft_wrap=True)
    console.print("Everything that was started has been stopped.")


async def _observed(
    options: StackOptions, state: StateDir, log: MergedLog, console: Console
) -> int:
    """The stack under the eyes of a collector."""
    collector = Collector()
    await collector.start()
    os.environ.update(collector.environment())
    traces = telemetry.setup("octavo-client")
    stack = Stack(state, options, log, env=os.environ)
    demo = Demo(stack, collector, traces, console)
    try:
        status = await run_stack(stack, demo.run, demo.say_stopping, demo.say_stopped)
    finally:
        # In a thread: it waits for the exporter, whose peer is served by this event loop.
        await asyncio.to_thread(traces.shutdown)
        await collector.stop()
    demo.check_nothing_is_left()
    return status if demo.finished else INTERRUPTED_EXIT_CODE


class Demo:
    """The four parts, in order."""

    def __init__(
        self, stack: Stack, collector: Collector, traces: telemetry.Telemetry, console: Console
    ) -> None:
        self._stack = stack
        self._collector = collector
        self._traces = traces
        self._console = console
        self._processes: list[psutil.Process] = []
        self.finished = False

    async def run(self) -> None:
        await self._start()
        client = AsyncClient(self._stack.addresses["scheduler"], tracer=self._traces.tracer)
        async with client:
            model = await client.model()
            # A model that was not made for conversations goes on with the question's text.
            ask = client.stream_chat if model.has_chat_template else client.stream
            await self._ask(ask, model.name)
            request_id = f"demo-{uuid.uuid4().hex[:8]}"
            observed = await self._ask_for_two(ask, request_id)
            self._show_blocks(observed)
            await self._show_trace(request_id)
        self.finished = True

    async def _start(self) -> None:
        self._console.print(
            "[bold]Octavo[/] runs a language model as three processes that talk gRPC:\n"
            "  [cyan]scheduler[/] decides what runs next, [green]kvmem[/] owns the memory blocks,"
            " [magenta]worker[/] computes.\n"
        )
        with preparing_model(self._console) as progress:
            model_path = await self._stack.prepare(progress)
        supervisor = self._stack.launch(model_path)
        await starting_services(self._console, supervisor, READY_TIMEOUT_S)
        for pid in self._stack.pids().values():
            process = psutil.Process(pid)
            self._processes += [process, *process.children(recursive=True)]

    # ---- 1

    async def _ask(self, ask: Ask, model_name: str) -> None:
        self._console.print(render.heading(1, "A question, answered token by token"))
        self._console.print(f"[bold]you>[/] {QUESTION}")
        self._console.print(f"[bold]{model_name}>[/] ", end="")
        began_s, first_s = time.monotonic(), None
        async with ask(QUESTION, SURE, timeout_s=REQUEST_TIMEOUT_S) as chunks:
            async for chunk in chunks:
                if chunk.text and first_s is None:
                    first_s = time.monotonic() - began_s
                print_piece(chunk.text, self._console, "bold cyan")
        whole_s = time.monotonic() - began_s
        num_tokens = len(chunks.generation().candidates[0].token_ids)
        self._console.print(
            f"\n[dim]({num_tokens} tokens; the first after {first_s or whole_s:.2f} s,"
            f" all after {whole_s:.2f} s)[/]"
        )

    # ---- 2

    async def _ask_for_two(self, ask: Ask, request_id: str) -> Observed:
        """The same question with two answers, watched at the memory service."""
        self._console.print(render.heading(2, "Two answers to one question share its memory"))
        with KvMemoryInspector(self._stack.addresses["kvmem"]) as inspector:
            before = await _at_rest(inspector)
            story = RequestStory(request_id)
            with inspector.watch(timeout_s=REQUEST_TIMEOUT_S) as events:
                story.apply(await asyncio.to_thread(next, events))
                following = asyncio.create_task(asyncio.to_thread(_follow, events, story, before))
                result = await self._two_answers(ask, request_id)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(following), GIVE_BACK_TIMEOUT_S)
                events.close()
                await following
            after = await _at_rest(inspector)
        return Observed(result, story, before, after)

    async def _two_answers(self, ask: Ask, request_id: str) -> Generation:
        stream = ask(QUESTION, TWO_ANSWERS, request_id=request_id, timeout_s=REQUEST_TIMEOUT_S)
        most = (TWO_ANSWERS.n or 1) * (TWO_ANSWERS.max_tokens or 0)
        with generating(self._console, "The same question again, two answers at once", most) as add:
            async with stream as chunks:
                async for chunk in chunks:
                    add(sum(len(part.token_ids) for part in chunk.candidates))
        return chunks.generation()

    def _show_blocks(self, observed: Observed) -> None:
        story, geometry = observed.story, observed.before.geometry
        if geometry is None or len(story.widest.tables) != TWO_ANSWERS.n:
            raise DemoError("the memory service did not report the two answers' block tables")
        say = self._console.print
        say(render.answers(observed.result.candidates))
        say(render.parting_line(observed.result.candidates))
        say()
        say(
            "What the model remembers of a text (its KV cache) is kept in blocks of"
            f" {geometry.block_size} tokens.\nEach answer has a table of the blocks it uses;"
            " here are both, as the memory service reported them:"
        )
        copied_from = frozenset(copy.src_block_id for copy in story.copies)
        say(render.block_tables(story.widest, geometry.block_size, copied_from))
        say(render.bullets(render.story_lines(story, geometry.block_size)))
        say()
        say(render.pool_table(observed.before, story, observed.after))
        say(render.bullets([render.given_back_line(story)]))
        if observed.after.levels.num_unused_blocks != observed.before.levels.num_unused_blocks:
            raise DemoError("not every block came back to the pool")

    # ---- 3

    async def _show_trace(self, request_id: str) -> None:
        self._console.print(render.heading(3, "Where the time went, across the three processes"))
        await self._collector.wait_until_quiet(
            lambda spans: not self._trace_of(request_id, spans).missing_services,
            quiet_s=3 * EXPORTER_DELAY_MS / 1000,
            timeout_s=TRACE_TIMEOUT_S,
        )
        request = self._trace_of(request_id, self._collector.spans)
        if not request.roots:
            raise DemoError("no span of the request reached the collector")
        self._console.print(render.trace(request))

    def _trace_of(self, request_id: str, spans: list[trace_tree.Span]) -> trace_tree.RequestTrace:
        trace_ids = (
            span.trace_id
            for span in spans
            if span.attributes.get("octavo.request_id") == request_id
        )
        return trace_tree.build(spans, next(trace_ids, ""), SERVICES)

    # ---- 4

    def say_stopping(self) -> None:
        if self.finished:
            self._console.print(render.heading(4, "Shutting down"))
        else:
            self._console.print("\nStopping everything.")

    def say_stopped(self, service: str) -> None:
        self._console.print(f"{service} has ended.")

    def check_nothing_is_left(self) -> None:
        """Raises DemoError naming a process or socket that is still there."""
        alive = [p for p in self._processes if p.is_running()]
        if alive:
            raise DemoError(f"processes are left: {', '.join(str(p.pid) for p in alive)}")
        sockets = [Path(a.removeprefix("unix:")) for a in self._stack.addresses.values()]
        left = [str(socket) for socket in sockets if socket.exists()]
        if left:
            raise DemoError(f"sockets are left: {', '.join(left)}")
        self._console.print(
            f"Checked: none of the {len(self._processes)} processes and none of their"
            f" {len(sockets)} sockets is left."
        )


async def _at_rest(inspector: KvMemoryInspector) -> PoolStats:
    """The pool once no step in flight holds a block any more, or after a while as it is."""
    deadline_s = time.monotonic() + GIVE_BACK_TIMEOUT_S
    while True:
        stats = await asyncio.to_thread(inspector.pool_stats)
        if not stats.levels.num_quarantined_blocks or time.monotonic() > deadline_s:
            return stats
        await asyncio.sleep(0.02)


def _follow(events: EventStream, story: RequestStory, before: PoolStats) -> None:
    """Fold events into the story until the request is over and its blocks are free again."""
    for event in events:
        story.apply(event)
        levels = story.last_levels
        if (
            story.confirmed
            and levels is not None
            and levels.num_unused_blocks >= before.levels.num_unused_blocks
        ):
            return
