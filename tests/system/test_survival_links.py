"""Connections break, and callers go away: requests go on, and end when nobody comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from octavo import Client, Generation
from octavo.admin import KvMemoryInspector
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, kvmem_pb2, types_pb2
from tests.system.requests import greedy, token_prompt
from tests.system.stack import STANDBY, Stack, wait_until
from tests.system.survival import MAX_TOKENS, Shape, make_whole, running

PROMPT = token_prompt(25, salt=5)


@pytest.fixture(autouse=True)
def whole(mortal: Stack) -> None:
    make_whole(mortal)


# ---- cuts ----


@pytest.mark.parametrize("link", ["client", "kvmem", "worker"])
def test_a_connection_breaks(
    mortal: Stack, expected: Mapping[Shape, Generation], link: str
) -> None:
    with running(mortal, expected) as streams:
        before = mortal.session_stats()
        for _ in range(2):
            mortal.links[link].cut()
            streams.wait_until_they_go_on()
    after = mortal.session_stats()
    assert after.worker_boot_id == before.worker_boot_id
    # The session to kvmem is resumed; the worker is taken over again, by the next session.
    assert after.epoch == before.epoch + (2 if link == "worker" else 0)


@pytest.mark.parametrize("link", ["client", "kvmem", "worker"])
def test_nothing_gets_through_for_a_while(
    mortal: Stack, expected: Mapping[Shape, Generation], link: str
) -> None:
    with running(mortal, expected):
        mortal.links[link].refuse()
        threading.Event().wait(1.0)
        mortal.links[link].heal()


def test_b05_the_scheduler_is_cut_off_from_kvmem_and_the_standby_is_not(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    """Nothing is closed and nobody is told: only the lease says that it is gone."""
    mortal.start_standby(direct=True)
    with (
        running(mortal, expected, [mortal.address, mortal.addresses[STANDBY]]),
        Client(mortal.addresses[STANDBY]) as other,
    ):
        mortal.links["kvmem"].silence()
        wait_until(lambda: other.health().serving, "the standby takes over")
        # The worker refuses it, which says as much as kvmem could, but for where to go.
        wait_until(lambda: mortal.stands_by("scheduler"), "the former one sends its callers away")
        mortal.links["kvmem"].heal()
    assert mortal.session_stats().holder_address == mortal.addresses[STANDBY]


# ---- callers on raw streams ----


class Received:
    """What a caller has of one request: it needs nothing else to come back."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.request = request
        self.token_ids: dict[int, list[int]] = {}
        self.finished: set[int] = set()

    def take(self, replies: Iterable[pb.GenerateReply]) -> Iterator[int]:
        """The number of tokens of candidate 0 so far, after each reply."""
        for reply in replies:
            for delta in reply.deltas:
                held = self.token_ids.setdefault(delta.index, [])
                assert delta.token_offset == len(held), "a token is left out, or comes twice"
                held.extend(delta.token_ids)
                if delta.finish_reason:
                    self.finished.add(delta.index)
            yield len(self.token_ids.get(0, ()))

    def request_again(self) -> pb.GenerateRequest:
        again = pb.GenerateRequest()
        again.CopyFrom(self.request)
        for index, token_ids in self.token_ids.items():
            again.attachment.received.add(index=index, token_ids=token_ids)
        return again


def raw_request(request_id: str, max_tokens: int, detach_ttl_ms: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id)
    request.prompt_token_ids.ids.extend(PROMPT)
    request.params.CopyFrom(
        types_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )
    request.attachment.CopyFrom(pb.Attachment(secret=b"only I know", detach_ttl_ms=detach_ttl_ms))
    return request


