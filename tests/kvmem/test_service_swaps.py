"""The host tier over the wire; kept over the death of the process, and handed to another holder."""

from __future__ import annotations

import signal
from pathlib import Path

from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2
from tests.kvmem.process import DEADLINE_S, Client, admit, arrive, free, int32s, kvmem_process

WORKER = "the worker"


def attached(address: str, last_executed_step: int = 0) -> tuple[Client, pb.AttachPoolReply]:
    client = Client(address)
    client.open()
    reply = client.attach(
        worker_boot_id=WORKER, num_host_blocks=4, last_executed_step=last_executed_step
    )
    return client, reply


def pairs(copies: types_pb2.BlockCopies) -> list[tuple[int, int]]:
    return list(zip(int32s(copies.src_block_ids), int32s(copies.dst_block_ids), strict=True))


def start(client: Client, name: str, num_tokens: int) -> int:
    sequence_id = client.apply(arrive(name, num_tokens)).results[0].arrived.sequence_id
    assert client.apply(admit(sequence_id, num_tokens)).results[0].status == pb.OP_STATUS_OK
    return sequence_id


def swap_out(client: Client, *sequence_ids: int) -> pb.BatchResult:
    return client.apply(pb.Op(swap_out=pb.SwapOut(sequence_ids=sequence_ids)))


def swap_in(client: Client, sequence_id: int, num_slots: int) -> pb.BatchResult:
    member = pb.SwapInMember(sequence_id=sequence_id, num_slots=num_slots)
    return client.apply(pb.Op(swap_in=pb.SwapIn(members=[member])))


def summary_of(client: Client, sequence_id: int) -> pb.SequenceSummary:
    listed = client.stub.ListSequences(pb.ListSequencesRequest(), timeout=DEADLINE_S)
    return next(one for one in listed.sequences if one.sequence_id == sequence_id)


def test_out_and_in(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client, _ = attached(address)
        running = start(client, "r", 10)
        client.step_id += 1
        out = swap_out(client, running)
        assert out.results[0].status == pb.OP_STATUS_OK
        hosts = [host for _, host in pairs(out.swap_outs)]
        assert len(hosts) == 3
        assert out.levels.num_free_host_blocks == 1
        assert client.stats().geometry.num_host_blocks == 4
        summary = summary_of(client, running)
        assert (summary.status, summary.num_blocks, summary.num_host_blocks) == (
            pb.SEQUENCE_STATUS_SWAPPED,
            0,
            3,
        )
        other = start(client, "other", 8)
        full = swap_out(client, other).results[0]
        assert full.status == pb.OP_STATUS_NO_FREE_HOST_BLOCKS
        assert "2 host blocks are needed, 1 of 4 are free" in full.message
        client.step_id += 1
        back = swap_in(client, running, 13)
        [table] = back.results[0].swapped_in.tables
        blocks = int32s(table.block_ids)
        assert len(blocks) == 4
        assert sorted(pairs(back.swap_ins)) == sorted(zip(hosts, blocks, strict=False))
        assert summary_of(client, running).num_host_blocks == 0
        stats = client.stats()
        assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (3, 3)


def test_a_swapped_sequence_is_there_after_the_service_was_killed(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "journal"), "--recovery-grace-ms", "0")
    with kvmem_process(tmp_path, *journal) as (address, process):
        client, _ = attached(address)
        running = start(client, "r", 8)
        client.step_id += 1
        out = pairs(swap_out(client, running).swap_outs)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    with kvmem_process(tmp_path, *journal) as (address, _):
        client, told = attached(address, last_executed_step=client.step_id)
        assert not told.is_new_pool
        assert not told.pending_swap_outs.src_block_ids
        [request] = client.adopt()
        assert request.sequences[0].status == pb.SEQUENCE_STATUS_SWAPPED
        back = swap_in(client, running, 8)
        assert sorted(host for host, _ in pairs(back.swap_ins)) == sorted(host for _, host in out)


def test_swaps_of_a_step_that_was_never_executed_are_handed_over(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client, _ = attached(address)
        going, coming = start(client, "going", 8), start(client, "coming", 4)
        swap_out(client, coming)
        last_executed = client.step_id
        client.step_id += 1
        out = pairs(swap_out(client, going).swap_outs)
        back = pairs(swap_in(client, coming, 4).swap_ins)
        client.close_session()
        client, told = attached(address, last_executed)
        client.step_id = client.open_reply.last_step_id  # it was never issued
        assert pairs(told.pending_swap_outs) == out
        assert pairs(told.pending_swap_ins) == back
        # One of them ends: what it was given is not free before the next step is acknowledged.
        ended = client.apply(free(going))
        assert ended.levels.num_free_host_blocks == 1
