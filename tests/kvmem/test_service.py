"""The service as a real process behind a unix socket."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import kvmem_pb2 as pb
from tests.kvmem.process import (
    DEADLINE_S,
    Client,
    Stream,
    admit,
    arrive,
    free,
    int32s,
    kvmem_process,
    reason_of,
)

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kvmem_by_hand.py"
OPEN = pb.SessionRequest(open=pb.OpenSessionRequest(holder="stream"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One process for all tests that begin with a session and a pool of their own."""
    leases = ("--lease-ttl-ms", "60000", "--resume-grace-ms", "200")
    with kvmem_process(tmp_path_factory.mktemp("kvmem"), *leases) as (at, _):
        yield at


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    client = Client(address)
    yield client
    if client.is_open:
        with contextlib.suppress(grpc.RpcError):  # a test may have lost its session
            client.close_session()
    wait_until(lambda: opens(client), "a session to tidy up in")
    client.attach()
    client.drop_everything()
    client.close_session()
    client.channel.close()


def opened_stream(client: Client) -> Stream:
    """A stream that holds the session, with a pool attached under the client's fence."""
    stream = Stream(client, OPEN)
    client.opened(stream.receive().opened)
    client.attach()
    return stream


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def opens(client: Client) -> bool:
    """Whether a session can be opened; one that is held is the only excuse."""
    try:
        client.open()
    except grpc.RpcError as error:
        if reason_of(error) != "SESSION_HELD":
            raise
        return False
    return True


# --- the unary twins --------------------------------------------------------------------


def test_the_example_allocates_appends_forks_copies_and_frees_by_hand(address: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, address],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert "both share blocks [0, 1] = [0, 1]" in done.stdout
    assert "the child's write copied block [1] to [2]: [0, 1] and [0, 2]" in done.stdout
    assert "is already finished" in done.stdout
    assert done.stdout.rstrip().endswith("in use 0, free 8")


def test_unary_calls_go_through_a_whole_life(client: Client) -> None:
    opened = client.open()
    assert opened.next_batch_seq == 1
    assert opened.max_ops_per_batch == 8192
    assert client.attach().levels.num_free_blocks == 8
    sequence_id = client.apply(arrive("r", 6)).results[0].arrived.sequence_id
    table = client.apply(admit(sequence_id, 6)).results[0].admitted.tables[0]
    assert len(int32s(table.block_ids)) == 2
    fork = pb.Op(fork=pb.Fork(sequence_id=sequence_id, num_children=1, token_ids=[7, 8]))
    [child] = client.apply(fork).results[0].forked.child_sequence_ids
    ids = np.array([sequence_id, child], "<u8").tobytes()
    commit = pb.Commit(
        sequence_ids=ids,
        token_ids=np.array([1, 2], "<i4").tobytes(),
        num_computed_tokens=np.array([6, 6], "<i4").tobytes(),
    )
    reserve = pb.Reserve(sequence_ids=ids, num_slots=np.array([8, 8], "<i4").tobytes())
    result = client.apply(pb.Op(commit=commit), pb.Op(reserve=reserve))
    assert [one.status for one in result.results] == [pb.OP_STATUS_OK] * 2
    assert int32s(result.copies.src_block_ids) == int32s(table.block_ids)[1:]
    assert int32s(result.deltas.block_ids) == int32s(result.copies.dst_block_ids)
    views = client.stub.GetBlockTables(
        pb.GetBlockTablesRequest(request_id="r"), timeout=DEADLINE_S
    ).sequences
    assert [view.num_tokens for view in views] == [8, 8]
    assert [list(view.ref_counts) for view in views] == [[2, 1], [2, 1]]
    client.apply(free(sequence_id, child), pb.Op(confirm=pb.Confirm(request_id="r")))
    stats = client.stats()
    assert stats.num_requests == 0
    assert stats.num_copies_on_write == 1
    assert stats.levels.num_quarantined_blocks == 2  # both ends of the copy, in this step
    client.close_session()
    assert client.open().fence.epoch == opened.fence.epoch + 1


