"""Real memory services that are killed, run out of disk, or find a journal they cannot use."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmem_svc.journal.folder import JournalFolder
from octavo.service.columns import I32, U64, pack
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2
from tests.kvmem.process import (
    DEADLINE_S,
    Client,
    Stream,
    admit,
    arrive,
    free,
    kvmem_process,
    reason_of,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DAMAGED_EXIT_CODE = 3
POOL = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "worker_boot_id": "the worker"}


@contextmanager
def kvmem(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A service with its journal in `folder`/journal, and patient with a slow machine."""
    patience = ("--lease-ttl-ms", "60000", "--recovery-grace-ms", "60000")
    journal = ("--journal", str(folder / "journal"))
    with kvmem_process(folder, *journal, *patience, *options) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="kvmem-") as path:
        yield Path(path)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(DEADLINE_S)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "kvmem.log").read_text().splitlines()]


def outcome(folder: Path) -> str:
    return next(line["outcome"] for line in log_of(folder) if line["event"] == "journal")


# --- batches ---------------------------------------------------------------------------


def some_batches(fence: types_pb2.Fence, count: int) -> list[pb.Batch]:
    """Six batches for each request: it arrives, is admitted, forks, decodes twice, and either
    ends or is half preempted. A step for each, acknowledged two steps later.

    Of an even request both sequences end, so that the next one has their rows; ids name rows.
    """
    ops: list[list[pb.Op]] = []
    for i in range(count):
        request, pair = i // 6, i // 12 * 2
        first, second = (1 << 32 | pair, 1 << 32 | pair + 1)
        if request % 2:
            first, second = (2 << 32 | pair + 1, 2 << 32 | pair)
        match i % 6:
            case 0:
                ops.append([arrive(f"request {request}", 6, tenant="t")])
            case 1:
                ops.append([admit(first, 7)])
            case 2:
                fork = pb.Fork(sequence_id=first, num_children=1, token_ids=[1, 2])
                ops.append([pb.Op(fork=fork)])
            case 3 | 4:
                ids = pack([first, second], U64)
                commit = pb.Commit(
                    sequence_ids=ids,
                    token_ids=pack([i, i + 1], I32),
                    num_computed_tokens=pack([3 + i % 6] * 2, I32),
                    state_words=pack([i, i], U64),
                )
                reserve = pb.Reserve(sequence_ids=ids, num_slots=pack([8 + i % 6] * 2, I32))
                ops.append([pb.Op(commit=commit), pb.Op(reserve=reserve)])
            case _ if request % 2:
                ops.append([pb.Op(preempt=pb.Preempt(sequence_ids=[first]))])
            case _:
                ops.append([free(first, second), pb.Op(confirm=pb.Confirm(request_id="nobody"))])
    return [
        pb.Batch(
            fence=fence,
            batch_seq=1 + i,
            step=pb.StepOps(step_id=1 + i, acknowledged_step=max(i - 2, 0), ops=batch_ops),
        )
        for i, batch_ops in enumerate(ops)
    ]


def arrive_with(name: str, prompt: Iterable[int], request_spec: bytes = b"") -> pb.Op:
    return pb.Op(
        arrive=pb.Arrive(
            request_id=name,
            prompt_token_ids=prompt,
            num_candidates=1,
            request_spec=request_spec,
        )
    )


def tables(client: Client) -> pb.GetBlockTablesReply:
    request = pb.GetBlockTablesRequest(max_sequences=1000)
    return client.stub.GetBlockTables(request, timeout=DEADLINE_S)


def stats(client: Client) -> pb.PoolStats:
    """Without what a recovery may change."""
    said = client.stats()
    for volatile in ("kvmem_boot_id", "mutations_open", "orphaned_ms", "num_recorded_tokens"):
        said.ClearField(volatile)
    return said


def deterministic(message: pb.BatchResult) -> bytes:
    return message.SerializeToString(deterministic=True)


