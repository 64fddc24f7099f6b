"""An AsyncClient's calls to one address share a stream, and nothing else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

import octavo
from octavo import AsyncClient, _multiplex
from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Act, Fail, Hang, ScriptedPeer, accepted, delta

STOP = types_pb2.FINISH_REASON_STOP
WHOLE: list[Act] = [accepted(), delta(0, "a", 1), delta(0, "b", 2, finish_reason=STOP)]
HANGS: list[Act] = [accepted(), delta(0, "a", 1), Hang()]
PATIENCE_S = 30

Test = Callable[[AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture
def run(peer: ScriptedPeer, address: str) -> Callable[[Test], None]:
    """Runs a test with a client of `peer`."""

    def run_test(test: Test) -> None:
        async def main() -> None:
            async with asyncio.timeout(PATIENCE_S), AsyncClient(address) as client:
                await test(client)

        asyncio.run(main())

    return run_test


async def hanging(client: AsyncClient, peer: ScriptedPeer, **options: Any) -> Any:
    """A stream that has brought its first chunks, and brings no more."""
    peer.script = HANGS
    chunks = client.stream("p", **options)
    assert [(await anext(chunks)).text for _ in range(2)] == ["", "a"]
    return chunks


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# ---- one stream ----


def test_calls_at_a_time_share_a_stream_and_later_ones_have_another(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    async def test(client: AsyncClient) -> None:
        first = await hanging(client, peer)
        peer.script = WHOLE
        answers = await asyncio.gather(*(client.generate(f"p{i}") for i in range(5)))
        assert [answer.text for answer in answers] == ["ab"] * 5
        assert (await client.chat("p")).text == "ab"
        assert peer.num_streams == 1
        await first.aclose()
        # With its last call the stream ends, and nothing of it is left.
        assert (await client.generate("p")).text == "ab"
        assert peer.num_streams == 2

    run(test)
    assert {call.request.prompt for call in peer.of("Generate")} >= {f"p{i}" for i in range(5)}


def test_a_full_stream_is_followed_by_another(
    run: Callable[[Test], None], peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_multiplex, "MAX_CALLS", 2)

    async def test(client: AsyncClient) -> None:
        kept = [await hanging(client, peer) for _ in range(5)]
        assert peer.num_streams == 3
        for chunks in kept:
            await chunks.aclose()

    run(test)


def test_a_big_request_goes_by_itself(run: Callable[[Test], None], peer: ScriptedPeer) -> None:
    big = "x" * (_multiplex.MAX_REQUEST_BYTES + 1)

    async def test(client: AsyncClient) -> None:
        first = await hanging(client, peer)
        peer.script = WHOLE
        assert (await client.generate(big)).text == "ab"
        assert peer.calls[-1].request.prompt == big
        # It is known by this: on a stream a call has no deadline of its own on the wire.
        assert peer.calls[-1].time_remaining_s > 0 > peer.calls[0].time_remaining_s
        with pytest.raises(octavo.OverloadedError):
            await client.generate(16 * big)  # more than a message may have
        peer.script = WHOLE
        assert (await client.generate("p")).text == "ab"
        assert peer.num_streams == 1
        await first.aclose()

    run(test)


def test_nothing_is_left_of_a_client_that_is_dropped(
    peer: ScriptedPeer, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    peer.script = WHOLE

    async def main() -> None:
        client = AsyncClient(address)
        assert (await client.generate("p")).text == "ab"
        dropped = client.stream("p")
        await anext(dropped)
        del client, dropped
        gc.collect()
        async with asyncio.timeout(PATIENCE_S):
            ours = {"_Stream._read", "_Stream._write"}
            await until(
                lambda: (
                    not any(
                        getattr(task.get_coro(), "__qualname__", "") in ours
                        for task in asyncio.all_tasks()
                    )
                )
            )

    asyncio.run(main())
    assert "never retrieved" not in capfd.readouterr().err


# ---- and nothing else ----


def test_the_end_of_one_is_not_the_others(run: Callable[[Test], None], peer: ScriptedPeer) -> None:
    """Refused, left, cancelled or too late."""

    async def test(client: AsyncClient) -> None:
        beside = await hanging(client, peer)
        peer.script = [ServiceError("PROMPT_TOO_LONG", "no")]
        with pytest.raises(octavo.InvalidArgumentError):
            await client.generate("p")
        left = await hanging(client, peer)
        await left.aclose()
        await asyncio.to_thread(peer.of("Generate")[2].gone.wait, PATIENCE_S)
        cancelled = asyncio.create_task(client.generate("p"))
        await until(lambda: len(peer.of("Generate")) == 4)
        cancelled.cancel()
        await asyncio.to_thread(peer.of("Generate")[3].gone.wait, PATIENCE_S)
        with pytest.raises(octavo.DeadlineExceededError):
            await client.generate("p", timeout_s=0.1)
        await asyncio.to_thread(peer.of("Generate")[4].gone.wait, PATIENCE_S)
        assert peer.num_streams == 1
        assert [call.gone.is_set() for call in peer.of("Generate")] == [False, *[True] * 4]
        await beside.aclose()

    run(test)


def test_a_read_that_is_given_up_loses_nothing(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    async def test(client: AsyncClient) -> None:
        chunks = await hanging(client, peer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(chunks), 0.05)
        # One that is there already when its reader is cancelled.
        call = chunks._call
        reading = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        call.take(delta(0, "b", 2, token_offset=1))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await anext(chunks)).text == "b"
        await chunks.aclose()

    run(test)


def test_what_is_read_late_is_whole_and_holds_no_message(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    num_tokens = 200

    async def test(client: AsyncClient) -> None:
        beside = await hanging(client, peer)
        peer.script = [
            accepted(),
            *(delta(0, f"{i},", i, token_offset=i) for i in range(num_tokens)),
            delta(0, "", finish_reason=STOP, token_offset=num_tokens),
        ]
        late = client.stream("p")
        held = late._call._held
        timer = late._call.timer
        await until(lambda: len(held) == num_tokens + 2 and late._call._ended)
        assert timer.cancelled()
        kept = [reply for reply in held if not isinstance(reply, bytes)]
        assert len(kept) == _multiplex.MAX_HELD_REPLIES
        texts = [chunk.text async for chunk in late]
        assert texts == ["", *(f"{i}," for i in range(num_tokens)), ""]
        assert late.generation().candidates[0].token_ids == tuple(range(num_tokens))
        await beside.aclose()

    run(test)


# ---- streams that break, or are refused ----


def test_all_calls_of_a_broken_stream_go_on(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    """The stream of all breaks when one of its calls has the network fail."""

    async def test(client: AsyncClient) -> None:
        first = [await hanging(client, peer) for _ in range(3)]
        peer.earlier = [[accepted(), Fail(grpc.StatusCode.UNAVAILABLE, "Socket closed")]]
        peer.script = [accepted(), delta(0, "b", 2, token_offset=1, finish_reason=STOP)]
        reading = [asyncio.ensure_future(anext(chunks)) for chunks in first]
        breaking = client.stream("p")
        await anext(breaking)
        assert [(await chunk).text for chunk in reading] == ["b"] * 3
        assert peer.num_streams > 1
        for chunks in first:
            assert [chunk async for chunk in chunks] == []
            assert chunks.generation().text == "ab"
        await breaking.aclose()

    run(test)


def test_an_older_server_is_not_asked_again_and_again(
    run: Callable[[Test], None], peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.multiplexes = False
    peer.script = WHOLE

    async def test(client: AsyncClient) -> None:
        for answers in (await asyncio.gather(*(client.generate("p") for _ in range(4))),):
            assert [answer.text for answer in answers] == ["ab"] * 4
        peer.multiplexes = True
        assert (await client.chat("p")).text == "ab"
        assert peer.num_streams == 0
        # But when it has had time to become a newer one.
        (multiplexer,) = client._transport._multiplexers.values()
        multiplexer._single_until_s -= _multiplex.SINGLE_S
        assert (await client.chat("p")).text == "ab"
        assert peer.num_streams == 1

    run(test)
    assert all(call.time_remaining_s > 0 for call in peer.calls[:-1])


def test_a_request_that_an_older_server_has_can_be_left(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    peer.multiplexes = False

    async def test(client: AsyncClient) -> None:
        chunks = await hanging(client, peer)
        await chunks.aclose()
        assert await asyncio.to_thread(peer.calls[0].gone.wait, PATIENCE_S)

    run(test)


def test_a_deadline_holds_at_an_older_server(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    peer.multiplexes = False
    peer.script = HANGS

    async def test(client: AsyncClient) -> None:
        with pytest.raises(octavo.DeadlineExceededError):
            await client.generate("p", timeout_s=0.2)
        assert 0 < peer.calls[0].time_remaining_s <= 0.2

    run(test)


LONG = "p" * 500_000
REFUSED = ServiceError("UNAUTHENTICATED", "not with this key")


def test_why_the_first_stream_is_refused_is_told_at_once(peer: ScriptedPeer, address: str) -> None:
    """Though grpc.aio keeps it for itself where something is being written at that moment."""
    peer.refuses_streams = REFUSED

    async def main() -> None:
        for number in range(60):
            async with AsyncClient(address, connect_timeout_s=0) as client:
                with pytest.raises(octavo.UnauthenticatedError, match="not with this key"):
                    await client.generate(LONG if number % 2 else "p")

    asyncio.run(main())


def test_why_a_later_stream_is_refused_is_told(
    run: Callable[[Test], None], peer: ScriptedPeer
) -> None:
    """That one is written to at once."""
    peer.script = WHOLE

    async def test(client: AsyncClient) -> None:
        for number in range(60):
            peer.refuses_streams = None
            assert (await client.generate("p")).text == "ab"
            (multiplexer,) = client._transport._multiplexers.values()
            assert multiplexer.is_trusted
            peer.refuses_streams = REFUSED
            with pytest.raises(octavo.UnauthenticatedError, match="not with this key"):
                await client.generate(LONG if number % 2 else "p")
            assert not multiplexer.is_trusted

    run(test)


def test_a_key_goes_with_the_stream(peer: ScriptedPeer, address: str) -> None:
    peer.script = WHOLE

    async def main() -> None:
        async with (
            AsyncClient(address, api_key="one") as one,
            AsyncClient(address, api_key="two") as two,
        ):
            await asyncio.gather(one.generate("1"), two.generate("2"), one.chat("1"))

    asyncio.run(main())
    assert peer.num_streams == 2
    for call in peer.calls:
        request = call.request
        said = request.prompt if isinstance(request, pb.GenerateRequest) else "1"
        assert call.metadata["authorization"] == {"1": "Bearer one", "2": "Bearer two"}[said]
