"""The prefix cache, pins and quotas over the wire; kept over the death of the process."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import numpy as np
import pytest

from octavo.v1 import kvmem_pb2 as pb
from tests.kvmem.process import DEADLINE_S, Client, arrive, free, int32s, kvmem_process, reason_of

WORKER = "the worker"


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def admit_cached(client: Client, sequence_id: int, num_slots: int) -> pb.SequenceTable:
    member = pb.AdmitMember(sequence_id=sequence_id, num_slots=num_slots, use_prefix_cache=True)
    result = client.apply(pb.Op(admit=pb.Admit(members=[member]))).results[0]
    assert result.status == pb.OP_STATUS_OK, result.message
    return result.admitted.tables[0]


def start(client: Client, name: str, num_tokens: int, **fields: str) -> pb.SequenceTable:
    arrived = client.apply(arrive(name, num_tokens, **fields)).results[0].arrived
    return admit_cached(client, arrived.sequence_id, num_tokens)


def serve(client: Client, name: str, num_tokens: int, **fields: str) -> list[int]:
    table = start(client, name, num_tokens, **fields)
    commit = pb.Commit(
        sequence_ids=np.array([table.sequence_id], "<u8").tobytes(),
        num_tokens=ids(0),
        num_computed_tokens=ids(num_tokens),
    )
    client.apply(pb.Op(commit=commit))
    client.apply(free(table.sequence_id), pb.Op(confirm=pb.Confirm(request_id=name)))
    return int32s(table.block_ids)


def cached(client: Client, num_tokens: int, tenant: str = "t", cache_salt: str = "s") -> int:
    request = pb.MatchPrefixRequest(
        tenant=tenant, cache_salt=cache_salt, token_ids=ids(*range(num_tokens))
    )
    return client.stub.MatchPrefix(request, timeout=DEADLINE_S).num_cached_tokens


def pin(client: Client, num_tokens: int, **fields) -> pb.PinReply:
    request = pb.PinRequest(
        fence=client.fence,
        tenant="t",
        cache_salt="s",
        token_ids=ids(*range(num_tokens)),
        **fields,
    )
    return client.stub.Pin(request, timeout=DEADLINE_S)


def unpin(client: Client, pin_id: int) -> None:
    request = pb.UnpinRequest(fence=client.fence, pin_id=pin_id)
    client.stub.Unpin(request, timeout=DEADLINE_S)


def opened(address: str) -> Client:
    client = Client(address)
    client.open()
    client.attach(worker_boot_id=WORKER)
    return client


def test_a_prefix_is_found_pinned_and_let_go(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client = opened(address)
        blocks = serve(client, "a", 10, tenant="t", cache_salt="s")
        assert (cached(client, 10), cached(client, 10, "u"), cached(client, 10, "t", "")) == (
            8,
            0,
            0,
        )
        table = start(client, "b", 11, tenant="t", cache_salt="s")
        assert (table.num_computed_tokens, int32s(table.block_ids)[:2]) == (8, blocks[:2])
        client.apply(free(table.sequence_id))
        assert pin(client, 10) == pb.PinReply(pin_id=1, num_pinned_tokens=8)
        assert pin(client, 10, is_public=True).pin_id == 2
        assert cached(client, 10, "u") == 8
        stats = client.stats()
        assert stats.prefix_cache_enabled
        assert (stats.num_pins, stats.num_tenants, stats.num_published) == (2, 1, 2)
        assert (stats.num_prefix_lookups, stats.num_prefix_hits) == (2, 1)
        assert (stats.num_prefix_lookup_tokens, stats.num_prefix_hit_tokens) == (21, 8)
        assert (stats.levels.num_in_use_blocks, stats.levels.num_cached_blocks) == (2, 0)
        unpin(client, 2)
        assert cached(client, 10, "u") == 0
        unpin(client, 1)
        unpin(client, 1)
        assert client.stats().levels.num_cached_blocks == 2


def test_mistakes_in_pins_are_told(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client = opened(address)
        with pytest.raises(grpc.RpcError) as too_long:
            pin(client, 4, ttl_ms=2**31)
        assert reason_of(too_long.value) == "INVALID_PARAMETER"
        broken = pb.MatchPrefixRequest(token_ids=b"123")
        with pytest.raises(grpc.RpcError) as torn:
            client.stub.MatchPrefix(broken, timeout=DEADLINE_S)
        assert reason_of(torn.value) == "INVALID_BATCH"
        client.fence.epoch -= 1
        with pytest.raises(grpc.RpcError) as stale:
            pin(client, 4)
        assert reason_of(stale.value) == "STALE_EPOCH"


def test_a_pin_ends_by_itself(tmp_path: Path) -> None:
    with kvmem_process(tmp_path) as (address, _):
        client = opened(address)
        serve(client, "a", 8, tenant="t", cache_salt="s")
        pin(client, 8, ttl_ms=1)
        while client.stats().num_pins:
            pass  # the test's own limit ends this


def test_quotas_are_kept_to(tmp_path: Path) -> None:
    options = ("--tenant-max-blocks", "2", "--tenant-max-sequences", "4")
    with kvmem_process(tmp_path, *options) as (address, _):
        client = opened(address)
        too_long, arrived = client.apply(
            arrive("z", 9, tenant="t"), arrive("a", 8, tenant="t")
        ).results
        assert too_long.status == pb.OP_STATUS_TENANT_QUOTA
        sequence_id = arrived.arrived.sequence_id
        member = pb.AdmitMember(sequence_id=sequence_id, num_slots=9)
        refused = client.apply(
            arrive("b", 1, tenant="t"), pb.Op(admit=pb.Admit(members=[member]))
        ).results
        assert [one.status for one in refused] == [pb.OP_STATUS_TENANT_QUOTA] * 2


def test_switched_off_nothing_is_cached(tmp_path: Path) -> None:
    with kvmem_process(tmp_path, "--no-prefix-cache") as (address, _):
        client = opened(address)
        serve(client, "a", 8)
        assert cached(client, 8, "", "") == 0
        assert not client.stats().prefix_cache_enabled
        assert client.stats().levels.num_free_blocks == 8


def test_what_was_cached_is_there_after_the_service_was_killed(tmp_path: Path) -> None:
    """And how it is started then counts, without the journal being lost by it."""
    journal = ("--journal", str(tmp_path / "journal"), "--recovery-grace-ms", "0")
    with kvmem_process(tmp_path, *journal) as (address, process):
        client = opened(address)
        blocks = serve(client, "a", 8, tenant="t", cache_salt="s")
        pin(client, 8, is_public=True)
        before = client.stats()
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    with kvmem_process(tmp_path, *journal, "--tenant-max-blocks", "4") as (address, process):
        client = opened(address)
        assert client.stats().kvmem_boot_id == before.kvmem_boot_id
        table = start(client, "b", 9, tenant="u")
        assert (table.num_computed_tokens, int32s(table.block_ids)[:2]) == (8, blocks)
        assert client.stats().num_pins == 1
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    with kvmem_process(tmp_path, *journal, "--no-prefix-cache") as (address, _):
        client = opened(address)
        assert client.stats().kvmem_boot_id == before.kvmem_boot_id
        assert client.stats().num_pins == 0
        assert client.stats().levels.num_in_use_blocks == 3
