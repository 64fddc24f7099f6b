"""ListSequences: every sequence there is, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2
from tests.kvmem.process import DEADLINE_S, Client, admit, arrive, free, kvmem_process, reason_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with kvmem_process(tmp_path_factory.mktemp("kvmem")) as (address, _):
        client = Client(address)
        client.open()
        yield client
        client.channel.close()


def page(client: Client, after: int = 0, size: int = 0) -> pb.ListSequencesReply:
    request = pb.ListSequencesRequest(after_sequence_id=after, page_size=size)
    return client.stub.ListSequences(request, timeout=DEADLINE_S)


def test_all_of_them_in_pages(client: Client) -> None:
    assert page(client) == pb.ListSequencesReply()  # no pool yet
    client.attach(num_blocks=32, num_host_blocks=8)
    names = [f"r{number}" for number in range(7)]
    arrived = client.apply(*(arrive(name, 6, tenant=f"t-{name}") for name in names)).results
    ids = [result.arrived.sequence_id for result in arrived]
    client.apply(admit(ids[0], 9), free(ids[1]))
    fork = pb.Op(fork=pb.Fork(sequence_id=ids[0], num_children=1))
    (forked,) = client.apply(fork).results
    (child,) = forked.forked.child_sequence_ids

    seen: list[pb.SequenceSummary] = []
    after, more = 0, True
    while more:
        reply = page(client, after, 3)
        assert 1 <= len(reply.sequences) <= 3
        seen += reply.sequences
        after, more = reply.sequences[-1].sequence_id, reply.truncated
    assert [one.sequence_id for one in seen] == sorted([*ids, child])
    assert list(page(client).sequences) == seen
    assert page(client, after) == pb.ListSequencesReply()

    by_id = {one.sequence_id: one for one in seen}
    assert by_id[ids[0]] == pb.SequenceSummary(
        sequence_id=ids[0],
        request_id="r0",
        arrival_number=arrived[0].arrived.arrival_number,
        candidate=0,
        tenant="t-r0",
        status=pb.SEQUENCE_STATUS_RUNNING,
        num_prompt_tokens=6,
        num_tokens=6,
        num_computed_tokens=0,
        num_blocks=3,
        num_shared_blocks=3,
    )
    assert by_id[child].candidate == 1
    assert by_id[child].num_shared_blocks == 3
    assert by_id[ids[1]].status == pb.SEQUENCE_STATUS_FINISHED
    assert by_id[ids[1]].finish_reason == types_pb2.FINISH_REASON_STOP
    assert by_id[ids[1]].tenant == "t-r1"
    assert by_id[ids[2]].status == pb.SEQUENCE_STATUS_WAITING
    assert by_id[ids[2]].num_blocks == 0


def test_a_swapped_one_has_its_blocks_in_the_host_tier(client: Client) -> None:
    swapped = [one.sequence_id for one in page(client).sequences if one.request_id == "r0"]
    client.apply(pb.Op(swap_out=pb.SwapOut(sequence_ids=swapped)))
    for one in page(client).sequences:
        if one.sequence_id in swapped:
            assert one.status == pb.SEQUENCE_STATUS_SWAPPED
            assert (one.num_blocks, one.num_host_blocks) == (0, 3)
        else:
            assert one.num_host_blocks == 0


def test_a_page_that_is_just_full_is_the_last(client: Client) -> None:
    num_sequences = len(page(client).sequences)
    assert not page(client, size=num_sequences).truncated
    assert page(client, size=num_sequences - 1).truncated


def test_a_page_size_out_of_range(client: Client) -> None:
    page(client, size=4096)
    with pytest.raises(grpc.RpcError, match="page_size is 4097; it must be in") as raised:
        page(client, size=4097)
    assert reason_of(raised.value) == "INVALID_PARAMETER"
