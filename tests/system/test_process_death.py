"""One of the three processes dies, stops or is told to go: callers hear it, and service returns.

(That no request is lost by it is a later promise.)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo import Client, Generation, SamplingParams, UnavailableError
from octavo.client import ChunkStream
from tests.system.models import TINY_WORKER, Transformers
from tests.system.requests import greedy, token_prompt
from tests.system.stack import Stack, wait_until

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
        scheduler=("--max-num-seqs=3",),
    ) as stack:
        yield stack


@pytest.fixture
def mortal(shared: Stack) -> Stack:
    """A stack that serves, whatever the test before has left of it."""
    missing = [name for name in ("kvmem", "worker", "scheduler") if name not in shared.processes]
    if missing:
        shared.start(*missing)
    shared.wait_until_serving()
    return shared


@pytest.fixture
def client(mortal: Stack) -> Iterator[Client]:
    with mortal.client() as client:
        yield client


def drain(chunks: ChunkStream) -> Generation:
    for _ in chunks:
        pass
    return chunks.generation()


def error_of(chunks: ChunkStream) -> UnavailableError:
    with pytest.raises(UnavailableError) as raised:
        drain(chunks)
    return raised.value


def open_streams(client: Client, count: int) -> list[ChunkStream]:
    """`count` long requests that are accepted; three of them run, the others wait."""
    streams = [client.stream(PROMPT, greedy(LONG)) for _ in range(count)]
    for stream in streams:
        next(stream)
    for stream in streams[:3]:
        next(stream)
    return streams


def assert_serves_right(stack: Stack, reference: Transformers) -> None:
    """A request that needs nearly the whole pool is served, and the pool is empty after."""
    prompt = token_prompt(460, salt=18)
    expected = reference.greedy(prompt, 50)
    with stack.client() as client:
        answer = client.generate(prompt, greedy(50), timeout_s=60)
    assert expected.disagreement(answer.candidates[0].token_ids) is None
    stack.wait_until_empty()


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_b44_a_peer_killed_under_load(
    mortal: Stack, client: Client, tiny_reference: Transformers, name: str
) -> None:
    streams = open_streams(client, 5)
    mortal.kill(name)
    # Those that run and those that wait are all told, and why.
    assert [error_of(stream).reason for stream in streams] == [LOST[name]] * 5
    wait_until(lambda: not mortal.is_serving(), "health says NOT_SERVING")
    with pytest.raises(UnavailableError) as refused:
        client.generate(PROMPT, greedy(1))
    assert refused.value.reason == "NOT_READY"
    assert refused.value.retry_after_ms

    mortal.start(name)
    mortal.wait_until_serving()
    assert mortal.pool_stats().levels.num_free_blocks == NUM_BLOCKS
    assert_serves_right(mortal, tiny_reference)


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_b44_a_peer_killed_while_nothing_runs(
    mortal: Stack, tiny_reference: Transformers, name: str
) -> None:
    mortal.kill(name)
    wait_until(lambda: not mortal.is_serving(), "health says NOT_SERVING")
    mortal.start(name)
    mortal.wait_until_serving()
    # No request pays for it.
    assert_serves_right(mortal, tiny_reference)


def test_both_peers_killed(mortal: Stack, client: Client, tiny_reference: Transformers) -> None:
    streams = open_streams(client, 2)
    mortal.kill("worker")
    mortal.kill("kvmem")
    assert {error_of(stream).reason for stream in streams} <= {*LOST.values()}
    mortal.start("kvmem")
    mortal.start("worker")
    mortal.wait_until_serving()
    assert_serves_right(mortal, tiny_reference)


@pytest.mark.parametrize("name", ["worker", "kvmem"])
def test_a_peer_that_is_told_to_go_goes(
    mortal: Stack, client: Client, tiny_reference: Transformers, name: str
) -> None:
    streams = open_streams(client, 4)
    assert mortal.kill(name, signal.SIGTERM) == 0
    for stream in streams:
        error_of(stream)
    mortal.start(name)
    mortal.wait_until_serving()
    assert_serves_right(mortal, tiny_reference)


def test_the_scheduler_killed_and_started_again(
    mortal: Stack, client: Client, tiny_reference: Transformers
) -> None:
    streams = open_streams(client, 4)
    assert mortal.pool_stats().levels.num_in_use_blocks > 0
    mortal.kill("scheduler")
    for stream in streams:
        error_of(stream)
    mortal.start("scheduler")
    mortal.wait_until_serving()
    # Whatever the dead one held has come back before the first step, or comes with it.
    assert mortal.pool_stats().levels.num_in_use_blocks == 0
    assert_serves_right(mortal, tiny_reference)
    # The client object survives: its channel finds the new process.
    assert len(client.generate(PROMPT, greedy(5)).candidates[0].token_ids) == 5


def test_killed_again_and_again(mortal: Stack, tiny_reference: Transformers) -> None:
    """Deaths at any moment of a step leave nothing behind that the next one trips over."""
    for round_number in range(6):
        with mortal.client() as client:
            streams = open_streams(client, 3)
            for _ in range(round_number * 3):
                next(streams[0])
            mortal.kill("scheduler")
            for stream in streams:
                error_of(stream)
        mortal.start("scheduler")
        mortal.wait_until_serving()
    assert_serves_right(mortal, tiny_reference)


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    mortal: Stack, client: Client, tiny_reference: Transformers
) -> None:
    expected = tiny_reference.greedy(PROMPT, LONG)
    streams = open_streams(client, 4)
    process = mortal.processes["scheduler"]
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not mortal.is_serving(), "health says NOT_SERVING")
    with pytest.raises(UnavailableError) as refused:
        client.generate(PROMPT, greedy(1))
    assert refused.value.reason == "DRAINING"
    # Also the one that waited for its turn.
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(drain, streams))
    for answer in answers:
        assert expected.disagreement(answer.candidates[0].token_ids) is None
    assert mortal.kill("scheduler", signal.SIGTERM) == 0
    # It has told the memory service that everything was delivered.
    mortal.wait_until_empty()


def test_a_stopped_worker_is_noticed(
    mortal: Stack, client: Client, tiny_reference: Transformers
) -> None:
    """Nothing closes its connections, and it answers nothing."""
    stream = client.stream(PROMPT, greedy(LONG), timeout_s=45)
    next(stream)
    mortal.processes["worker"].send_signal(signal.SIGSTOP)
    assert error_of(stream).reason == "WORKER_LOST"
    wait_until(lambda: not mortal.is_serving(), "health says NOT_SERVING")
    # It comes back with a step of a session that is over.
    mortal.processes["worker"].send_signal(signal.SIGCONT)
    mortal.wait_until_serving()
    assert_serves_right(mortal, tiny_reference)


def test_a_second_scheduler_waits_for_the_first_to_go(
    mortal: Stack, tiny_model: Path, tiny_reference: Transformers
) -> None:
    """Two would be two owners of one plan: the second does not serve, and disturbs nobody."""
    second = f"unix:{mortal.folder}/second.sock"
    mortal.start_as("second", "scheduler", second)
    expected = tiny_reference.greedy(PROMPT, 200)
    with mortal.client() as client:
        wait_until(lambda: "SESSION_HELD" in mortal.log_path("second").read_text(), "it is refused")
        answer = client.generate(PROMPT, greedy(200))
        assert expected.disagreement(answer.candidates[0].token_ids) is None
    with Client(second) as other:
        assert not other.health().serving
        with pytest.raises(UnavailableError) as refused:
            other.generate(PROMPT, greedy(1))
        assert refused.value.reason == "NOT_READY"
        assert mortal.is_serving()
        mortal.kill("scheduler")
        wait_until(lambda: other.health().serving, "the second takes over")
        answer = other.generate(PROMPT, greedy(200))
        assert expected.disagreement(answer.candidates[0].token_ids) is None
    mortal.kill("second")


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


def test_callers_come_while_peers_come_and_go(mortal: Stack, tiny_reference: Transformers) -> None:
    """Each is either served right or told that the service is not there; none hangs."""
    expected = tiny_reference.greedy(PROMPT, 30)
    stopping = threading.Event()
    outcomes: list[str] = []

    def caller() -> None:
        with mortal.client() as client:
            while not stopping.is_set():
                try:
                    answer = client.generate(PROMPT, greedy(30), timeout_s=60)
                except UnavailableError as error:
                    outcomes.append(error.reason)
                    stopping.wait(0.02)
                else:
                    wrong = expected.disagreement(answer.candidates[0].token_ids)
                    outcomes.append(wrong or "served")

    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(caller) for _ in range(3)]
        try:
            for name in ("kvmem", "worker", "kvmem"):
                mortal.kill(name)
                mortal.start(name)
                mortal.wait_until_serving()
                num_before = outcomes.count("served")
                wait_until(lambda n=num_before: outcomes.count("served") > n + 3, "they are served")
        finally:
            stopping.set()
        for each in callers:
            each.result()
    assert set(outcomes) <= {"served", "WORKER_LOST", "KVMEM_LOST", "NOT_READY"}, set(outcomes)
    assert_serves_right(mortal, tiny_reference)
