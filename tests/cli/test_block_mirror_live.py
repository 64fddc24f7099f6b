"""The inspector and the mirror beside a real KV memory service, under random operations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest

from octavo import admin_types as kv
from octavo import errors
from octavo.admin import KvMemoryInspector
from octavo.cli.block_mirror import BlockMirror, RequestStory
from octavo.service.columns import I32, U64, pack
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2

BLOCK_SIZE = 4
NUM_BLOCKS = 16
GEOMETRY = types_pb2.PoolGeometry(
    num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64, kv_dtype="float32"
)


class Holder:
    """Holds a session by unary calls, as a scheduler would by a stream."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = kvmem_pb2_grpc.KvMemoryStub(channel)
        opened = self._stub.OpenSession(pb.OpenSessionRequest(holder="test"), timeout=10)
        attached = self._stub.AttachPool(
            pb.AttachPoolRequest(fence=opened.fence, worker_boot_id="w", geometry=GEOMETRY),
            timeout=10,
        )
        self._fence = attached.fence
        self._batch_seq = opened.next_batch_seq
        self._step_id = 0

    def apply(self, *ops: pb.Op) -> list[pb.OpResult]:
        """One batch, every step before it done, so that nothing stays quarantined for long."""
        self._step_id += 1
        step = pb.StepOps(step_id=self._step_id, acknowledged_step=self._step_id - 1, ops=ops)
        batch = pb.Batch(fence=self._fence, batch_seq=self._batch_seq, step=step)
        self._batch_seq += 1
        return list(self._stub.Apply(batch, timeout=10).results)