class Holder:
    """A scheduler's side of one session through several lives of the service."""

    def __init__(self, **pool: Any) -> None:
        self.pool = {**POOL, **pool}
        self.fence: types_pb2.Fence | None = None
        self.client: Client

    def begin(self, address: str, num_results: int = 0) -> Client:
        """Open the session, or resume it with so many results, and attach the pool."""
        self.client = Client(address)
        if self.fence is None:
            self.client.open()
        else:
            self.client.fence, self.client.batch_seq = self.fence, num_results
            opened = self.client.stub.OpenSession(self.resuming(num_results), timeout=DEADLINE_S)
            assert opened.fence == self.fence
            assert not opened.mutations_open
        self.client.attach(**self.pool)
        if self.fence is not None:
            assert self.client.fence == self.fence
        self.fence = self.client.fence
        return self.client

    def resuming(self, num_results: int) -> pb.OpenSessionRequest:
        return pb.OpenSessionRequest(
            holder="test", resume=self.fence, last_result_batch_seq=num_results
        )

    def stream(self, num_results: int) -> Stream:
        """The session that was begun, on a stream from here on."""
        stream = Stream(self.client, pb.SessionRequest(open=self.resuming(num_results)))
        assert stream.receive().opened.mutations_open
        return stream


def undisturbed(folder: Path, count: int) -> tuple[list[bytes], object]:
    """What becomes of the batches when nothing happens: replies, tables, stats."""
    folder.mkdir()
    with kvmem_process(folder, "--lease-ttl-ms", "60000") as (address, _):
        client = Holder().begin(address)
        replies = [
            client.stub.Apply(batch, timeout=DEADLINE_S)
            for batch in some_batches(client.fence, count)
        ]
        failed = {one.message for reply in replies for one in reply.results if one.message}
        assert failed == {"there is no request 'nobody'"}
        assert any(reply.copies.src_block_ids for reply in replies)
        return [deterministic(reply) for reply in replies], (tables(client), stats(client))


# --- killed ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_sent_ahead", [0, 1, 4])
def test_killed_in_the_middle_of_batches_nothing_is_lost(folder: Path, num_sent_ahead: int) -> None:
    """Killed four times, with batches sent whose replies were not read."""
    goals = [17, 35, 53, 71, 90]
    expected = undisturbed(folder / "undisturbed", goals[-1])
    replies: list[bytes] = []
    found: tuple[object, object] | None = None
    holder = Holder()
    for goal in goals:
        with kvmem(folder) as (address, process):
            assert outcome(folder) == ("recovered" if replies else "new")
            batches = some_batches(holder.begin(address, len(replies)).fence, goals[-1])
            stream = holder.stream(len(replies))
            if replies:  # answered before it was killed: the same answer again
                assert deterministic(stream.send(batches[len(replies) - 1])) == replies[-1]
            while len(replies) < goal:
                replies.append(deterministic(stream.send(batches[len(replies)])))
            found = tables(holder.client), stats(holder.client)
            for batch in batches[goal : goal + num_sent_ahead]:
                stream.put(pb.SessionRequest(batch=batch))
            kill(process)
    assert (replies, found) == expected


def test_after_a_clean_stop_it_goes_on_as_well(folder: Path) -> None:
    with kvmem(folder) as (address, process):
        client = Holder().begin(address)
        for batch in some_batches(client.fence, 10):
            client.stub.Apply(batch, timeout=DEADLINE_S)
        before = tables(client), stats(client), client.fence.kvmem_boot_id
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    with kvmem(folder) as (address, _):
        client = Client(address)
        assert (tables(client), stats(client), client.stats().kvmem_boot_id) == before


def test_killed_again_and_again_with_a_journal_folded_in_between(folder: Path) -> None:
    """Long prompts fill segments of 1 MiB, which are folded while it goes on."""
    journal = JournalFolder(folder / "journal")
    holder, batch_seq, names = Holder(max_model_len=4096), 0, set()
    for life in range(3):
        with kvmem(folder, "--journal-segment-mib", "1") as (address, process):
            client = holder.begin(address, batch_seq)
            for i in range(120):
                come_and_go(client, f"{life}.{i}")
            client.apply(arrive(f"{life} stays", 9))
            names.add(f"{life} stays")
            batch_seq = client.batch_seq
            if life != 1:  # in the other life it is killed while it folds
                until(lambda goal=life + 1: max(journal.snapshot_numbers(), default=0) > goal)
            kill(process)
    with kvmem(folder) as (address, _):
        views = tables(Client(address)).sequences
        assert {view.request_id for view in views} == names
    # 120 arrivals of 12 kB in every life: most of it is folded away.
    assert sum(path.stat().st_size for path in journal.files()) < 2.5 * 2**20


