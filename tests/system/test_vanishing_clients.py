"""Clients that die, stop, or never read: what they asked for ends, and others do not notice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo import Client, RequestSummary
from octavo.admin_types import AppliedBatch, Commit, Free
from octavo.types import FinishReason
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from tests.system.models import Transformers
from tests.system.requests import Bystander, greedy, token_prompt
from tests.system.stack import REPOSITORY, Stack, wait_until

PROMPT = token_prompt(30, salt=11)
# Steps that may pass between a client's death and the moment the server hears of it.
NOTICE_STEPS = 40

# A connection that takes in next to nothing unless it is read, as one across a slow network.
NARROW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16384),
    ("grpc.use_local_subchannel_pool", 1),
]

# One that does not mean to come back: its request goes at once.
CLIENT_PROGRAM = """
import sys
from octavo import Client, SamplingParams

address, request_id, n = sys.argv[1:]
params = SamplingParams(temperature=0, ignore_eos=True, n=int(n))
options = {"request_id": request_id, "detach_ttl_s": 0}
with Client(address) as client:
    for number, chunk in enumerate(client.stream(list(range(30)), params, **options)):
        if number == 3:
            print("streaming", flush=True)
"""


@contextmanager
def client_process(stack: Stack, request_id: str, n: int) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, which has received its first tokens."""
    command = [sys.executable, "-c", CLIENT_PROGRAM, stack.address, request_id, str(n)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "streaming\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("n", [1, 4])
def test_b09_a_killed_clients_request_stops(tiny: Stack, n: int) -> None:
    with tiny.inspector() as inspector:
        with inspector.watch() as events, client_process(tiny, "doomed", n) as process:
            tables = inspector.block_tables("doomed").sequences
            process.kill()
            num_tokens_then = {view.sequence_id: view.num_tokens for view in tables}
            freed: dict[int, FinishReason | None] = {}
            num_tokens = {}
            for event in events:
                if not isinstance(event, AppliedBatch):
                    continue
                for op in (applied.op for applied in event.ops):
                    if isinstance(op, Commit):
                        for row in op.rows:
                            more = len(row.token_ids)
                            num_tokens[row.sequence_id] = num_tokens.get(row.sequence_id, 0) + more
                    elif isinstance(op, Free):
                        freed.update(dict.fromkeys(op.sequence_ids, op.finish_reason))
                if freed:
                    break
        assert set(freed) == set(num_tokens_then)
        assert set(freed.values()) == {FinishReason.ABORT}
        tiny.wait_until_empty()
        for sequence_id, before in num_tokens_then.items():
            # The first token of each came with the prompt's fork, the rest in commits.
            assert num_tokens[sequence_id] + len(PROMPT) <= before + NOTICE_STEPS


@contextmanager
def waiting_client(
    stack: Stack, observer: Client, request_id: str, n: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A client in a process of its own, whose request is in the scheduler's queue."""
    command = [sys.executable, "-c", CLIENT_PROGRAM, stack.address, request_id, str(n)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    try:
        wait_until(lambda: find(observer, request_id) is not None, "it waits in the queue")
        yield process
    finally:
        process.kill()
        process.wait()


def test_b09_a_client_killed_while_it_waits_leaves_nothing(small: Stack) -> None:
    """Its request is not admitted yet: another one has the pool."""
    with (
        small.client() as client,
        client.stream(token_prompt(300), greedy(200)) as occupied,
    ):
        next(occupied)
        with waiting_client(small, client, "waits", 16) as process:
            process.kill()
            wait_until(lambda: find(client, "waits") is None, "the dead one leaves the queue")
    small.wait_until_empty()


def find(client: Client, request_id: str) -> RequestSummary | None:
    """The live request of this id."""
    return next((r for r in client.list_requests() if r.request_id == request_id), None)


class Silent:
    """A raw stream nobody reads. `stuck`: the server cannot send any more of it."""

    def __init__(self, stack: Stack, request_id: str, n: int, max_tokens: int) -> None:
        self._channel = grpc.insecure_channel(stack.address, NARROW)
        request = pb.GenerateRequest(request_id=request_id)
        request.prompt_token_ids.ids.extend(PROMPT)
        request.params.n, request.params.max_tokens = n, max_tokens
        request.params.ignore_eos, request.params.seed = True, 1
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.call = stub.Generate(request, timeout=300)

    def close(self) -> None:
        self._channel.close()


def is_finished(client: Client, request_id: str) -> bool:
    """Computed to its end, and still kept for its caller."""
    request = find(client, request_id)
    return request is not None and request.status == "finished"


def test_b45_others_do_not_notice_a_reader_that_never_reads(
    tiny: Stack, tiny_reference: Transformers
) -> None:
    with tiny.client() as client:
        silent = Silent(tiny, "silent", n=16, max_tokens=480)
        with Bystander(tiny, tiny_reference):
            # It is computed to the end at everybody's pace, and its blocks go back.
            wait_until(lambda: is_finished(client, "silent"), "the unread request is finished")
        assert find(client, "silent") is not None, "it was delivered: it never was stuck"
        wait_until(
            lambda: tiny.pool_stats().levels.num_in_use_blocks == 0, "its blocks are given back"
        )
        # Late, but whole: what was kept for it is bounded by its own max_tokens.
        received: dict[int, list[int]] = {}
        for reply in silent.call:
            for delta in reply.deltas:
                received.setdefault(delta.index, []).extend(delta.token_ids)
        assert {len(tokens) for tokens in received.values()} == {480}
        assert len(received) == 16
        silent.close()
        tiny.wait_until_empty()


def test_a_reader_that_never_reads_and_leaves(tiny: Stack) -> None:
    with tiny.client() as client:
        silent = Silent(tiny, "silent", n=16, max_tokens=480)
        wait_until(lambda: is_finished(client, "silent"), "the unread request is finished")
        silent.close()
    tiny.wait_until_empty()


def test_a_late_reader_does_not_abort_the_next_request_of_its_name(
    tiny: Stack, tiny_reference: Transformers
) -> None:
    """Aborted by somebody else, its handler still hangs in a write; then its id is taken."""
    reference = tiny_reference.greedy(PROMPT, 300)
    with tiny.client() as client:
        silent = Silent(tiny, "name", n=16, max_tokens=480)
        wait_until(lambda: is_finished(client, "name"), "the unread request is finished")
        assert client.abort("name")
        with client.stream(PROMPT, greedy(300), request_id="name") as chunks:
            next(chunks)
            silent.close()
            for _ in chunks:
                pass
            tokens = chunks.generation().candidates[0].token_ids
        assert reference.disagreement(tokens) is None
    tiny.wait_until_empty()


def test_a_stopped_client_is_noticed(tiny_model: Path) -> None:
    """Cut off without a word, its connection stays open, and nothing answers there any more.

    Its request waits in the queue: while there is output to send, gRPC takes a connection for
    alive until that stalls.
    """
    only_one = ("--max-num-seqs=1",)
    with Stack(model=tiny_model, num_blocks=2048, scheduler=only_one) as stack:
        with stack.client() as client, client.stream(PROMPT, greedy(30_000)) as occupied:
            next(occupied)
            with waiting_client(stack, client, "stopped", 1) as process:
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: find(client, "stopped") is None, "its request is gone")
                assert find(client, occupied.request_id) is not None
        stack.wait_until_empty()