@pytest.fixture
def channel(kvmem_address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(kvmem_address) as channel:
        yield channel


@pytest.fixture
def inspector(kvmem_address: str) -> Iterator[KvMemoryInspector]:
    with KvMemoryInspector(kvmem_address) as inspector:
        yield inspector


def arrive(request_id: str, num_tokens: int) -> pb.Op:
    return pb.Op(
        arrive=pb.Arrive(
            request_id=request_id, prompt_token_ids=range(num_tokens), num_candidates=4
        )
    )


def admit(sequence_id: int, num_slots: int) -> pb.Op:
    member = pb.AdmitMember(sequence_id=sequence_id, num_slots=num_slots)
    return pb.Op(admit=pb.Admit(members=[member]))


def append(sequence_id: int, *token_ids: int) -> pb.Op:
    return pb.Op(append=pb.Append(sequence_id=sequence_id, token_ids=token_ids))


def fork(sequence_id: int, num_children: int) -> pb.Op:
    return pb.Op(fork=pb.Fork(sequence_id=sequence_id, num_children=num_children))


def commit(sequence_id: int, num_computed_tokens: int) -> pb.Op:
    return pb.Op(
        commit=pb.Commit(
            sequence_ids=pack([sequence_id], U64),
            num_tokens=pack([0], I32),
            num_computed_tokens=pack([num_computed_tokens], I32),
        )
    )


def check_same(mirror: BlockMirror, inspector: KvMemoryInspector) -> None:
    """The mirror shows exactly the tables and reference counts that the service has."""
    assert mirror.complete
    ref_counts = mirror.ref_counts()
    for view in inspector.block_tables().sequences:
        mine = tuple(slot.block_id for slot in mirror.table(view.sequence_id))
        assert mine == view.block_ids
        assert tuple(ref_counts[block_id] for block_id in mine) == view.ref_counts
        if view.block_ids:
            assert mirror.sequences_of(view.request_id)[view.candidate] == view.sequence_id
    stats = inspector.pool_stats()
    assert len(ref_counts) == stats.levels.num_in_use_blocks
    assert sum(count > 1 for count in ref_counts.values()) == stats.num_shared_blocks


class RandomCaller:
    """Makes batches of random ops over the sequences it knows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: dict[str, list[int]] = {}
        self.running: set[int] = set()
        self.num_requests = 0

    def step(self, holder: Holder) -> None:
        kinds = [
            self.enter,
            self.enter,
            self.enter_again,
            self.grow,
            self.grow,
            self.grow,
            self.grow,
            self.split,
            self.leave,
            self.pause,
        ]
        self.random.choice(kinds)(holder)

    def enter(self, holder: Holder) -> None:
        request_id, num_tokens = f"r{self.num_requests}", self.random.randint(1, 13)
        self.num_requests += 1
        (result,) = holder.apply(arrive(request_id, num_tokens))
        sequence_id = result.arrived.sequence_id
        self.requests[request_id] = [sequence_id]
        (result,) = holder.apply(admit(sequence_id, num_tokens))
        if result.status == pb.OP_STATUS_OK:
            self.running.add(sequence_id)
            holder.apply(commit(sequence_id, num_tokens))

    def enter_again(self, holder: Holder) -> None:
        """A request with candidates that another life of the service knew."""
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        indices = self.random.sample(range(4), 2)
        op = arrive(request_id, 5)
        for index in indices:
            op.arrive.candidates.add(candidate=index, output_token_ids=pack([1, 2], I32))
        (result,) = holder.apply(op)
        sequence_ids = list(result.arrived.candidate_sequence_ids)
        self.requests[request_id] = sequence_ids
        members = [pb.AdmitMember(sequence_id=s, num_slots=7) for s in sequence_ids]
        (result,) = holder.apply(pb.Op(admit=pb.Admit(members=members)))
        if result.status == pb.OP_STATUS_OK:
            self.running.update(sequence_ids)
            holder.apply(*(commit(s, 7) for s in sequence_ids))

    def grow(self, holder: Holder) -> None:
        some = self.random.sample(sorted(self.running), min(3, len(self.running)))
        holder.apply(*(append(s, *range(self.random.randint(1, 3))) for s in some))

    def split(self, holder: Holder) -> None:
        if self.running:
            parent = self.random.choice(sorted(self.running))
            (result,) = holder.apply(fork(parent, self.random.randint(1, 2)))
            if result.status == pb.OP_STATUS_OK:
                children = list(result.forked.child_sequence_ids)
                self.running.update(children)
                next(ids for ids in self.requests.values() if parent in ids).extend(children)

    def leave(self, holder: Holder) -> None:
        if not self.requests:
            return
        request_id = self.random.choice(sorted(self.requests))
        ids = self.requests.pop(request_id)
        holder.apply(
            pb.Op(free=pb.Free(sequence_ids=ids)), pb.Op(confirm=pb.Confirm(request_id=request_id))
        )
        self.running.difference_update(ids)

    def pause(self, holder: Holder) -> None:
        some = self.random.sample(sorted(self.running), min(1, len(self.running)))
        holder.apply(pb.Op(preempt=pb.Preempt(sequence_ids=some)))
        self.running.difference_update(some)


@pytest.mark.parametrize("seed", range(3))
def test_the_mirror_is_the_service_under_random_operations(
    channel: grpc.Channel, inspector: KvMemoryInspector, seed: int
) -> None:
    holder, caller, mirror = Holder(channel), RandomCaller(seed), BlockMirror()
    statuses = set()
    with inspector.watch() as events:
        mirror.apply(next(events))
        seen_batches = 0
        for _ in range(120):
            caller.step(holder)
            while seen_batches < holder._step_id:
                event = next(events)
                assert isinstance(event, kv.AppliedBatch)
                seen_batches = event.batch_seq
                statuses |= {applied.status for applied in event.ops}
                mirror.apply(event)
            check_same(mirror, inspector)
    assert {kv.OpStatus.OK, kv.OpStatus.NO_FREE_BLOCKS} <= statuses
    assert inspector.pool_stats().num_copies_on_write > 0


def test_a_watch_that_begins_late_starts_from_the_tables_as_they_are(
    channel: grpc.Channel, inspector: KvMemoryInspector
) -> None:
    holder = Holder(channel)
    (result,) = holder.apply(arrive("r", 6))
    sequence_id = result.arrived.sequence_id
    holder.apply(admit(sequence_id, 6))
    holder.apply(commit(sequence_id, 6))
    holder.apply(fork(sequence_id, 1))
    mirror, story = BlockMirror(), RequestStory("r")
    with inspector.watch() as events:
        snapshot = next(events)
        mirror.apply(snapshot)
        check_same(mirror, inspector)
        story.apply(snapshot)
        holder.apply(append(sequence_id, 1))
        event = next(events)
        mirror.apply(event)
        check_same(mirror, inspector)
        story.apply(event)
    assert [copy.table_index for copy in story.copies] == [1]


def test_tables_of_one_request_and_of_none(
    channel: grpc.Channel, inspector: KvMemoryInspector
) -> None:
    holder = Holder(channel)
    (first, _) = holder.apply(arrive("a", 6), arrive("b", 3))
    holder.apply(admit(first.arrived.sequence_id, 6))
    (view,) = inspector.block_tables("a").sequences
    assert (view.request_id, view.num_prompt_tokens, len(view.block_ids)) == ("a", 6, 2)
    assert view.ref_counts == (1, 1)
    assert view.status is kv.SequenceStatus.RUNNING
    assert len(inspector.block_tables().sequences) == 2
    with pytest.raises(errors.NotFoundError):
        inspector.block_tables("nobody's")


def test_stats_before_and_after_a_pool_is_attached(
    channel: grpc.Channel, inspector: KvMemoryInspector
) -> None:
    before = inspector.pool_stats()
    assert before.geometry is None
    Holder(channel)
    after = inspector.pool_stats()
    assert after.geometry is not None
    assert (after.geometry.num_blocks, after.geometry.block_size) == (NUM_BLOCKS, BLOCK_SIZE)
    assert after.levels.num_free_blocks == NUM_BLOCKS
    assert after.kvmem_boot_id == before.kvmem_boot_id


def test_closing_a_watch_ends_the_loop_over_it(inspector: KvMemoryInspector) -> None:
    events = inspector.watch()
    next(events)
    events.close()
    assert list(events) == []


def test_nobody_there() -> None:
    with (
        KvMemoryInspector("unix:/nonexistent/kvmem.sock") as inspector,
        pytest.raises(errors.UnavailableError),
    ):
        inspector.pool_stats()
