"""A request outlives its streams: servers that break off, move, refuse, repeat or die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import octavo
from octavo import AsyncClient, Client, FinishReason, SamplingParams
from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Act, Fail, Hang, ScriptedPeer, accepted, delta, serve
from tests.sdk.token_server import token

STOP = types_pb2.FINISH_REASON_STOP
LOST = Fail(grpc.StatusCode.UNAVAILABLE, "Socket closed")
BEGUN: list[Act] = [accepted(), delta(0, "a", 1, token_offset=0, cumulative_logprob=-0.5)]
REST: list[Act] = [accepted(), delta(0, "b", 2, token_offset=1, finish_reason=STOP)]
PROCESS_TIMEOUT_S = 60


def not_leader(holder_address: str) -> ServiceError:
    metadata = {"holder": "other", "holder_address": holder_address}
    return ServiceError("NOT_LEADER", "another one is", metadata=metadata)


@pytest.fixture
def second_peer() -> ScriptedPeer:
    return ScriptedPeer()


@pytest.fixture
def second_address(second_peer: ScriptedPeer, socket_dir: Path) -> Iterator[str]:
    socket = socket_dir / "second.sock"
    server = serve(second_peer, socket)
    yield f"unix:{socket}"
    server.stop(grace=0).wait()


def texts(client: Any, **options: Any) -> list[str]:
    with client.stream("p", **options) as chunks:
        received = [chunk.text for chunk in chunks]
        assert chunks.generation().text == "".join(received)
    return received


# ---- what breaks, and is come back from ----


@pytest.mark.parametrize(
    "end",
    [
        [LOST],
        [],  # in peace, and too early
        *(
            [ServiceError(reason, "for a while")]
            for reason in (
                "NOT_READY",
                "NOT_LEADER",
                "DRAINING",
                "KVMEM_LOST",
                "WORKER_LOST",
                "JOURNAL_FAILED",
                "QUEUE_FULL",
            )
        ),
    ],
    ids=str,
)
def test_a_broken_stream_is_gone_on_with(client: Any, peer: ScriptedPeer, end: list[Act]) -> None:
    peer.earlier = [[*BEGUN, *end], list(end) or [LOST]]
    peer.script = REST
    assert texts(client) == ["", "a", "b"]
    first, second, third = (call.request for call in peer.calls)
    assert len(first.attachment.secret) == 16
    assert first.attachment.detach_ttl_ms == 10_000
    assert not first.attachment.received
    assert not first.attachment.HasField("drawn_seed")
    assert second.request_id == first.request_id
    assert second.attachment == pb.Attachment(
        secret=first.attachment.secret,
        detach_ttl_ms=10_000,
        received=[pb.ReceivedCandidate(index=0, token_ids=[1], cumulative_logprob=-0.5)],
        drawn_seed=42,
    )
    assert third == second


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_whole_answers_come_back_too(client: Any, peer: ScriptedPeer, method: str) -> None:
    peer.earlier = [[*BEGUN, LOST]]
    peer.script = REST
    answer = getattr(client, method)("p", detach_ttl_s=2.5)
    assert (answer.text, answer.candidates[0].token_ids) == ("ab", (1, 2))
    assert [call.request.attachment.detach_ttl_ms for call in peer.calls] == [2500, 2500]


def test_every_candidate_says_how_far_it_is(client: Any, peer: ScriptedPeer) -> None:
    peer.earlier = [
        [accepted(), delta(1, "x", 7, finish_reason=STOP, stop_string="\n"), delta(0, "a", 1), LOST]
    ]
    peer.script = [accepted(), delta(0, "b", 2, token_offset=1, finish_reason=STOP)]
    answer = client.generate("p", SamplingParams(n=2))
    assert [each.token_ids for each in answer.candidates] == [(1, 2), (7,)]
    assert answer.candidates[1].matched_stop == "\n"
    told = peer.calls[1].request.attachment.received
    assert [(each.index, list(each.token_ids), each.finish_reason) for each in told] == [
        (0, [1], 0),
        (1, [7], STOP),
    ]


def test_a_stream_that_breaks_after_the_last_end_is_complete(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.script = [accepted(), delta(0, "a", 1, finish_reason=STOP), LOST]
    assert texts(client) == ["", "a"]
    assert [call.method for call in peer.calls] == ["Generate"]


def test_before_the_first_reply_it_comes_back_as_well(client: Any, peer: ScriptedPeer) -> None:
    peer.earlier = [[LOST], [ServiceError("NOT_READY", "loading")]]
    peer.script = [*BEGUN, *REST[1:]]
    assert texts(client) == ["", "a", "b"]
    assert len(peer.calls) == 3


def test_two_requests_have_two_secrets(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [*BEGUN, *REST[1:]]
    client.generate("p")
    client.generate("p")
    assert len({call.request.attachment.secret for call in peer.calls}) == 2


@pytest.mark.parametrize("ttl_s", [-1, 2**32, float("nan"), float("inf")])
def test_a_ttl_that_the_wire_cannot_carry(client: Any, peer: ScriptedPeer, ttl_s: float) -> None:
    with pytest.raises(octavo.InvalidArgumentError, match="detach_ttl_s"):
        client.stream("p", detach_ttl_s=ttl_s)
    assert peer.calls == []


# ---- what is not come back from ----


@pytest.mark.parametrize(
    ("reason", "begun"),
    [
        ("INVALID_PARAMETER", False),
        ("REQUEST_EXISTS", False),
        ("REQUEST_EXISTS", True),
        ("ATTACH_REPLACED", True),
        ("UNKNOWN_REQUEST", True),
        ("UNKNOWN_MODEL", False),
        ("UNAUTHENTICATED", False),
        ("UNAUTHENTICATED", True),
        ("QUEUE_FULL", False),
        ("STALE_EPOCH", True),
        ("INTERNAL", True),
    ],
)
def test_a_refusal_is_told_at_once(
    client: Any, peer: ScriptedPeer, reason: str, begun: bool
) -> None:
    peer.script = [*(BEGUN if begun else []), ServiceError(reason, "no")]
    with pytest.raises(octavo.OctavoError) as raised:
        client.generate("p", request_id="mine")
    assert raised.value.reason == reason
    client.close()
    # Nor is whoever has that id aborted.
    assert [call.method for call in peer.calls] == ["Generate"]


def test_a_refusal_after_a_break_is_told_at_once(client: Any, peer: ScriptedPeer) -> None:
    peer.earlier = [[*BEGUN, LOST]]
    peer.script = [ServiceError("REQUEST_EXISTS", "another one's")]
    chunks = client.stream("p")
    assert [next(chunks).text, next(chunks).text] == ["", "a"]
    with pytest.raises(octavo.AlreadyExistsError):
        next(chunks)
    assert len(peer.of("Generate")) == 2
    with pytest.raises(octavo.AlreadyExistsError):
        chunks.generation()


def test_its_own_late_attempt_that_took_the_request_is_replaced_in_turn(
    client: Any, peer: ScriptedPeer
) -> None:
    """The first attempt is given up unanswered and reaches the server after the second one."""
    replaced = ServiceError("ATTACH_REPLACED", "another stream has attached")
    peer.earlier = [[LOST], [*BEGUN, replaced]]
    peer.script = REST
    assert texts(client) == ["", "a", "b"]
    assert len(peer.of("Generate")) == 3
    assert peer.of("Abort") == []


def test_a_request_that_somebody_else_took_twice_is_theirs(client: Any, peer: ScriptedPeer) -> None:
    replaced = ServiceError("ATTACH_REPLACED", "another stream has attached")
    peer.earlier = [[LOST], [*BEGUN, replaced], [accepted(), replaced]]
    peer.script = REST
    with pytest.raises(octavo.OctavoError) as raised:
        client.generate("p")
    assert raised.value.reason == "ATTACH_REPLACED"
    client.close()
    assert len(peer.of("Generate")) == 3
    assert peer.of("Abort") == []


def test_time_that_runs_out_raises_the_last_error_and_aborts(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.earlier = [[*BEGUN, ServiceError("KVMEM_LOST", "gone")]]
    peer.script = [ServiceError("WORKER_LOST", "gone too")]
    with pytest.raises(octavo.UnavailableError) as raised:
        client.generate("p", timeout_s=0.5)
    assert raised.value.reason == "WORKER_LOST"
    assert len(peer.of("Generate")) > 2
    client.close()
    (abort,) = peer.of("Abort")
    assert abort.request.attach_secret == peer.calls[0].request.attachment.secret


def test_time_that_runs_out_in_an_attempt_nobody_answers(client: Any, peer: ScriptedPeer) -> None:
    """Told by what went wrong, not by the deadline, which says nothing."""
    peer.earlier = [[*BEGUN, ServiceError("KVMEM_LOST", "gone")]]
    peer.script = [Hang()]
    with pytest.raises(octavo.UnavailableError) as raised:
        client.generate("p", timeout_s=0.4)
    assert raised.value.reason == "KVMEM_LOST"
    client.close()
    assert len(peer.of("Abort")) == 1


def test_a_deadline_that_passes_aborts_the_request(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [*BEGUN, Hang()]
    with pytest.raises(octavo.DeadlineExceededError):
        client.generate("p", timeout_s=0.3)
    client.close()
    assert len(peer.of("Abort")) == 1


def test_a_stream_that_is_always_cut_short_is_an_error_in_the_end(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.earlier = [BEGUN]
    peer.script = []
    with pytest.raises(octavo.RpcError, match="before candidate 0 had finished"):
        client.generate("p", timeout_s=0.3)


def test_nobody_accepts_it_in_time(client_class: Any, peer: ScriptedPeer, address: str) -> None:
    peer.script = [ServiceError("NOT_READY", "loading")]
    with client_class(address, connect_timeout_s=0.3) as client:
        with pytest.raises(octavo.UnavailableError) as raised:
            client.generate("p")
        assert raised.value.reason == "NOT_READY"
    assert len(peer.of("Generate")) > 1


def test_zero_is_one_attempt(impatient: Any, peer: ScriptedPeer) -> None:
    peer.script = [ServiceError("NOT_READY", "loading")]
    with pytest.raises(octavo.UnavailableError):
        impatient.generate("p")
    assert len(peer.of("Generate")) == 1


@pytest.mark.parametrize(
    "rest",
    [
        [accepted(), delta(0, "a", 1, token_offset=0, finish_reason=STOP)],  # again
        [accepted(), delta(0, "c", 3, token_offset=2, finish_reason=STOP)],  # one left out
        [accepted(seed=43), delta(0, "b", 2, token_offset=1, finish_reason=STOP)],  # another one
    ],
)
def test_what_does_not_continue_is_refused_and_aborted(
    client: Any, peer: ScriptedPeer, rest: list[Act]
) -> None:
    peer.earlier = [[*BEGUN, LOST]]
    peer.script = rest
    chunks = client.stream("p")
    assert [next(chunks).text, next(chunks).text] == ["", "a"]
    with pytest.raises(octavo.RpcError) as raised:
        next(chunks)
    assert raised.value.reason == "INTERNAL"
    client.close()
    assert len(peer.of("Abort")) == 1
    assert len(peer.of("Generate")) == 2


# ---- leaving ----


def test_leaving_early_aborts_the_request(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(request_id="mine"), Hang()]
    with client.stream("p", request_id="mine") as chunks:
        next(chunks)
    client.close()
    (abort,) = peer.of("Abort")
    secret = peer.calls[0].request.attachment.secret
    assert (abort.request.request_id, abort.request.attach_secret) == ("mine", secret)


def test_dropping_a_stream_aborts_the_request(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(request_id="dropped"), Hang()]
    with Client(address) as client:
        next(client.stream("p"))
        (abort,) = peer.wait_for("Abort")
    assert abort.request.request_id == "dropped"


def test_a_client_that_is_dropped_leaves_no_thread(peer: ScriptedPeer, address: str) -> None:
    peer.script = [*BEGUN, *REST[1:]]
    client = Client(address)
    client.generate("p")
    thread = client._aborter._thread
    assert thread.is_alive()
    del client
    gc.collect()
    thread.join(PROCESS_TIMEOUT_S)
    assert not thread.is_alive()


def test_dropping_an_async_stream_or_its_task_aborts_the_request(
    peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), Hang()]

    async def main() -> None:
        async with AsyncClient(address) as client:
            await anext(client.stream("p"))
            await asyncio.to_thread(peer.wait_for, "Abort", 1)
            task = asyncio.create_task(client.generate("p"))
            await asyncio.to_thread(peer.wait_for, "Generate", 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(peer.wait_for, "Abort", 2)

    asyncio.run(main())


def test_closing_the_client_aborts_what_is_open(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [*BEGUN, Hang()]
    chunks = client.stream("p")
    next(chunks)
    client.close()
    # It waited for that to be sent.
    assert len(peer.of("Abort")) == 1
    assert list(chunks) == []
    with pytest.raises(octavo.UnavailableError) as raised:
        chunks.generation()
    assert raised.value.reason == "CLIENT_CLOSED"


def test_a_complete_answer_is_not_aborted(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [*BEGUN, *REST[1:]]
    client.generate("p")
    with client.stream("p") as chunks:  # left after the last chunk, but before the call's end
        assert [next(chunks).text for _ in range(3)] == ["", "a", "b"]
    client.close()
    assert peer.of("Abort") == []


WAIT: list[Act] = [*BEGUN, ServiceError("QUEUE_FULL", "later", retry_after_ms=60_000)]


def test_closing_while_it_waits_to_come_back(peer: ScriptedPeer, address: str) -> None:
    """Whoever iterates is woken, and no stream is opened any more."""
    peer.script = WAIT
    with Client(address) as client:
        stream = client.stream("p")

        def close_after_error() -> None:
            while not stream._reconnect.num_reconnects:
                time.sleep(0.01)
            stream.close()

        closer = threading.Thread(target=close_after_error)
        closer.start()
        assert [chunk.text for chunk in stream] == ["", "a"]
        closer.join()
    assert len(peer.of("Generate")) == 1


def test_closing_an_async_stream_while_it_waits_to_come_back(
    peer: ScriptedPeer, address: str
) -> None:
    peer.script = WAIT

    async def main() -> None:
        async with AsyncClient(address) as client:
            stream = client.stream("p")

            async def close_after_error() -> None:
                while not stream._reconnect.num_reconnects:
                    await asyncio.sleep(0.01)
                await stream.aclose()

            closing = asyncio.create_task(close_after_error())
            assert [chunk.text async for chunk in stream] == ["", "a"]
            await closing

    asyncio.run(main())
    assert len(peer.of("Generate")) == 1


# Python leaves SIGINT ignored where it was when it started, as below a shell's `&`.
INTERRUPTIBLE = """
import signal
from octavo.cli.app import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def test_ctrl_c_aborts_the_request(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), delta(0, "so far", 1), Hang()]
    command = [sys.executable, "-c", INTERRUPTIBLE, "generate", "p", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peer.wait_for("Generate")
        assert process.stdout is not None
        assert process.stdout.read(6) == "so far"
        process.send_signal(signal.SIGINT)
        (abort,) = peer.wait_for("Abort")
        assert process.wait(PROCESS_TIMEOUT_S) == 130
    assert abort.request.attach_secret == peer.calls[0].request.attachment.secret


# ---- several servers ----


def test_it_goes_straight_to_the_holder_and_stays_there(
    client: Any, peer: ScriptedPeer, second_peer: ScriptedPeer, second_address: str
) -> None:
    peer.script = [not_leader(second_address)]
    second_peer.script = [*BEGUN, *REST[1:]]
    assert client.generate("p").text == "ab"
    assert client.generate("p").text == "ab"
    assert (len(peer.calls), len(second_peer.calls)) == (1, 2)


def test_the_next_address_is_tried_in_turn(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    second_peer: ScriptedPeer,
    second_address: str,
) -> None:
    peer.script = [*BEGUN, LOST]
    second_peer.script = REST
    with client_class([address, second_address]) as client:
        assert texts(client) == ["", "a", "b"]
    assert (len(peer.calls), len(second_peer.calls)) == (1, 1)


def test_one_string_may_hold_several(
    client_class: Any, socket_dir: Path, peer: ScriptedPeer, address: str
) -> None:
    peer.script = [*BEGUN, *REST[1:]]
    with client_class(f"unix:{socket_dir}/nobody.sock, {address}") as client:
        assert client.generate("p").text == "ab"
        assert client.model().name == "tiny"


@pytest.mark.parametrize("addresses", [[], ["unix:/a", "nonsense"], "unix:/a,,unix:/b", ","])
def test_bad_addresses_are_refused_at_once(client_class: Any, addresses: Any) -> None:
    with pytest.raises(octavo.InvalidArgumentError):
        client_class(addresses)


def test_unary_calls_ask_until_one_answers(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    second_peer: ScriptedPeer,
    second_address: str,
) -> None:
    peer.refuses = not_leader("")
    with client_class([address, second_address]) as client:
        assert client.model().name == "tiny"
        assert client.tokenize("p") == (3, 1, 4)
        assert client.list_requests()[0].request_id == "r1"
        peer.health.enter_graceful_shutdown()
        assert client.health().serving
        second_peer.health.enter_graceful_shutdown()
        assert not client.health().serving
        second_peer.refuses = ServiceError("UNKNOWN_MODEL", "no")
        with pytest.raises(octavo.NotFoundError):
            client.model()


def test_an_abort_reaches_the_owner(
    client_class: Any,
    peer: ScriptedPeer,
    address: str,
    second_peer: ScriptedPeer,
    second_address: str,
) -> None:
    with client_class([address, second_address]) as client:
        assert client.abort("ended") is False
        assert (len(peer.calls), len(second_peer.calls)) == (1, 1)
        assert client.abort("live") is True
        assert (len(peer.calls), len(second_peer.calls)) == (2, 1)
        peer.refuses = ServiceError("NOT_READY", "loading")
        assert client.abort("live") is True
        assert len(second_peer.calls) == 2
    assert peer.calls[0].request.attach_secret == b""


# ---- servers that die ----

NUM_TOKENS = 60
NEVER = NUM_TOKENS + 1


@contextlib.contextmanager
def token_server(socket: Path, stall_after: int = NEVER) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.sdk.token_server", str(socket), str(stall_after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield process
        finally:
            process.kill()


def check_answer(chunks: Any, received: list[octavo.Chunk]) -> None:
    """Every token once and in order, whoever made it."""
    answer = chunks.generation()
    for index, candidate in enumerate(answer.candidates):
        positions = range(NUM_TOKENS - 10 * index)
        expected = tuple(token(answer.seed, index, position) for position in positions)
        streamed = [part for chunk in received for part in chunk.candidates if part.index == index]
        assert tuple(id_ for part in streamed for id_ in part.token_ids) == expected
        assert candidate.token_ids == expected
        assert candidate.text == "".join(f"{position}," for position in positions)
        assert candidate.finish_reason is FinishReason.LENGTH
        assert candidate.cumulative_logprob == -float(len(positions))


def test_a_killed_server_costs_no_token(client_class: Any, socket_dir: Path) -> None:
    """The second goes on for the first, which is killed; then the first's successor for it."""
    first, second = socket_dir / "a.sock", socket_dir / "b.sock"
    params = SamplingParams(n=3, max_tokens=NUM_TOKENS)
    received: list[octavo.Chunk] = []
    with (
        token_server(second, stall_after=20) as second_process,
        client_class([f"unix:{first}", f"unix:{second}"]) as client,
    ):
        with token_server(first, stall_after=20) as process:
            chunks = client.stream("p", params)
            received += [next(chunks) for _ in range(15)]
            process.kill()
            process.wait()
            received += [next(chunks) for _ in range(15)]
        first.unlink()
        with token_server(first):
            second_process.kill()
            received += list(chunks)
    check_answer(chunks, received)


def test_a_server_that_is_started_again_is_waited_for(client_class: Any, socket_dir: Path) -> None:
    socket = socket_dir / "a.sock"
    params = SamplingParams(n=3, max_tokens=NUM_TOKENS)
    with client_class(f"unix:{socket}") as client:
        with token_server(socket, stall_after=20):
            chunks = client.stream("p", params)
            received = [next(chunks) for _ in range(15)]
        socket.unlink()
        with token_server(socket):
            received += list(chunks)
    check_answer(chunks, received)
