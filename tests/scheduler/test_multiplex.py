"""The stream of many calls over a real gRPC connection, with an engine whose steps a test makes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from octavo.service.errors import ServiceError, abort
from octavo.service.server import MAX_MESSAGE_BYTES
from octavo.service.telemetry import disabled
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from scheduler_svc import multiplex
from scheduler_svc.call import Call
from scheduler_svc.core.events import CandidateDelta, Emit, RequestTimes
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason
from scheduler_svc.mailbox import Mailbox
from scheduler_svc.multiplex import MAX_CALLS, MAX_REPLY_BYTES, CallStream

PATIENCE_S = 60
TIMES = RequestTimes(0.0, 0.0, 0.0, 0)
# A connection that takes in next to nothing unless it is read.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]


class Engine:
    """Enters what it is asked for, and gives out what a test says."""

    def __init__(self) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        # Of the requests that were left, whether they were complete.
        self.left: dict[str, bool] = {}
        self.changed = asyncio.Condition()
        # Requests of this prompt wait here, as those that are tokenized beside the event loop.
        self.tokenized = asyncio.Event()

    async def begin(self, request: pb.GenerateRequest | pb.ChatRequest, parent: str) -> Call:
        assert isinstance(request, pb.GenerateRequest)
        if request.prompt == "long":
            await self.tokenized.wait()
        if request.prompt == "bad":
            raise ServiceError("PROMPT_TOO_LONG", "so it is", retry_after_ms=7)
        params = SamplingParams(n=request.params.n or 1, seed=5)
        mailbox = Mailbox(Request(request.request_id, (1, 2, 3), params, traceparent=parent))
        self.mailboxes[request.request_id] = mailbox
        async with self.changed:
            self.changed.notify_all()
        return Call(self, disabled(), mailbox, None, 0)  # type: ignore[arg-type]

    def leave(self, request_id: str, mailbox: Mailbox, *, complete: bool) -> None:
        assert self.mailboxes[request_id] is mailbox
        assert request_id not in self.left
        self.left[request_id] = complete

    async def has_begun(self, *request_ids: str) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: {*request_ids} <= {*self.mailboxes})

    def step(self, position: int, *, last: bool = False) -> None:
        """One more token of every request that was not left."""
        for request_id, mailbox in self.mailboxes.items():
            if request_id not in self.left:
                mailbox.put(token(request_id, position, last=last))


def token(request_id: str, position: int, *, last: bool = False) -> Emit:
    reason = FinishReason.LENGTH if last else None
    delta = CandidateDelta(0, f"{position},", (position,), -1.0, reason, None, position)
    return Emit(request_id, (delta,), TIMES if last else None)


class Servicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Multiplex(self, request_iterator: object, context: Any) -> None:
        try:
            await CallStream(self._engine.begin, context).run()
        except ServiceError as error:
            await abort(context, error)


class Stream:
    """The caller's side of one stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.rpc: Any = inference_pb2_grpc.InferenceStub(channel).Multiplex(timeout=PATIENCE_S)

    async def generate(self, call_id: int, request_id: str, prompt: str = "p") -> None:
        request = pb.GenerateRequest(request_id=request_id, prompt=prompt)
        await self.rpc.write(pb.MultiplexRequest(call_id=call_id, generate=request))

    async def cancel(self, call_id: int) -> None:
        await self.rpc.write(pb.MultiplexRequest(call_id=call_id, cancel=pb.CancelCall()))

    async def next(self) -> dict[int, list[pb.CallNews]]:
        """The next message that has something, by call."""
        while True:
            message = await self.rpc.read()
            assert isinstance(message, pb.MultiplexReply), "the stream has ended"
            if message.calls:
                break
        by_call: dict[int, list[pb.CallNews]] = {}
        for news in message.calls:
            by_call.setdefault(news.call_id, []).append(news)
        for several in by_call.values():
            assert [news.WhichOneof("news") for news in several] in (
                ["reply"],
                ["end"],
                ["reply", "end"],
            )
        return by_call

    async def rest(self) -> dict[int, list[pb.CallNews]]:
        """All that comes until the stream ends in peace, the caller having closed its side."""
        await self.rpc.done_writing()
        by_call: dict[int, list[pb.CallNews]] = {}
        while isinstance(message := await self.rpc.read(), pb.MultiplexReply):
            for news in message.calls:
                by_call.setdefault(news.call_id, []).append(news)
        assert await self.rpc.code() is grpc.StatusCode.OK
        return by_call


@asynccontextmanager
async def serving(engine: Engine, options: Any = ()) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(engine), server)
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{folder}/s", options=options) as channel:
                yield channel
        finally:
            await server.stop(0)


