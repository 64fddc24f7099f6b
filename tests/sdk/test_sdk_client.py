"""Both clients against a scripted peer over a real socket."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

import octavo
from octavo import AsyncClient, Client, FinishReason, Message, SamplingParams
from octavo.service.errors import ServiceError
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Fail, Hang, ScriptedPeer, accepted, delta

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
GONE_WITHIN_S = 30


def play_two_candidates(peer: ScriptedPeer) -> None:
    peer.script = [
        accepted("r1", seed=2**64 - 1, num_prompt_tokens=7),
        delta(0, "Par", 11),
        delta(1, "It is", 21, 22, cumulative_logprob=-0.5),
        delta(0, "is", 12, finish_reason=STOP, stop_string="\n", cumulative_logprob=-0.25),
        delta(1, "", 23, finish_reason=LENGTH, cumulative_logprob=-1.5),
    ]


def test_generate_folds_the_deltas_of_every_candidate(client: Any, peer: ScriptedPeer) -> None:
    play_two_candidates(peer)
    result = client.generate("The capital", SamplingParams(n=2))
    assert result == octavo.Generation(
        request_id="r1",
        seed=2**64 - 1,
        num_prompt_tokens=7,
        candidates=(
            octavo.Candidate(0, "Paris", (11, 12), FinishReason.STOP, "\n", -0.25),
            octavo.Candidate(1, "It is", (21, 22, 23), FinishReason.LENGTH, None, -1.5),
        ),
    )
    assert result.text == "Paris"


def test_every_parameter_reaches_the_server_and_none_is_absent(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    params = SamplingParams(
        temperature=0.0,
        top_k=-1,
        top_p=0.5,
        min_p=0.25,
        seed=2**63,
        n=1,
        first_sample_index=3,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "bc"],
        stop_token_ids=[5, 6],
        ignore_eos=False,
    )
    client.generate([4, 5], params, request_id="mine")
    client.generate("text")
    full, bare = (call.request for call in peer.calls)
    assert full.request_id == "mine"
    assert list(full.prompt_token_ids.ids) == [4, 5]
    assert full.params == types_pb2.SamplingParams(
        temperature=0.0,
        top_k=-1,
        top_p=0.5,
        min_p=0.25,
        seed=2**63,
        n=1,
        first_sample_index=3,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "bc"],
        stop_token_ids=[5, 6],
        ignore_eos=False,
    )
    assert full.params.HasField("temperature")
    assert full.params.HasField("ignore_eos")
    assert bare.params == types_pb2.SamplingParams()
    assert not bare.params.HasField("temperature")
    assert bare.prompt == "text"


def test_one_stop_string_is_not_taken_for_its_letters(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    client.generate("p", SamplingParams(stop="END"))
    assert list(peer.calls[0].request.params.stop) == ["END"]


def test_an_empty_prompt_of_either_kind_keeps_its_kind(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    client.generate("")
    client.generate([])
    assert [call.request.WhichOneof("input") for call in peer.calls] == [
        "prompt",
        "prompt_token_ids",
    ]


def test_chat_sends_the_conversation_and_a_string_is_one_user_message(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.script = [accepted(), delta(0, "Hello", 1, finish_reason=STOP)]
    conversation = [Message("system", "Be brief."), Message("user", "Hi")]
    assert client.chat(conversation).text == "Hello"
    client.chat("Hi")
    sent = [[(m.role, m.content) for m in call.request.messages] for call in peer.calls]
    assert sent == [[("system", "Be brief."), ("user", "Hi")], [("user", "Hi")]]


@pytest.mark.parametrize("method", ["stream", "stream_chat"])
def test_a_stream_carries_the_header_through_and_folds_to_the_same_result(
    client: Any, peer: ScriptedPeer, method: str
) -> None:
    play_two_candidates(peer)
    with getattr(client, method)("The capital", SamplingParams(n=2)) as chunks:
        received = list(chunks)
        assert next(chunks, None) is None
    assert len(received) == 5
    assert {(c.request_id, c.seed, c.num_prompt_tokens) for c in received} == {("r1", 2**64 - 1, 7)}
    assert received[0].candidates == ()
    assert [chunk.text for chunk in received] == ["", "Par", "", "is", ""]
    assert [c.text for c in chunks.generation().candidates] == ["Paris", "It is"]


def test_the_chunks_come_one_by_one_before_the_end(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), delta(0, "first", 1), Hang()]
    with client.stream("p") as chunks:
        next(chunks)
        assert next(chunks).text == "first"
        assert not peer.calls[0].gone.is_set()


def test_b09_closing_a_stream_cancels_the_call(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), delta(0, "first", 1), Hang()]
    with client.stream("p") as chunks:
        next(chunks)
    assert peer.calls[0].gone.wait(GONE_WITHIN_S)
    assert next(chunks, None) is None


def test_b09_breaking_out_of_a_loop_cancels_the_call(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), delta(0, "first", 1), Hang()]
    with Client(address) as client:
        for chunk in client.stream("p"):
            if chunk.text:
                break
        assert peer.calls[0].gone.wait(GONE_WITHIN_S)


def test_b09_breaking_out_of_an_async_loop_cancels_the_call(
    peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), delta(0, "first", 1), Hang()]

    async def main() -> bool:
        async with AsyncClient(address) as client:
            async for chunk in client.stream("p"):
                if chunk.text:
                    break
            return await asyncio.to_thread(peer.calls[0].gone.wait, GONE_WITHIN_S)

    assert asyncio.run(main())


def test_cancelling_the_task_cancels_the_call(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), Hang()]

    async def main() -> bool:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(client.generate("p"))
            while not peer.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(peer.calls[0].gone.wait, GONE_WITHIN_S)

    assert asyncio.run(main())


def test_a_stream_closed_by_another_thread_ends_quietly(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), Hang()]
    with Client(address) as client:
        stream = client.stream("p")
        next(stream)
        closer = threading.Timer(0.05, stream.close)
        closer.start()
        assert list(stream) == []
        closer.join()


def test_a_stream_closed_by_another_task_ends_quietly(peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), Hang()]

    async def main() -> list[object]:
        async with AsyncClient(address) as client:
            stream = client.stream("p")
            await anext(stream)
            asyncio.get_running_loop().call_later(
                0.05, lambda: asyncio.ensure_future(stream.aclose())
            )
            return [chunk async for chunk in stream]

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(
    ("reason", "error_class"),
    [
        ("PROMPT_TOO_LONG", octavo.InvalidArgumentError),
        ("UNKNOWN_MODEL", octavo.NotFoundError),
        ("REQUEST_EXISTS", octavo.AlreadyExistsError),
        ("QUEUE_FULL", octavo.OverloadedError),
        ("WORKER_LOST", octavo.UnavailableError),
        ("STALE_EPOCH", octavo.RpcError),
        ("INTERNAL", octavo.RpcError),
    ],
)
def test_a_reason_becomes_its_class_with_all_it_carries(
    impatient: Any, peer: ScriptedPeer, reason: str, error_class: type[octavo.OctavoError]
) -> None:
    peer.script = [ServiceError(reason, "told why", retry_after_ms=1500)]
    with pytest.raises(octavo.OctavoError) as raised:
        impatient.generate("p")
    error = raised.value
    assert type(error) is error_class
    assert (error.reason, error.message, error.retry_after_ms) == (reason, "told why", 1500)


def test_an_error_on_the_way_comes_after_the_chunks_before_it(
    client: Any, peer: ScriptedPeer
) -> None:
    peer.script = [accepted(), delta(0, "half", 1), ServiceError("INTERNAL", "a bug")]
    chunks = client.stream("p")
    assert [next(chunks).text, next(chunks).text] == ["", "half"]
    with pytest.raises(octavo.RpcError):
        next(chunks)
    assert next(chunks, None) is None


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, octavo.RpcError),
        (grpc.StatusCode.UNAVAILABLE, octavo.UnavailableError),
        (grpc.StatusCode.CANCELLED, octavo.RpcError),
    ],
)
def test_a_bare_status_maps_by_its_code(
    impatient: Any,
    peer: ScriptedPeer,
    code: grpc.StatusCode,
    error_class: type[octavo.OctavoError],
) -> None:
    peer.script = [Fail(code, "no details")]
    with pytest.raises(octavo.OctavoError) as raised:
        impatient.generate("p")
    assert type(raised.value) is error_class
    assert raised.value.reason == code.name
    assert raised.value.retry_after_ms is None


def test_a_call_past_its_deadline_raises_and_is_cancelled(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), Hang()]
    with pytest.raises(octavo.DeadlineExceededError):
        client.generate("p", timeout_s=0.2)
    assert peer.calls[0].gone.wait(GONE_WITHIN_S)


def test_every_call_has_a_deadline_of_its_own_kind(client: Any, peer: ScriptedPeer) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    client.generate("p")
    client.abort("live")
    client.model()
    client.tokenize("p")
    left = {call.method: call.time_remaining_s for call in peer.calls}
    if not peer.num_streams:  # among others on one stream it is the client that keeps it
        assert 500 < left["Generate"] < 601
    assert all(0 < left[name] < 6 for name in ("Abort", "GetModel", "Tokenize"))


def test_nobody_at_the_address(client_class: Any, socket_dir: Path) -> None:
    with client_class(f"unix:{socket_dir}/nobody.sock", connect_timeout_s=0.2) as client:
        for call in (lambda: client.generate("p"), client.health):
            with pytest.raises(octavo.UnavailableError):
                call()


def test_health_model_tokenize_abort_list(client: Any, peer: ScriptedPeer) -> None:
    assert client.health() == octavo.Health(serving=True, status="SERVING")
    peer.health.enter_graceful_shutdown()
    assert client.health() == octavo.Health(serving=False, status="NOT_SERVING")
    model = client.model()
    assert (model.name, model.eos_token_ids, model.geometry.block_size) == ("tiny", (2, 0), 16)
    assert client.tokenize("text") == (3, 1, 4)
    assert client.tokenize([Message("user", "Hi")]) == (3, 1, 4)
    assert [c.request.WhichOneof("input") for c in peer.calls[-2:]] == ["text", "chat"]
    assert client.abort("live") is True
    assert client.abort("ended") is False
    assert client.list_requests()[0].num_candidates == 2


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(n=-1), "n is -1"),
        (SamplingParams(n=2**32), "n is 4294967296"),
        (SamplingParams(seed=2**64), "seed is 18446744073709551616"),
        (SamplingParams(seed=-1), "seed is -1"),
        (SamplingParams(top_k=2**31), "top_k is 2147483648"),
        (SamplingParams(max_tokens=1.5), "max_tokens is 1.5"),  # type: ignore[arg-type]
        (SamplingParams(temperature="hot"), "temperature is 'hot'"),  # type: ignore[arg-type]
        (SamplingParams(stop_token_ids=[1, 2**31]), "stop_token_ids at position 1 is 2147483648"),
        (SamplingParams(stop="\ud800"), "stop at position 0"),
    ],
)
def test_b39_what_the_wire_cannot_carry_is_named_and_not_sent(
    client: Any, peer: ScriptedPeer, params: SamplingParams, named: str
) -> None:
    with pytest.raises(octavo.InvalidArgumentError, match="it must be") as raised:
        client.generate("p", params)
    assert named in raised.value.message
    assert raised.value.reason == "INVALID_PARAMETER"
    assert peer.calls == []


@pytest.mark.parametrize("prompt", [[1, 2**31], [1, -(2**31) - 1], "half a surrogate \udc00"])
def test_b34_a_prompt_the_wire_cannot_carry(client: Any, peer: ScriptedPeer, prompt: Any) -> None:
    with pytest.raises(octavo.InvalidArgumentError):
        client.generate(prompt)
    assert peer.calls == []


@pytest.mark.parametrize("address", ["", "nonsense", "host:99999", "unix:/" + "x" * 120, ":50"])
def test_a_bad_address_is_refused_at_once(client_class: Any, address: str) -> None:
    with pytest.raises(octavo.InvalidArgumentError):
        client_class(address)


@pytest.mark.parametrize(
    "script",
    [
        [accepted(), delta(1, "nobody asked", 1, finish_reason=STOP)],
        [accepted(), delta(0, "a", 1, finish_reason=STOP), delta(0, "b", 2, finish_reason=STOP)],
    ],
)
def test_an_answer_that_breaks_the_contract_is_an_error(
    client: Any, peer: ScriptedPeer, script: list[Any]
) -> None:
    peer.script = script
    with pytest.raises(octavo.RpcError) as raised:
        client.generate("p")
    assert raised.value.reason == "INTERNAL"


def test_a_closed_client_says_so(client_class: Any, address: str) -> None:
    with client_class(address) as client:
        client.health()
        client.close()
        for call in (lambda: client.generate("p"), client.health):
            with pytest.raises(octavo.UnavailableError) as raised:
                call()
            assert raised.value.reason == "CLIENT_CLOSED"


def test_a_stream_outliving_its_event_loop_is_harmless(
    peer: ScriptedPeer, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    peer.script = [accepted(), Hang()]
    kept = []

    async def main() -> None:
        client = AsyncClient(address)
        kept.append(client.stream("p"))
        await anext(kept[0])

    asyncio.run(main())
    kept.clear()
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err