@contextmanager
def raw(address: str) -> Iterator[inference_pb2_grpc.InferenceStub]:
    """A connection of its own, as that of another process."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def is_live(stack: Stack, request_id: str) -> bool:
    with stack.client() as client:
        return any(live.request_id == request_id for live in client.list_requests())


def has_ended(inspector: KvMemoryInspector, request_id: str) -> bool:
    views = inspector.block_tables(request_id).sequences
    return all(view.finish_reason is not None for view in views)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_caller_vanishes_and_comes_back_from_elsewhere(mortal: Stack, goes_on: bool) -> None:
    """Before the request has ended, and after: then its result has waited."""
    with mortal.client() as client:
        wanted = client.generate(PROMPT, greedy(MAX_TOKENS)).candidates[0]
    received = Received(raw_request("comes back", MAX_TOKENS, detach_ttl_ms=30_000))
    with raw(mortal.address) as stub:
        arrivals = received.take(stub.Generate(received.request, timeout=60))
        while next(arrivals) < 20:
            pass
        mortal.links["client"].cut()
        with pytest.raises(grpc.RpcError):
            list(arrivals)
    num_tokens = len(received.token_ids[0])
    assert 20 <= num_tokens < MAX_TOKENS
    if goes_on:
        with mortal.inspector() as inspector:
            wait_until(lambda: has_ended(inspector, "comes back"), "it ends without its caller")
    with raw(mortal.addresses["scheduler"]) as stub:
        list(received.take(stub.Generate(received.request_again(), timeout=60)))
    assert received.finished == {0}
    assert received.token_ids[0] == list(wanted.token_ids)
    mortal.wait_until_empty()


def test_a_caller_that_never_comes_back_is_waited_for_and_no_longer(mortal: Stack) -> None:
    received = Received(raw_request("is gone", 400, detach_ttl_ms=700))
    with raw(mortal.address) as stub:
        replies = stub.Generate(received.request, timeout=60)
        for count in received.take(replies):
            if count == 5:
                break
        mortal.pause("worker")  # so that it cannot end before it is given up
        replies.cancel()
    assert is_live(mortal, "is gone")
    wait_until(lambda: not is_live(mortal, "is gone"), "the request is given up")
    mortal.go_on("worker")
    mortal.wait_until_empty()


def test_nobody_else_can_come_back_to_it(mortal: Stack) -> None:
    received = Received(raw_request("mine", MAX_TOKENS, detach_ttl_ms=30_000))
    with raw(mortal.address) as stub, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(received.take(stub.Generate(received.request))))
        wait_until(lambda: bool(received.token_ids), "it streams")
        other = Received(raw_request("mine", MAX_TOKENS, detach_ttl_ms=30_000))
        other.request.attachment.secret = b"I guess"
        with pytest.raises(grpc.RpcError) as refused:
            list(other.take(stub.Generate(other.request, timeout=60)))
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]
        reading.result()
    assert received.finished == {0}
    mortal.wait_until_empty()


# ---- between the last commit and the last emit ----


def test_the_scheduler_dies_when_the_end_is_committed_and_not_yet_told(
    mortal: Stack, expected: Mapping[Shape, Generation]
) -> None:
    """The reply that lets it tell the caller never arrives: kvmem knows the end, and alone."""
    shape, wanted = next(iter(expected.items()))
    with (
        mortal.client() as client,
        mortal.inspector() as inspector,
        ThreadPoolExecutor(1) as pool,
        client.stream(shape.prompt, shape.params, request_id="last words") as chunks,
    ):
        next(chunks)
        (view,) = inspector.block_tables("last words").sequences
        free = kvmem_pb2.Free(
            sequence_ids=[view.sequence_id], finish_reason=types_pb2.FINISH_REASON_LENGTH
        )
        end = kvmem_pb2.Op(free=free).SerializeToString()
        committed = mortal.links["kvmem"].keep_replies_once(lambda data: end in data)
        shown: list[int] = []

        def read() -> Generation:
            for chunk in chunks:
                shown.extend(token_id for part in chunk.candidates for token_id in part.token_ids)
            return chunks.generation()

        reading = pool.submit(read)
        assert committed.wait(60)
        wait_until(lambda: has_ended(inspector, "last words"), "the end is committed")
        # Its last token was computed, and is nobody's before kvmem has been heard.
        assert len(shown) < MAX_TOKENS
        mortal.kill("scheduler")
        mortal.links["kvmem"].heal()
        mortal.start("scheduler")
        answer = reading.result()
    assert answer.candidates[0].token_ids == wanted.candidates[0].token_ids
    assert answer.candidates[0].text == wanted.candidates[0].text
    assert answer.candidates[0].finish_reason == wanted.candidates[0].finish_reason
    mortal.wait_until_empty()