def test_the_same_batch_again_gets_the_same_reply_and_another_one_a_conflict(
    client: Client,
) -> None:
    client.open()
    client.attach()
    batch = client.batch(arrive("r", 6))
    first = client.stub.Apply(batch, timeout=DEADLINE_S)
    assert client.stub.Apply(batch, timeout=DEADLINE_S) == first
    batch.step.ops[0].arrive.num_candidates = 2
    with pytest.raises(grpc.RpcError) as refused:
        client.stub.Apply(batch, timeout=DEADLINE_S)
    assert reason_of(refused.value) == "BATCH_CONFLICT"
    assert client.stats().num_requests == 1


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (pb.Op(), "empty"),
        (pb.Op(commit=pb.Commit(sequence_ids=b"123")), "commit.sequence_ids: 3 bytes"),
        (pb.Op(reserve=pb.Reserve(num_slots=b"12345")), "reserve.num_slots: 5 bytes"),
    ],
)
def test_a_malformed_op_refuses_its_batch_and_changes_nothing(
    client: Client, op: pb.Op, says: str
) -> None:
    client.open()
    client.attach()
    with pytest.raises(grpc.RpcError, match=says) as refused:
        client.apply(arrive("r", 6), op)
    assert reason_of(refused.value) == "INVALID_BATCH"
    client.batch_seq -= 1
    assert client.apply().batch_seq == 1
    assert client.stats().num_requests == 0


def test_errors_name_their_reason(client: Client) -> None:
    client.open()
    with pytest.raises(grpc.RpcError, match="num_blocks is 0") as geometry:
        client.attach(num_blocks=0)
    assert reason_of(geometry.value) == "INVALID_PARAMETER"
    with pytest.raises(grpc.RpcError) as held:
        client.open()
    assert reason_of(held.value) == "SESSION_HELD"
    client.attach()
    for request, reason in (
        (pb.GetBlockTablesRequest(sequence_ids=[7]), "UNKNOWN_SEQUENCE"),
        (pb.GetBlockTablesRequest(request_id="r"), "UNKNOWN_REQUEST"),
    ):
        with pytest.raises(grpc.RpcError) as unknown:
            client.stub.GetBlockTables(request, timeout=DEADLINE_S)
        assert reason_of(unknown.value) == reason


def test_block_tables_are_bounded_and_say_so(client: Client) -> None:
    client.open()
    client.attach()
    client.apply(*(arrive(f"r{i}", 2) for i in range(5)))
    request = pb.GetBlockTablesRequest(max_sequences=3)
    reply = client.stub.GetBlockTables(request, timeout=DEADLINE_S)
    assert (len(reply.sequences), reply.truncated) == (3, True)
    request.max_sequences = 5
    reply = client.stub.GetBlockTables(request, timeout=DEADLINE_S)
    assert (len(reply.sequences), reply.truncated) == (5, False)


# --- the session stream -----------------------------------------------------------------


def test_a_stream_answers_batches_in_order_and_ends_with_its_holder(client: Client) -> None:
    stream = opened_stream(client)
    batches = [client.batch(arrive(f"r{i}", 3)) for i in range(20)]
    for batch in batches:
        stream.put(pb.SessionRequest(batch=batch))
    assert [stream.receive().result.batch_seq for _ in batches] == list(range(1, 21))
    epoch = client.fence.epoch
    stream.close()
    wait_until(lambda: opens(client), "the grace of a stream that ended")
    assert client.fence.epoch == epoch + 1
    assert client.stats().num_sequences == 20


