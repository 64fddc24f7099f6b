"""Takeover, leases and expiry as a real process has them behind its socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from octavo.service.errors import ServiceError
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2
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

OPEN = pb.SessionRequest(open=pb.OpenSessionRequest(holder="first", holder_address="here:1"))
HEARTBEAT = pb.SessionRequest(heartbeat=pb.Heartbeat())


def refused(call: Callable[[], object]) -> ServiceError:
    with pytest.raises(grpc.RpcError) as error:
        call()
    told = ServiceError.from_rpc_error(error.value)
    assert told is not None
    return told


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def opens(client: Client) -> bool:
    try:
        client.open()
    except grpc.RpcError as error:
        if reason_of(error) != "SESSION_HELD":
            raise
        return False
    return True


def u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def forked_with_a_copy_in_step_1(client: Client) -> tuple[int, int, pb.BatchResult]:
    """Two sequences that share a block, and one of them about to write it."""
    parent = client.apply(arrive("r", 6)).results[0].arrived.sequence_id
    client.apply(admit(parent, 6))
    fork = pb.Fork(sequence_id=parent, num_children=1, state_words=u64(5, 6))
    child = client.apply(pb.Op(fork=fork)).results[0].forked.child_sequence_ids[0]
    append = pb.Append(sequence_id=child, token_ids=[7])
    return parent, child, client.apply(pb.Op(append=append))


def test_a_takeover_from_a_broken_stream_to_the_next_token(tmp_path: Path) -> None:
    with kvmem_process(tmp_path, "--resume-grace-ms", "1000") as (address, _):
        first, second = Client(address), Client(address)
        stream = Stream(first, OPEN)
        first.opened(stream.receive().opened)
        first.attach(worker_boot_id="w")
        parent, child, written = forked_with_a_copy_in_step_1(first)
        held = refused(second.open)
        assert held.reason == "SESSION_HELD"
        assert held.metadata == {"holder": "first", "holder_address": "here:1"}
        assert held.retry_after_ms is not None
        assert held.retry_after_ms <= 1_000
        stream.call.cancel()
        assert refused(second.open).reason == "SESSION_HELD"  # the grace is its holder's
        wait_until(lambda: opens(second), "the end of the grace")
        opened = second.open_reply
        assert (opened.fence.epoch, opened.last_step_id, opened.mutations_open) == (2, 1, False)
        second.fence.worker_boot_id = "w"
        for call in (second.apply, second.adopt):
            assert refused(call).reason == "NO_POOL"
        attached = second.attach(worker_boot_id="w", last_executed_step=0)
        assert not attached.is_new_pool
        assert attached.pending_copies == written.copies
        assert attached.pending_copy_sequence_ids == u64(child)
        [request] = second.adopt()
        by_id = {one.sequence_id: one for one in request.sequences}
        assert int32s(request.prompt_token_ids) == list(range(6))
        assert int32s(by_id[child].output_token_ids) == [7]
        assert int32s(by_id[parent].output_token_ids) == []
        assert by_id[child].scheduler_state == u64(6)
        assert by_id[child].status == pb.SEQUENCE_STATUS_RUNNING
        assert int32s(written.copies.dst_block_ids)[0] in int32s(by_id[child].block_ids)
        second.batch_seq, second.step_id = 0, 1
        result = second.apply(pb.Op(append=pb.Append(sequence_id=child, token_ids=[8])))
        assert result.results[0].status == pb.OP_STATUS_OK
        stats = second.stats()
        assert (stats.holder, stats.epoch, stats.mutations_open) == ("test", 2, True)
        assert (stats.num_pending_copies, stats.orphaned_ms, stats.journal_healthy) == (1, 0, True)


def test_a_holder_that_comes_back_after_its_lease_is_told_so(tmp_path: Path) -> None:
    with kvmem_process(tmp_path, "--lease-ttl-ms", "1500") as (address, _):
        first, second = Client(address), Client(address)
        stream = Stream(first, OPEN)
        first.opened(stream.receive().opened)
        first.attach()
        for _ in range(8):  # silent but for this, and for longer than the lease
            time.sleep(0.25)
            stream.put(HEARTBEAT)
        stream.send(first.batch(arrive("r", 3)))
        late = first.batch()
        wait_until(lambda: first.stats().orphaned_ms, "the end of the lease")
        assert refused(lambda: stream.send(late)).reason == "LEASE_EXPIRED"
        assert opens(second)  # at once: the grace is not for a lease that has ended
        assert second.stats().num_requests == 1


def test_a_takeover_ends_the_stream_of_the_former_holder(tmp_path: Path) -> None:
    with kvmem_process(tmp_path, "--lease-ttl-ms", "300") as (address, _):
        first, second = Client(address), Client(address)
        stream = Stream(first, OPEN)
        first.opened(stream.receive().opened)
        wait_until(lambda: opens(second), "the end of the lease")
        assert refused(stream.receive).reason == "STALE_EPOCH"
        # The end of that stream is nothing to the session that took over.
        second.attach()
        second.apply()


def test_a_heartbeat_does_not_open_a_session(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        stream = Stream(Client(address), HEARTBEAT)
        assert refused(stream.receive).reason == "INVALID_BATCH"


def test_what_nobody_comes_for_expires(tmp_path: Path) -> None:
    ttls = ("--orphan-ttl-ms", "300", "--result-ttl-ms", "900")
    with kvmem_process(tmp_path, *ttls) as (address, _):
        client = Client(address)
        client.open()
        client.attach()
        live = client.apply(arrive("live", 3), arrive("ended", 3)).results
        client.apply(free(live[1].arrived.sequence_id))
        events = client.stub.WatchEvents(pb.WatchEventsRequest(), timeout=DEADLINE_S)
        assert len(next(events).snapshot.sequences) == 2
        client.close_session()
        assert [one.request_id for one in next(events).snapshot.sequences] == ["ended"]
        assert not next(events).snapshot.sequences
        stats = client.stats()
        assert (stats.num_expired_requests, stats.num_requests, stats.holder) == (2, 0, "")


def test_a_request_of_another_life_arrives_with_its_candidates(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client = Client(address)
        client.open()
        client.attach()
        ended = pb.ArrivingCandidate(
            candidate=0,
            output_token_ids=np.array([7, 8], "<i4").tobytes(),
            finish_reason=types_pb2.FINISH_REASON_STOP,
            scheduler_state=b"score",
        )
        live = pb.ArrivingCandidate(candidate=2, scheduler_state=u64(9))
        [result] = client.apply(arrive("r", 3, candidates=[ended, live])).results
        first, second = result.arrived.candidate_sequence_ids
        assert result.arrived.sequence_id == first
        [request] = client.adopt()
        by_id = {one.sequence_id: one for one in request.sequences}
        assert int32s(by_id[first].output_token_ids) == [7, 8]
        assert by_id[first].finish_reason == types_pb2.FINISH_REASON_STOP
        assert by_id[first].scheduler_state == b"score"
        assert (by_id[second].candidate, by_id[second].scheduler_state) == (2, u64(9))
        broken = pb.ArrivingCandidate(candidate=1, output_token_ids=b"123")
        told = refused(lambda: client.apply(arrive("s", 3, candidates=[broken])))
        assert told.reason == "INVALID_BATCH"