Test = Callable[[Engine, Stream], Coroutine[Any, Any, None]]


def run(test: Test, options: Any = ()) -> Engine:
    """Run `test` with a stream of its own; the engine as it is left."""

    async def main() -> Engine:
        engine = Engine()
        async with serving(engine, options) as channel:
            await test(engine, Stream(channel))
        return engine

    return asyncio.run(main())


async def begun(engine: Engine, stream: Stream, *request_ids: str) -> None:
    """Calls 1, 2, ... with these ids are accepted, and their headers received."""
    for call_id, request_id in enumerate(request_ids, start=1):
        await stream.generate(call_id, request_id)
    await engine.has_begun(*request_ids)
    for request_id in request_ids:
        engine.mailboxes[request_id].accept()
    headers: dict[int, pb.GenerateReply] = {}
    while len(headers) < len(request_ids):
        headers.update({call_id: news[0].reply for call_id, news in (await stream.next()).items()})
    for call_id, request_id in enumerate(request_ids, start=1):
        header = pb.GenerateReply(request_id=request_id, seed=5, num_prompt_tokens=3)
        assert headers[call_id] == header


def token_ids(several: list[pb.CallNews]) -> list[int]:
    return [id_ for news in several for delta in news.reply.deltas for id_ in delta.token_ids]


# ---- news ----


def test_what_a_step_makes_comes_in_one_message() -> None:
    names = [f"r{number}" for number in range(8)]

    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, *names)
        for position in range(20):
            engine.step(position)
            message = await stream.next()
            assert {*message} == {*range(1, 9)}
            for news in message.values():
                assert token_ids(news) == [position]
                assert len(news) == 1
        engine.step(20, last=True)
        message = await stream.next()
        assert {*message} == {*range(1, 9)}
        for news in message.values():
            assert news[0].reply.deltas[0].finish_reason == FinishReason.LENGTH
            assert news[1].end == pb.CallEnd()
        assert await stream.rest() == {}

    assert run(test).left == dict.fromkeys(names, True)


def test_a_message_says_what_generate_would() -> None:
    delta = CandidateDelta(2, "é", (7, 8), -2.5, FinishReason.STOP, "stop", 3)
    by_id = CandidateDelta(0, "", (9,), -0.5, FinishReason.STOP, 9, 0)

    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a")
        engine.mailboxes["a"].put(Emit("a", (delta, by_id), TIMES, 4))
        ((reply, end),) = (await stream.next()).values()
        assert reply.reply == pb.GenerateReply(
            deltas=[
                pb.CandidateDelta(
                    index=2,
                    text="é",
                    token_ids=[7, 8],
                    cumulative_logprob=-2.5,
                    finish_reason="FINISH_REASON_STOP",
                    stop_string="stop",
                    token_offset=3,
                ),
                pb.CandidateDelta(
                    token_ids=[9],
                    cumulative_logprob=-0.5,
                    finish_reason="FINISH_REASON_STOP",
                    stop_token_id=9,
                    token_offset=0,
                ),
            ],
            num_cached_tokens=4,
        )
        assert end.end == pb.CallEnd()

    run(test)


def test_news_before_the_first_reply_come_after_it() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await stream.generate(1, "a")
        await engine.has_begun("a")
        engine.mailboxes["a"].put(token("a", 0))
        engine.mailboxes["a"].accept()
        assert (await stream.next())[1][0].reply.request_id == "a"
        assert token_ids((await stream.next())[1]) == [0]

    run(test)


def test_a_call_with_nothing_left_to_say_ends() -> None:
    """Its caller came back, having everything."""

    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a")
        engine.mailboxes["a"].put(Emit("a", (), TIMES))
        reply, end = (await stream.next())[1]
        assert reply.WhichOneof("news") == "reply"
        assert end.end == pb.CallEnd()
        assert await stream.rest() == {}

    assert run(test).left == {"a": True}


# ---- readers that are slow ----


def test_behind_a_slow_reader_news_merge_and_others_go_on() -> None:
    text = "x" * 1000
    num_steps = 2000

    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a", "b")
        for position in range(num_steps):
            for name in "ab":
                delta = CandidateDelta(0, text, (position,), -1.0, None, None, position)
                engine.mailboxes[name].put(Emit(name, (delta,)))
            await asyncio.sleep(0)
        engine.step(num_steps, last=True)
        received = await stream.rest()
        for several in received.values():
            assert token_ids(several) == [*range(num_steps + 1)]
            # What did not go into the connection at once waited as one.
            assert len(several) < num_steps / 4
            ends = [
                delta.token_offset + len(delta.token_ids)
                for news in several
                for delta in news.reply.deltas
            ]
            starts = [delta.token_offset for news in several for delta in news.reply.deltas]
            assert starts[1:] == ends[:-1]

    assert run(test, NARROW).left == {"a": True, "b": True}


