"""A process dies, stops or is told to go: who is told what, and that service returns.

(That no request is lost by it is in `test_survival.py`.)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from octavo import (
    Client,
    DeadlineExceededError,
    Generation,
    SamplingParams,
    UnavailableError,
)
from octavo.client import ChunkStream
from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.system.models import TINY_WORKER, Transformers
from tests.system.requests import greedy, token_prompt
from tests.system.stack import STANDBY, Stack, wait_until
from tests.system.survival import make_whole

PROMPT = token_prompt(40, salt=17)
LONG = 400
NUM_BLOCKS = 40
LOST = {"worker": "WORKER_LOST", "kvmem": "KVMEM_LOST"}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[Stack]:
    with Stack(
        model=tiny_model,
        num_blocks=NUM_BLOCKS,
        worker=TINY_WORKER,
        scheduler=("--max-num-seqs=3", "--recovery-timeout-s=1"),
        journal=True,
    ) as stack:
        yield stack


@pytest.fixture
def fragile(shared: Stack) -> Stack:
    """A stack that serves, whatever the test before has left of it."""
    make_whole(shared)
    return shared


@pytest.fixture
def client(fragile: Stack) -> Iterator[Client]:
    with fragile.client() as client:
        yield client


def drain(chunks: ChunkStream) -> Generation:
    for _ in chunks:
        pass
    return chunks.generation()


def open_streams(client: Client, count: int) -> list[ChunkStream]:
    """`count` long requests that are accepted; three of them run, the others wait."""
    streams = [client.stream(PROMPT, greedy(LONG)) for _ in range(count)]
    for stream in streams:
        next(stream)
    for stream in streams[:3]:
        next(stream)
    return streams


def assert_all_right(streams: list[ChunkStream], reference: Transformers) -> None:
    """Each stream goes on to its end, and nobody can tell that something happened."""
    expected = reference.greedy(PROMPT, LONG)
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = list(pool.map(drain, streams))
    for answer in answers:
        assert expected.disagreement(answer.candidates[0].token_ids) is None


def assert_serves_right(stack: Stack, reference: Transformers) -> None:
    """A request that needs nearly the whole pool is served, and the pool is empty after."""
    prompt = token_prompt(460, salt=18)
    expected = reference.greedy(prompt, 50)
    with stack.client() as client:
        answer = client.generate(prompt, greedy(50), timeout_s=60)
    assert expected.disagreement(answer.candidates[0].token_ids) is None
    stack.wait_until_empty()


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_b44_a_peer_that_stays_away_is_told_of(
    fragile: Stack, tiny_reference: Transformers, name: str
) -> None:
    """To those that run and those that wait, once their patience is over, and to newcomers."""
    request = inference_pb2.GenerateRequest(
        prompt_token_ids=inference_pb2.TokenIds(ids=PROMPT),
        params=types_pb2.SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True),
    )
    stub = inference_pb2_grpc.InferenceStub(fragile.channel())
    calls = [stub.Generate(request, timeout=60) for _ in range(5)]
    for call in calls:
        next(call)
    fragile.kill(name)
    wait_until(lambda: not fragile.is_serving(), "health says NOT_SERVING")
    with Client(fragile.address, connect_timeout_s=0) as impatient:
        with pytest.raises(UnavailableError) as refused:
            impatient.generate(PROMPT, greedy(1))
        assert refused.value.reason == "NOT_READY"
        assert refused.value.retry_after_ms
    for call in calls:
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        told = ServiceError.from_rpc_error(ended.value)
        assert told is not None
        assert told.reason == LOST[name]

    fragile.start(name)
    fragile.wait_until_serving()
    # They could not come back, so that nothing of them is left.
    fragile.wait_until_empty()
    assert_serves_right(fragile, tiny_reference)


def test_a_caller_of_the_sdk_is_told_when_its_own_time_is_over(
    fragile: Stack, client: Client
) -> None:
    with client.stream(PROMPT, greedy(LONG), timeout_s=3, detach_ttl_s=0.5) as stream:
        next(stream)
        fragile.kill("worker")
        with pytest.raises(DeadlineExceededError):
            drain(stream)
    fragile.start("worker")
    fragile.wait_until_serving()
    fragile.wait_until_empty()


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_b44_a_peer_killed_while_nothing_runs(
    fragile: Stack, tiny_reference: Transformers, name: str
) -> None:
    fragile.kill(name)
    wait_until(lambda: not fragile.is_serving(), "health says NOT_SERVING")
    fragile.start(name)
    fragile.wait_until_serving()
    # No request pays for it.
    assert_serves_right(fragile, tiny_reference)


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_a_peer_that_is_told_to_go_goes(
    fragile: Stack, client: Client, tiny_reference: Transformers, name: str
) -> None:
    streams = open_streams(client, 4)
    assert fragile.kill(name, signal.SIGTERM) == 0
    fragile.start(name)
    assert_all_right(streams, tiny_reference)
    assert_serves_right(fragile, tiny_reference)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    fragile: Stack, client: Client, tiny_reference: Transformers
) -> None:
    streams = open_streams(client, 4)
    process = fragile.processes["scheduler"]
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not fragile.is_serving(), "health says NOT_SERVING")
    with Client(fragile.address, connect_timeout_s=0) as impatient:
        with pytest.raises(UnavailableError) as refused:
            impatient.generate(PROMPT, greedy(1))
        assert refused.value.reason == "DRAINING"
    # Also the one that waited for its turn.
    assert_all_right(streams, tiny_reference)
    assert fragile.kill("scheduler", signal.SIGTERM) == 0
    # It has told the memory service that everything was delivered.
    fragile.wait_until_empty()


def test_a_stopped_worker_is_noticed(
    fragile: Stack, client: Client, tiny_reference: Transformers
) -> None:
    """Nothing closes its connections, and it answers nothing."""
    streams = open_streams(client, 4)
    fragile.pause("worker")
    wait_until(lambda: not fragile.is_serving(), "health says NOT_SERVING")
    # It comes back with a step of a session that is over.
    fragile.go_on("worker")
    assert_all_right(streams, tiny_reference)
    assert_serves_right(fragile, tiny_reference)


def test_a_second_scheduler_waits_for_the_first_to_go(
    fragile: Stack, tiny_reference: Transformers
) -> None:
    """Two would be two owners of one plan: the second says who owns, and disturbs nobody."""
    expected = tiny_reference.greedy(PROMPT, 200)
    fragile.start_standby()
    with fragile.client() as client:
        answer = client.generate(PROMPT, greedy(200))
        assert expected.disagreement(answer.candidates[0].token_ids) is None
    with Client(fragile.addresses[STANDBY]) as other:
        assert not other.health().serving
        # It says where to go, and the SDK goes there.
        answer = other.generate(PROMPT, greedy(200))
        assert expected.disagreement(answer.candidates[0].token_ids) is None
        assert fragile.is_serving()
        fragile.kill("scheduler")
        wait_until(lambda: other.health().serving, "the second takes over")
        answer = other.generate(PROMPT, greedy(200))
        assert expected.disagreement(answer.candidates[0].token_ids) is None


def test_steps_are_no_larger_than_the_worker_takes(
    tiny_model: Path, tiny_reference: Transformers
) -> None:
    """A worker with smaller limits than the scheduler was configured with."""
    options = (*TINY_WORKER, "--max-num-batched-tokens=64")
    with Stack(model=tiny_model, num_blocks=100, worker=options) as stack:
        prompt = token_prompt(300, salt=4)
        expected = tiny_reference.greedy(prompt, 20)
        with stack.client() as client, ThreadPoolExecutor(4) as pool:
            params = [greedy(20), SamplingParams(n=8, seed=1, max_tokens=5, ignore_eos=True)] * 2
            answers = list(pool.map(lambda each: client.generate(prompt, each), params))
        assert expected.disagreement(answers[0].candidates[0].token_ids) is None
        stack.wait_until_empty()


def test_callers_come_while_peers_come_and_go(fragile: Stack, tiny_reference: Transformers) -> None:
    """Each is served right; none hangs and none is refused."""
    expected = tiny_reference.greedy(PROMPT, 30)
    stopping = threading.Event()
    outcomes: list[str] = []

    def caller() -> None:
        with Client(fragile.address, connect_timeout_s=60) as client:
            while not stopping.is_set():
                answer = client.generate(PROMPT, greedy(30), timeout_s=60)
                wrong = expected.disagreement(answer.candidates[0].token_ids)
                outcomes.append(wrong or "served")

    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(caller) for _ in range(3)]
        try:
            for name in ("kvmem", "worker", "scheduler", "kvmem"):
                fragile.kill(name)
                fragile.start(name)
                fragile.wait_until_serving()
                num_before = len(outcomes)
                wait_until(lambda n=num_before: len(outcomes) > n + 3, "they are served")
        finally:
            stopping.set()
        for each in callers:
            each.result()
    assert set(outcomes) == {"served"}
    assert_serves_right(fragile, tiny_reference)
