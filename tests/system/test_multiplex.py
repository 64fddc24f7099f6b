"""One stream with many calls, against real processes: each is what Generate would have answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import octavo
from octavo import AsyncClient, Client, Generation
from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, types_pb2
from tests.system.models import TINY_WORKER, Transformers
from tests.system.requests import Bystander, greedy, token_prompt
from tests.system.stack import PATIENCE_S, Stack, wait_until
from tests.system.survival import outcome, shapes, undisturbed

# A connection that takes in next to nothing unless it is read, as one across a slow network.
NARROW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16384),
    ("grpc.use_local_subchannel_pool", 1),
]
PROMPT = token_prompt(30, salt=11)


def request_of(
    request_id: str, max_tokens: int, n: int = 1, prompt: tuple[int, ...] = PROMPT
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id)
    request.prompt_token_ids.ids.extend(prompt)
    request.params.n, request.params.max_tokens = n, max_tokens
    request.params.ignore_eos, request.params.temperature = True, 0.0
    return request


class Calls:
    """A raw stream, and what has come over it, by call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.rpc: Any = inference_pb2_grpc.InferenceStub(channel).Multiplex(timeout=PATIENCE_S * 2)
        # Calls with tokens in each message.
        self.num_with_tokens: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, pb.CallEnd] = {}
        self.num_replies: dict[int, int] = {}

    async def begin(self, call_id: int, request: pb.GenerateRequest) -> None:
        await self.rpc.write(pb.MultiplexRequest(call_id=call_id, generate=request))

    async def cancel(self, call_id: int) -> None:
        await self.rpc.write(pb.MultiplexRequest(call_id=call_id, cancel=pb.CancelCall()))

    async def read(self) -> bool:
        """Take in the next message; False when there is none."""
        message = await self.rpc.read()
        if not isinstance(message, pb.MultiplexReply):
            return False
        replies = [news for news in message.calls if news.HasField("reply")]
        assert len({news.call_id for news in replies}) == len(replies)
        for news in message.calls:
            assert news.call_id not in self.ends, "it went on after its end"
            if news.HasField("end"):
                self.ends[news.call_id] = news.end
                continue
            self.num_replies[news.call_id] = self.num_replies.get(news.call_id, 0) + 1
            tokens = self.tokens.setdefault(news.call_id, [])
            for delta in news.reply.deltas:
                if delta.index == 0:
                    assert delta.token_offset == len(tokens)
                    tokens.extend(delta.token_ids)
        self.num_with_tokens.append(
            sum(any(delta.token_ids for delta in news.reply.deltas) for news in replies)
        )
        return True

    async def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert await self.read(), "the stream has ended"


@asynccontextmanager
async def calls_of(address: str, options: Any = CHANNEL_OPTIONS) -> AsyncIterator[Calls]:
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Calls(channel)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_many_at_a_time_are_what_each_is_alone(tiny: Stack) -> None:
    several = shapes(16, 80)
    expected = undisturbed(tiny, several)

    async def main() -> list[Generation]:
        async with AsyncClient(tiny.address) as client:
            streams = [client.stream(shape.prompt, shape.params) for shape in several]
            assert len({stream._call._stream for stream in streams}) == 1

            async def read(stream: octavo.client.AsyncChunkStream) -> Generation:
                async for _ in stream:
                    pass
                return stream.generation()

            return await asyncio.gather(*map(read, streams))

    for shape, answer in zip(several, asyncio.run(main()), strict=True):
        assert outcome(answer.candidates) == outcome(expected[shape].candidates)
        assert answer.num_prompt_tokens == len(shape.prompt)
    tiny.wait_until_empty()


def test_a_message_has_the_tokens_of_all(tiny: Stack, tiny_reference: Transformers) -> None:
    num_calls, max_tokens = 8, 200
    expected = tiny_reference.greedy(PROMPT, max_tokens)

    async def main() -> None:
        async with calls_of(tiny.address) as calls:
            for call_id in range(1, num_calls + 1):
                await calls.begin(call_id, request_of(f"m{call_id}", max_tokens))
            await calls.rpc.done_writing()
            while await calls.read():
                pass
            assert await calls.rpc.code() is grpc.StatusCode.OK
            assert calls.ends == {call_id: pb.CallEnd() for call_id in range(1, num_calls + 1)}
            for tokens in calls.tokens.values():
                assert len(tokens) == max_tokens
                assert expected.disagreement(tokens) is None
            messages = [count for count in calls.num_with_tokens if count]
            assert max(messages) == num_calls
            # They are admitted at a step or two, and then decode together to the end.
            assert len(messages) < 1.5 * max_tokens

    run(main())
    tiny.wait_until_empty()