def come_and_go(client: Client, name: str) -> None:
    prompt = range(20_000, 24_000)
    [arrived] = client.apply(arrive_with(name, prompt)).results
    confirm = pb.Op(confirm=pb.Confirm(request_id=name))
    client.apply(free(arrived.arrived.sequence_id), confirm)


def test_after_a_recovery_the_holder_alone_may_go_on_at_first(folder: Path) -> None:
    with kvmem(folder) as (address, process):
        client = Holder().begin(address)
        client.apply(arrive("a", 5))
        kill(process)
    with kvmem(folder) as (address, process):
        other, former = Client(address), Client(address)
        with pytest.raises(grpc.RpcError) as caught:
            other.open()
        assert reason_of(caught.value) == "SESSION_HELD"
        former.fence, former.batch_seq = client.fence, client.batch_seq
        with pytest.raises(grpc.RpcError) as caught:
            former.apply(arrive("b", 5))
        assert reason_of(caught.value) == "NO_POOL"
        kill(process)
    with kvmem(folder, "--recovery-grace-ms", "0") as (address, _):
        other = Client(address)
        other.open()
        other.attach(**POOL)
        assert [request.request_id for request in other.adopt()] == ["a"]


def test_only_its_owner_can_read_it(folder: Path) -> None:
    before = os.umask(0)
    try:
        with kvmem(folder) as (address, _):
            Holder().begin(address).apply(arrive("a", 5))
    finally:
        os.umask(before)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in (folder / "journal").iterdir()}
    assert modes == {"000001.log": "0o600", "lock": "0o600", "fold.lock": "0o600"}
    assert oct((folder / "journal").stat().st_mode & 0o777) == "0o700"


def test_a_prompt_is_in_the_journal_and_not_in_the_log(folder: Path) -> None:
    secret = [48_611, 48_612, 48_613]
    with kvmem(folder, "--log-level", "debug") as (address, _):
        Holder().begin(address).apply(arrive_with("a", secret))
    content = (folder / "journal" / "000001.log").read_bytes()
    assert pb.Arrive(prompt_token_ids=secret).SerializeToString() in content
    assert "4861" not in (folder / "kvmem.log").read_text()


# --- refused ---------------------------------------------------------------------------