def test_the_first_message_must_open(client: Client) -> None:
    stream = Stream(client, pb.SessionRequest(batch=pb.Batch()))
    with pytest.raises(grpc.RpcError, match="first message") as refused:
        stream.receive()
    assert reason_of(refused.value) == "INVALID_BATCH"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda batch: batch.fence.ClearField("kvmem_boot_id"), "STALE_BOOT_ID"),
        (lambda batch: setattr(batch.fence, "worker_boot_id", "other"), "STALE_BOOT_ID"),
        (lambda batch: setattr(batch.fence, "session_id", "other"), "UNKNOWN_SESSION"),
        (lambda batch: setattr(batch, "batch_seq", 9), "SEQUENCE_GAP"),
        (lambda batch: setattr(batch.step, "acknowledged_step", 99), "INVALID_BATCH"),
    ],
)
def test_a_batch_that_is_refused_ends_the_stream_with_its_reason(
    client: Client, break_it, reason: str
) -> None:
    stream = opened_stream(client)
    batch = client.batch(arrive("r", 3))
    break_it(batch)
    with pytest.raises(grpc.RpcError) as refused:
        stream.send(batch)
    assert reason_of(refused.value) == reason
    assert client.stats().num_requests == 0


def test_a_stream_is_not_taken_over_while_it_lives_and_is_once_it_broke(client: Client) -> None:
    stream = opened_stream(client)
    assert not opens(client)
    stale = client.batch(arrive("r", 3))
    stream.call.cancel()
    wait_until(lambda: opens(client), "the session of a broken stream")
    assert client.fence.epoch == stale.fence.epoch + 1
    with pytest.raises(grpc.RpcError) as refused:
        client.stub.Apply(stale, timeout=DEADLINE_S)
    assert reason_of(refused.value) == "STALE_EPOCH"


def test_a_broken_stream_is_resumed_and_lost_results_come_again(client: Client) -> None:
    stream = opened_stream(client)
    first, second = client.batch(arrive("a", 3)), client.batch(arrive("b", 3))
    results = [stream.send(first), stream.send(second)]
    stream.call.cancel()
    resume = pb.OpenSessionRequest(resume=client.fence, last_result_batch_seq=1)
    again = Stream(client, pb.SessionRequest(open=resume))
    opened = again.receive().opened
    assert opened.fence == client.fence
    assert opened.next_batch_seq == 3
    assert again.send(second) == results[1]
    assert again.send(client.batch(arrive("c", 3))).batch_seq == 3
    assert client.stats().num_requests == 3


def test_resuming_on_a_second_stream_ends_the_first(client: Client) -> None:
    stream = opened_stream(client)
    resume = pb.OpenSessionRequest(resume=client.fence)
    again = Stream(client, pb.SessionRequest(open=resume))
    again.receive()
    with pytest.raises(grpc.RpcError, match="elsewhere"):
        stream.receive()
    assert again.send(client.batch(arrive("c", 3))).batch_seq == 1