def test_a_cancelled_call_disturbs_nobody(tiny: Stack, tiny_reference: Transformers) -> None:
    expected = tiny_reference.greedy(PROMPT, 150)

    async def main() -> None:
        async with calls_of(tiny.address) as calls:
            for call_id in (1, 2, 3):
                await calls.begin(call_id, request_of(f"c{call_id}", 150 if call_id != 2 else 450))
            await calls.read_until(lambda: len(calls.tokens.get(2, ())) > 10)
            await calls.cancel(2)
            await calls.rpc.done_writing()
            while await calls.read():
                pass
            assert {*calls.ends} == {1, 3}
            assert len(calls.tokens[2]) < 450
            for call_id in (1, 3):
                assert expected.disagreement(calls.tokens[call_id]) is None

    run(main())
    tiny.wait_until_empty()


def test_a_stream_that_is_cut_ends_all_its_calls(tiny: Stack) -> None:
    async def main() -> None:
        async with calls_of(tiny.address) as calls:
            for call_id in (1, 2, 3):
                await calls.begin(call_id, request_of(f"x{call_id}", 450))
            await calls.read_until(lambda: len(calls.tokens) == 3 and all(calls.tokens.values()))
            calls.rpc.cancel()

    run(main())
    with tiny.client() as client:
        wait_until(lambda: not client.list_requests(), "they are aborted")
    tiny.wait_until_empty()


def test_others_do_not_notice_a_stream_that_is_not_read(
    tiny: Stack, tiny_reference: Transformers
) -> None:
    num_calls, max_tokens = 4, 470

    async def main() -> None:
        async with calls_of(tiny.address, NARROW) as calls:
            for call_id in range(1, num_calls + 1):
                await calls.begin(call_id, request_of(f"s{call_id}", max_tokens, n=16))
            with tiny.client() as client, Bystander(tiny, tiny_reference):
                await asyncio.to_thread(wait_until, lambda: all_finished(client), "all is computed")
            assert len(client_requests(tiny)) == num_calls, "some was delivered"
            # Late, but whole, and what waited for each waited as one.
            await calls.rpc.done_writing()
            while await calls.read():
                pass
            assert {len(tokens) for tokens in calls.tokens.values()} == {max_tokens}
            assert max(calls.num_replies.values()) < max_tokens / 2

    def all_finished(client: Client) -> bool:
        mine = [r for r in client.list_requests() if r.request_id.startswith("s")]
        return len(mine) == num_calls and all(r.status == "finished" for r in mine)

    run(main())
    tiny.wait_until_empty()


def client_requests(stack: Stack) -> list[str]:
    with stack.client() as client:
        return [r.request_id for r in client.list_requests() if r.request_id.startswith("s")]


def bad_requests() -> Iterator[pb.GenerateRequest | pb.ChatRequest]:
    too_hot = request_of("bad", 5)
    too_hot.params.temperature = 101.0
    yield too_hot
    yield pb.GenerateRequest(request_id="bad")
    yield request_of("bad", 5, prompt=(1, 2, 10**6))
    yield request_of("bad", 5000)
    other = request_of("bad", 5)
    other.model = "another"
    yield other
    yield request_of("x" * 400, 5)
    yield pb.ChatRequest(request_id="bad")
    yield request_of("taken", 5)


def test_a_refusal_is_that_of_generate_and_others_do_not_notice(
    tiny: Stack, tiny_reference: Transformers
) -> None:
    expected = tiny_reference.greedy(PROMPT, 470)
    stub = inference_pb2_grpc.InferenceStub(tiny.channel())

    def alone(request: pb.GenerateRequest | pb.ChatRequest) -> grpc.RpcError:
        method: Any = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        with pytest.raises(grpc.RpcError) as raised:
            list(method(request, timeout=30))
        return raised.value

    async def main() -> None:
        async with calls_of(tiny.address) as calls:
            await calls.begin(1, request_of("taken", 470))
            await calls.read_until(lambda: bool(calls.tokens.get(1)))
            for call_id, request in enumerate(bad_requests(), start=2):
                told = ServiceError.from_rpc_error(await asyncio.to_thread(alone, request))
                message = pb.MultiplexRequest(call_id=call_id)
                if isinstance(request, pb.ChatRequest):
                    message.chat.CopyFrom(request)
                else:
                    message.generate.CopyFrom(request)
                await calls.rpc.write(message)
                await calls.read_until(lambda call_id=call_id: call_id in calls.ends)
                error = calls.ends[call_id].error
                same = ServiceError.from_status_bytes(error.details)
                assert told is not None
                assert same is not None
                assert vars(same) == vars(told)
                assert (error.code, error.message) == (told.code.value[0], told.message)
            assert 1 not in calls.ends, "it was to go on beside them"
            await calls.read_until(lambda: 1 in calls.ends)
            assert expected.disagreement(calls.tokens[1]) is None

    run(main())
    tiny.wait_until_empty()