def exit_of(folder: Path, *options: str) -> tuple[int, str]:
    """Exit status and last words of a service that cannot start."""
    command = [sys.executable, "-m", "kvmem_svc", "--address", f"unix:{folder}/other.sock"]
    ended = subprocess.run(
        [*command, "--journal", str(folder / "journal"), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return ended.returncode, ended.stderr.splitlines()[-1]


def test_a_second_service_on_the_same_journal_is_refused(folder: Path) -> None:
    with kvmem(folder) as (address, _):
        client = Holder().begin(address)
        status, why = exit_of(folder)
        assert status == DAMAGED_EXIT_CODE
        assert "another process works on the journal" in why
        client.apply(arrive("a", 5))  # the first one has not noticed


def test_a_damaged_journal_is_refused_with_advice(folder: Path) -> None:
    with kvmem(folder) as (address, _):
        client = Holder().begin(address)
        client.apply(arrive("a", 5))
        client.apply(arrive("b", 5))
    path = folder / "journal" / "000001.log"
    content = bytearray(path.read_bytes())
    content[150] ^= 0x40
    path.write_bytes(content)
    status, why = exit_of(folder)
    assert status == DAMAGED_EXIT_CODE
    assert "000001.log, byte 128: the checksum" in why
    assert f"octavo kvmem verify {folder / 'journal'}" in why
    assert path.read_bytes() == content
    with kvmem(folder, "--discard-damaged-journal") as (address, _):
        assert outcome(folder) == "discarded"
        again = Holder().begin(address)
        assert again.fence.kvmem_boot_id != client.fence.kvmem_boot_id
        assert not tables(again).sequences
    [aside] = JournalFolder(folder / "journal").set_aside_folders()
    assert (aside / "000001.log").read_bytes() == content


# --- no room ---------------------------------------------------------------------------


def health_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status


def limit_file_size(process: subprocess.Popen, num_bytes: int) -> None:
    """From here on, as on a full disk, no file of the process grows beyond num_bytes."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_acknowledged_while_there_is_no_room(folder: Path, killed: bool) -> None:
    path = folder / "journal" / "000001.log"
    with kvmem(folder) as (address, process):
        client = Holder().begin(address)
        # Larger than the log of the process, which the limit is not meant for.
        client.apply(arrive_with("long", [1 << 29] * 30, request_spec=b"x" * 50_000))
        size = path.stat().st_size
        assert size > (folder / "kvmem.log").stat().st_size + 10_000
        limit_file_size(process, size + 30)
        batch = client.batch(arrive("a", 5))
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                client.stub.Apply(batch, timeout=DEADLINE_S)
            assert reason_of(caught.value) == "JOURNAL_FAILED"
        with pytest.raises(grpc.RpcError) as caught:
            client.attach(**POOL)
        assert reason_of(caught.value) == "JOURNAL_FAILED"
        until(lambda: health_of(address) == NOT_SERVING)
        assert path.stat().st_size == size, "the part that did fit is cut off"
        if killed:
            kill(process)
        else:
            limit_file_size(process, resource.RLIM_INFINITY)
            until(lambda: health_of(address) == SERVING)
            assert_goes_on(client, batch)
            kill(process)
            assert path.stat().st_size > size
    with kvmem(folder) as (address, _):
        again = Client(address)
        again.fence, again.batch_seq = client.fence, batch.batch_seq
        request = pb.OpenSessionRequest(holder="test", resume=client.fence)
        request.last_result_batch_seq = batch.batch_seq - 1
        again.stub.OpenSession(request, timeout=DEADLINE_S)
        again.attach(**POOL)
        names = {view.request_id for view in tables(again).sequences}
        assert names == ({"long"} if killed else {"long", "a", "b"})
        if killed:
            assert_goes_on(again, batch)


def test_a_log_on_the_same_full_disk_changes_nothing_about_that(folder: Path) -> None:
    with kvmem(folder) as (address, process):
        client = Holder().begin(address)
        client.apply(arrive("long", 5))
        limit_file_size(process, 1)
        batch = client.batch(arrive("a", 5))
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.Apply(batch, timeout=DEADLINE_S)
        assert reason_of(caught.value) == "JOURNAL_FAILED"
        until(lambda: health_of(address) == NOT_SERVING)
        limit_file_size(process, resource.RLIM_INFINITY)
        until(lambda: health_of(address) == SERVING)
        assert_goes_on(client, batch)


def assert_goes_on(client: Client, batch: pb.Batch) -> None:
    """The batch that was not acknowledged is sent again, and there is another one."""
    [arrived] = client.stub.Apply(batch, timeout=DEADLINE_S).results
    assert arrived.status == pb.OP_STATUS_OK
    [arrived] = client.apply(arrive("b", 5)).results
    assert arrived.arrived.arrival_number == 3
    names = [view.request_id for view in tables(client).sequences]
    assert names == ["long", "a", "b"]


# --- the tool --------------------------------------------------------------------------


def octavo(*arguments: str, answer: str = "", state: Path | None = None) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "octavo", "kvmem", *arguments],
        input=answer,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **({"OCTAVO_STATE_DIR": str(state)} if state else {})},
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def filled(folder: Path) -> Path:
    """A journal's folder: sessions, requests, tokens."""
    with kvmem(folder) as (address, _):
        client = Holder().begin(address)
        secret = [48_611, 48_612, 48_613]
        client.apply(arrive_with("who", secret, request_spec=b"sp-cret"))
        client.apply(admit(1 << 32, 8))
        commit = pb.Commit(
            sequence_ids=pack([1 << 32], U64),
            token_ids=pack([48_614], I32),
            num_computed_tokens=pack([3], I32),
        )
        commit.states.add(sequence_id=1 << 32, scheduler_state=b"st-cret")
        client.apply(pb.Op(commit=commit), pb.Op(reserve=pb.Reserve()))
        client.close_session()
    return folder / "journal"


def test_show_tells_what_happened_and_nothing_of_prompts(filled: Path) -> None:
    status, said, _ = octavo("show", str(filled))
    assert status == 0
    lines = said.splitlines()
    kinds = ["grant session", "confirm pool", "batch", "batch", "batch", "close session"]
    assert len(lines) == len(kinds)
    for number, (line, kind) in enumerate(zip(lines, kinds, strict=True), 1):
        assert line.split()[0] == str(number)
        assert kind in line
        assert " B" in line
    assert "batch" in lines[2]
    assert lines[2].endswith("1 for step 1, acknowledging 0: 1 arrive")
    assert lines[4].endswith("3 for step 1, acknowledging 0: 1 commit, 1 reserve")
    for hidden in ("4861", "cret", "who"):
        assert hidden not in said
    status, said, _ = octavo("show", "--tokens", str(filled))
    assert status == 0
    assert "arrive 'who': [48611, 48612, 48613]" in said
    assert "commit 4294967296: [48614]" in said


def test_verify_says_whether_it_is_whole(filled: Path) -> None:
    status, said, _ = octavo("verify", str(filled))
    assert status == 0
    assert "000001.log" in said
    assert "6 records" in said
    assert "whole: 6 records" in said
    assert "1 requests, 1 live sequences" in said
    path = filled / "000001.log"
    whole = path.read_bytes()
    path.write_bytes(whole + b"torn")
    status, said, _ = octavo("verify", str(filled))
    assert status == 0
    assert "4 bytes follow the last whole record" in said
    path.write_bytes(whole[:140] + bytes([whole[140] ^ 1]) + whole[141:])
    status, said, why = octavo("verify", str(filled))
    assert status == DAMAGED_EXIT_CODE
    assert "damaged: 000001.log, byte 128: the checksum of a record's header is wrong" in why
    status, _, why = octavo("show", str(filled))
    assert (status, "byte 128" in why) == (DAMAGED_EXIT_CODE, True)


def test_purge_asks_and_deletes_everything(filled: Path) -> None:
    journal = JournalFolder(filled)
    aside = journal.set_aside("diverged")
    (filled / "000001.log").write_bytes(b"x" * 200)
    (filled / "not ours").touch()
    status, said, _ = octavo("purge", str(filled), answer="n\n")
    assert status == 1
    assert "Delete 1 files and 1 journals set aside" in said
    assert journal.files()
    status, said, _ = octavo("purge", str(filled), answer="y\n")
    assert status == 0
    assert "deleted 1 files and 1 journals set aside" in said
    assert not aside.exists()
    assert sorted(path.name for path in filled.iterdir()) == ["fold.lock", "lock", "not ours"]


def test_purge_refuses_while_a_service_uses_the_journal(folder: Path) -> None:
    with kvmem(folder) as (address, _):
        Holder().begin(address).apply(arrive("a", 5))
        status, _, why = octavo("purge", "--yes", str(folder / "journal"))
        assert status == 1
        assert "another process works on the journal" in why
        # To look at it is allowed.
        assert octavo("verify", str(folder / "journal"))[0] == 0
        assert octavo("show", str(folder / "journal"))[0] == 0
    assert (folder / "journal" / "000001.log").exists()
    assert octavo("purge", "--yes", str(folder / "journal"))[0] == 0
    with kvmem(folder):
        assert outcome(folder) == "new"


def test_without_a_path_it_is_the_journal_of_the_stack(filled: Path) -> None:
    status, said, _ = octavo("verify", state=filled.parent)
    assert (status, "whole: 6 records" in said) == (0, True)
    status, _, why = octavo("verify", state=filled.parent / "elsewhere")
    assert (status, "there is no journal folder" in why) == (1, True)