def test_a_killed_holder_frees_the_session(address: str, client: Client) -> None:
    script = (
        "import sys, threading, grpc\n"
        "from octavo.v1 import kvmem_pb2 as pb, kvmem_pb2_grpc\n"
        f"stub = kvmem_pb2_grpc.KvMemoryStub(grpc.insecure_channel({address!r}))\n"
        "first = pb.SessionRequest(open=pb.OpenSessionRequest())\n"
        "wait = threading.Event()\n"
        "def requests():\n    yield first\n    wait.wait()\n"
        "call = stub.Session(requests())\n"
        "print(next(call).opened.fence.epoch, flush=True)\n"
        "wait.wait()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    epoch = int(holder.stdout.readline())
    assert not opens(client)
    holder.kill()
    holder.wait()
    holder.stdout.close()

    wait_until(lambda: opens(client), "the session of a killed holder")
    assert client.fence.epoch == epoch + 1


# --- watching ---------------------------------------------------------------------------


def test_watchers_get_a_snapshot_and_then_every_batch_once(client: Client) -> None:
    client.open()
    client.attach()
    sequence_id = client.apply(arrive("r", 6)).results[0].arrived.sequence_id
    events = client.stub.WatchEvents(pb.WatchEventsRequest(), timeout=DEADLINE_S)
    [view] = next(events).snapshot.sequences
    assert (view.sequence_id, view.request_id) == (sequence_id, "r")
    batch = client.batch(admit(sequence_id, 6))
    result = client.stub.Apply(batch, timeout=DEADLINE_S)
    client.stub.Apply(batch, timeout=DEADLINE_S)  # sent again: not an event
    client.apply(free(sequence_id))
    applied = next(events).applied
    assert applied.step == batch.step
    assert applied.result == result
    assert next(events).applied.batch_seq == 3
    client.attach()
    assert next(events).HasField("snapshot")


def test_b45_a_watcher_that_does_not_read_is_dropped_and_slows_nobody(client: Client) -> None:
    client.open()
    client.attach(num_blocks=1024, max_model_len=4096)
    slow = Client(client.address)
    events = slow.stub.WatchEvents(pb.WatchEventsRequest(), timeout=DEADLINE_S)
    next(events)
    prompt = list(range(4096))
    for i in range(1500):  # about 8 KB an event: more than sockets and queue hold
        refused = pb.Arrive(request_id="r", prompt_token_ids=prompt, num_candidates=0)
        assert client.apply(pb.Op(arrive=refused)).batch_seq == i + 1
    with pytest.raises(grpc.RpcError, match="events behind") as dropped:
        for _ in events:
            pass
    assert reason_of(dropped.value) == "QUEUE_FULL"
    slow.channel.close()


# --- the process ------------------------------------------------------------------------


def test_health_and_a_clean_end_with_streams_open(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, process):
        client = Client(address)
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        asked = health_pb2.HealthCheckRequest(service="octavo.v1.KvMemory")
        wait_until(
            lambda: (
                health.Check(asked, timeout=DEADLINE_S).status
                == health_pb2.HealthCheckResponse.SERVING
            ),
            "SERVING",
        )
        stream = opened_stream(client)
        events = client.stub.WatchEvents(pb.WatchEventsRequest(), timeout=DEADLINE_S)
        next(events)
        process.send_signal(signal.SIGTERM)
        for call in (stream.call, events):
            with pytest.raises(grpc.RpcError) as ended:
                next(call)
            assert reason_of(ended.value) == "DRAINING"
        assert process.wait(DEADLINE_S) == 0


def test_an_address_nobody_can_listen_on_is_said_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvmem_svc", "--address", "nowhere"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "'nowhere' is neither unix:/path nor host:port" in done.stderr


def test_a_bug_in_the_core_ends_the_process_loudly(tmp_path: Path) -> None:
    broken = (
        "from kvmem_svc.core.manager import OK, BlockManager\n"
        "def forget_a_block(self, op):\n"
        "    self.pool.num_in_use -= 1\n"
        "    return OK\n"
        "BlockManager._free = forget_a_block\n"
        "from kvmem_svc.__main__ import app\n"
        "app()\n"
    )
    with kvmem_process(tmp_path, program=("-c", broken)) as (address, process):
        client = Client(address)
        client.open()
        client.attach()
        with pytest.raises(grpc.RpcError, match="is not 8") as told:
            client.apply(free(1))
        assert reason_of(told.value) == "INTERNAL"
        assert process.wait(DEADLINE_S) == 1
    assert "the books do not balance" in (tmp_path / "kvmem.log").read_text()


def test_options_come_from_the_environment_and_ops_need_a_pool(tmp_path: Path) -> None:
    settings = {"OCTAVO_KVMEM_MAX_SEQUENCES": "3", "OCTAVO_KVMEM_LEASE_TTL_MS": "1234"}
    with kvmem_process(tmp_path, environment=settings) as (address, _):
        client = Client(address)
        opened = client.open()
        assert opened.lease_ttl_ms == 1234
        assert not opened.HasField("geometry")
        with pytest.raises(grpc.RpcError) as no_pool:
            client.apply(arrive("r", 6))
        assert reason_of(no_pool.value) == "NO_POOL"
        assert client.attach().levels.num_free_sequences == 3