@pytest.mark.parametrize("action", ["used twice", "none"])
def test_a_caller_that_breaks_the_rules_loses_its_stream_alone(
    tiny: Stack, tiny_reference: Transformers, action: str
) -> None:
    expected = tiny_reference.greedy(PROMPT, 200)

    async def main() -> None:
        async with calls_of(tiny.address) as calls, calls_of(tiny.address) as others:
            await calls.begin(7, request_of("first", 450))
            await others.begin(7, request_of("other", 200))
            await calls.read_until(lambda: bool(calls.tokens.get(7)))
            if action == "none":
                await calls.rpc.write(pb.MultiplexRequest(call_id=8))
            else:
                await calls.begin(7, request_of("second", 450))
            with pytest.raises(grpc.RpcError) as raised:
                await calls.read_until(lambda: False)
            error = ServiceError.from_rpc_error(raised.value)
            assert error is not None
            assert error.reason == "INVALID_PARAMETER"
            await others.read_until(lambda: 7 in others.ends)
            assert expected.disagreement(others.tokens[7]) is None

    run(main())
    tiny.wait_until_empty()


def test_the_client_goes_past_what_one_stream_takes(
    tiny: Stack, tiny_reference: Transformers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo._multiplex.MAX_CALLS", 3)
    expected = tiny_reference.greedy(PROMPT, 40)

    async def main() -> None:
        async with AsyncClient(tiny.address) as client:
            answers = await asyncio.gather(*(client.generate(PROMPT, greedy(40)) for _ in range(8)))
            for answer in answers:
                assert expected.disagreement(answer.candidates[0].token_ids) is None

    run(main())
    tiny.wait_until_empty()


# ---- tenants ----

ACME, OTHER = "key-of-acme-0123456789", "key-of-other-0123456789"


@pytest.fixture
def guarded(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Stack, Path]]:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {ACME}\nother {OTHER}\n")
    options = (f"--api-keys={keys}",)
    with Stack(model=tiny_model, num_blocks=256, worker=TINY_WORKER, scheduler=options) as stack:
        yield stack, keys


def test_a_streams_calls_are_its_tenants_as_long_as_its_key_is_good(
    guarded: tuple[Stack, Path],
) -> None:
    stack, keys = guarded

    async def main() -> None:
        async with (
            AsyncClient(stack.address, api_key=ACME) as acme,
            AsyncClient(stack.address, api_key=OTHER) as other,
        ):
            mine = acme.stream(PROMPT, greedy(450), request_id="same")
            theirs = other.stream(token_prompt(40, salt=3), greedy(450), request_id="same")
            assert (await anext(mine)).num_prompt_tokens == 30
            assert (await anext(theirs)).num_prompt_tokens == 40
            for client, num_prompt_tokens in ((acme, 30), (other, 40)):
                (summary,) = await client.list_requests()
                assert summary.num_prompt_tokens == num_prompt_tokens
            # One's end is not the other's.
            await theirs.aclose()
            with pytest.raises(octavo.AlreadyExistsError):
                await acme.generate(PROMPT, greedy(5), request_id="same")
            # What was begun goes on; what begins on the same stream is refused.
            await asyncio.to_thread(lose_acme)
            with pytest.raises(octavo.UnauthenticatedError):
                await acme.generate(PROMPT, greedy(5))
            tokens = [t async for chunk in mine for c in chunk.candidates for t in c.token_ids]
            assert len(tokens) == 450

    def lose_acme() -> None:
        keys.write_text(f"other {OTHER}\n")
        stack.processes["scheduler"].send_signal(1)
        wait_until(lambda: "API keys read again" in stack.logs(), "the keys are read again")

    run(main())


def test_a_finish_reason_and_what_matched_are_told(tiny: Stack) -> None:
    """Every field of a reply has its way over the stream."""
    request = request_of("whole", 30)
    stub = inference_pb2_grpc.InferenceStub(tiny.channel())
    first = list(stub.Generate(request, timeout=30))
    stop_at = [d.token_ids[0] for reply in first for d in reply.deltas][12]
    request.params.ignore_eos = False
    request.params.stop_token_ids.append(stop_at)
    reference = list(stub.Generate(request, timeout=30))

    async def main() -> None:
        async with calls_of(tiny.address) as calls:
            await calls.begin(1, request)
            replies = []
            while True:
                message = await calls.rpc.read()
                replies += [news.reply for news in message.calls if news.HasField("reply")]
                if any(news.HasField("end") for news in message.calls):
                    break
            assert whole(replies) == whole(reference)
            assert replies[-1].deltas[0].finish_reason == types_pb2.FINISH_REASON_STOP
            assert replies[-1].deltas[0].stop_token_id == stop_at

    run(main())
    tiny.wait_until_empty()


def whole(replies: list[pb.GenerateReply]) -> dict[str, object]:
    """What replies say together, however they were merged."""
    deltas = [delta for reply in replies for delta in reply.deltas]
    return {
        "header": (replies[0].request_id, replies[0].num_prompt_tokens),
        "tokens": [id_ for delta in deltas for id_ in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "logprob": deltas[-1].cumulative_logprob,
        "end": (deltas[-1].finish_reason, deltas[-1].WhichOneof("matched")),
    }