def test_too_much_for_one_message_goes_into_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has waited for one call: it is divided between its candidates."""
    text, num_candidates, names = "\N{HOT BEVERAGE}\N{DIRECT HIT}" * 15_000, 20, ("a", "b", "c")
    num_bytes = len(text.encode())
    sizes: list[int] = []

    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, *names)
        for name in names:
            deltas = tuple(
                CandidateDelta(index, text, (1,), -1.0, FinishReason.LENGTH)
                for index in range(num_candidates)
            )
            engine.mailboxes[name].put(Emit(name, deltas, TIMES, 2))
        candidates: dict[int, list[int]] = {1: [], 2: [], 3: []}
        await stream.rpc.done_writing()
        while isinstance(message := await stream.rpc.read(), pb.MultiplexReply):
            sizes.append(message.ByteSize())
            for news in message.calls:
                candidates[news.call_id] += [delta.index for delta in news.reply.deltas]
        assert all(indices == [*range(num_candidates)] for indices in candidates.values())

    assert run(test).left == dict.fromkeys(names, True)
    assert sum(sizes) > 3 * num_candidates * num_bytes
    assert max(sizes) < MAX_REPLY_BYTES + 2 * num_bytes < MAX_MESSAGE_BYTES
    assert len(sizes) > 5


# ---- ends ----


def test_a_refusal_ends_its_call_alone() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a")
        await stream.generate(2, "b", prompt="bad")
        ((news,),) = (await stream.next()).values()
        assert (news.call_id, news.end.error.code, news.end.error.message) == (
            2,
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
            "so it is",
        )
        told = ServiceError.from_status_bytes(news.end.error.details)
        assert told is not None
        assert (told.reason, told.retry_after_ms) == ("PROMPT_TOO_LONG", 7)
        engine.step(0)
        assert token_ids((await stream.next())[1]) == [0]

    assert run(test).left == {"a": False}


@pytest.mark.parametrize("accepted", [False, True])
def test_a_failure_comes_after_what_was_before_it(accepted: bool) -> None:
    error = ServiceError("NOT_LEADER", "elsewhere", metadata={"holder_address": "unix:/b"})

    async def test(engine: Engine, stream: Stream) -> None:
        if accepted:
            await begun(engine, stream, "a")
            engine.step(0)
        else:
            await stream.generate(1, "a")
            await engine.has_begun("a")
        engine.mailboxes["a"].fail(error)
        received = [news for several in (await stream.rest()).values() for news in several]
        assert token_ids(received) == ([0] if accepted else [])
        told = ServiceError.from_status_bytes(received[-1].end.error.details)
        assert told is not None
        assert (told.reason, told.metadata) == ("NOT_LEADER", {"holder_address": "unix:/b"})

    assert run(test).left == {"a": False}


def test_a_cancelled_call_ends_and_the_others_do_not_notice() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a", "b")
        await stream.cancel(1)
        await stream.cancel(17)  # never was one
        await stream.generate(3, "c", prompt="bad")  # so that the cancel was read
        assert {*(await stream.next())} == {3}
        assert engine.left == {"a": False}
        engine.mailboxes["a"].put(token("a", 0))
        engine.step(0, last=True)
        assert {*(await stream.next())} == {2}
        assert await stream.rest() == {}

    assert run(test).left == {"a": False, "b": True}


def test_a_call_cancelled_with_news_that_wait_says_no_more() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a", "b")
        long = CandidateDelta(0, "x" * 300_000, (0,), -1.0, None, None, 0)
        # The writer is in the middle of the one, and the other waits for it.
        engine.mailboxes["b"].put(Emit("b", (long,)))
        await asyncio.sleep(0.05)
        engine.mailboxes["a"].put(token("a", 0))
        await stream.cancel(1)
        await stream.rpc.done_writing()
        while "a" not in engine.left:
            await asyncio.sleep(0.01)
        engine.step(1, last=True)
        assert {*(await stream.rest())} == {2}

    assert run(test, NARROW).left == {"a": False, "b": True}


def test_a_call_cancelled_while_it_is_tokenized_never_begins() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await stream.generate(1, "a", prompt="long")
        await begun_beside(engine, stream)
        await stream.cancel(1)
        assert await stream.rest() == {}

    engine = run(test)
    assert "a" not in engine.mailboxes


async def begun_beside(engine: Engine, stream: Stream) -> None:
    """Call 2 is served from its beginning to its end while call 1 is tokenized."""
    await stream.generate(2, "b")
    await engine.has_begun("b")
    engine.mailboxes["b"].accept()
    assert {*(await stream.next())} == {2}
    engine.step(0, last=True)
    assert {*(await stream.next())} == {2}


def test_a_long_prompt_holds_up_nobody() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await stream.generate(1, "a", prompt="long")
        await begun_beside(engine, stream)
        engine.tokenized.set()
        await engine.has_begun("a")
        engine.mailboxes["a"].accept()
        assert {*(await stream.next())} == {1}

    assert run(test).left == {"a": False, "b": True}


def test_a_stream_that_is_cancelled_leaves_all() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a", "b")
        await stream.generate(3, "c", prompt="long")
        stream.rpc.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while len(engine.left) < 2:
                await asyncio.sleep(0.01)

    assert run(test).left == {"a": False, "b": False}


def test_whoever_closes_its_side_gets_the_rest() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a")
        rest = asyncio.create_task(stream.rest())
        await asyncio.sleep(0.05)
        engine.step(0)
        await asyncio.sleep(0.05)
        engine.step(1, last=True)
        assert token_ids((await rest)[1]) == [0, 1]

    assert run(test).left == {"a": True}


# ---- callers that break the rules ----


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (pb.MultiplexRequest(call_id=1, generate=pb.GenerateRequest()), "call_id is 1"),
        (pb.MultiplexRequest(call_id=5), "call 5 has no action"),
    ],
)
def test_a_stream_that_cannot_be_understood_is_refused(
    broken: pb.MultiplexRequest, what: str
) -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a", "b")
        await stream.rpc.write(broken)
        with pytest.raises(grpc.RpcError) as raised:
            await stream.next()
        error = ServiceError.from_rpc_error(raised.value)
        assert error is not None
        assert error.reason == "INVALID_PARAMETER"
        assert what in error.message

    assert run(test).left == {"a": False, "b": False}


def test_an_id_can_be_used_again_after_its_end() -> None:
    async def test(engine: Engine, stream: Stream) -> None:
        await begun(engine, stream, "a")
        engine.step(0, last=True)
        await stream.next()
        await begun(engine, stream, "b")

    assert run(test).left == {"a": True, "b": False}


def test_more_calls_than_a_stream_takes() -> None:
    num_more = 5

    async def test(engine: Engine, stream: Stream) -> None:
        for call_id in range(MAX_CALLS + num_more):
            await stream.generate(call_id, f"r{call_id}")
        refused: dict[int, pb.CallNews] = {}
        while len(refused) < num_more:
            for call_id, (news,) in (await stream.next()).items():
                refused[call_id] = news
        assert {*refused} == {*range(MAX_CALLS, MAX_CALLS + num_more)}
        for news in refused.values():
            error = ServiceError.from_status_bytes(news.end.error.details)
            assert error is not None
            assert error.reason == "TOO_MANY_CALLS"
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"at most {MAX_CALLS}" in error.message
        # One leaves, and there is room for another one.
        await stream.cancel(0)
        await stream.generate(5000, "later")
        await engine.has_begun("later")

    engine = run(test)
    assert len(engine.left) == MAX_CALLS + 1


def test_refusals_that_nobody_reads_are_not_piled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads no further instead."""
    monkeypatch.setattr(multiplex, "MAX_CALLS", 4)
    num_calls = 20_000
    noted: list[int] = []
    note = multiplex._StreamedCall.note

    def noting(call: multiplex._StreamedCall) -> None:
        note(call)
        noted.append(len(call.stream.noted))

    monkeypatch.setattr(multiplex._StreamedCall, "note", noting)

    async def test(engine: Engine, stream: Stream) -> None:
        async def send() -> None:
            for call_id in range(num_calls):
                await stream.generate(call_id, f"r{call_id}")

        sending = asyncio.create_task(send())
        await engine.has_begun(*(f"r{call_id}" for call_id in range(4)))
        await asyncio.sleep(0.5)  # until nothing more goes into the connection
        for call_id in range(4):
            engine.mailboxes[f"r{call_id}"].fail(ServiceError("DRAINING", "go"))
        ended = 0
        while ended < num_calls - 4:  # four more have begun
            message = await stream.rpc.read()
            ended += sum(news.HasField("end") for news in message.calls)
        await sending

    run(test, NARROW)
    assert max(noted) <= 2 * 4 + 1
