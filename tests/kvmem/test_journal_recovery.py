"""A journal leads to the state that was there: byte for byte, or it says why not."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvmem_svc import convert
from kvmem_svc.core import mutations as m
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.tenants import Quota
from kvmem_svc.journal import fold as fold_module
from kvmem_svc.journal import recover as recover_module
from kvmem_svc.journal import segment as s
from kvmem_svc.journal.encoding import KINDS, decode, encode
from kvmem_svc.journal.errors import JournalDamaged, JournalDiverged, JournalError, JournalLocked
from kvmem_svc.journal.file_journal import FileJournal
from kvmem_svc.journal.fold import fold
from kvmem_svc.journal.folder import JournalFolder, machine_boot_id
from kvmem_svc.journal.load import load, pack_state
from kvmem_svc.journal.recover import Outcome, Report, recover
from kvmem_svc.journal.writer import SegmentLimits, SegmentWriter
from tests.kvmem.journal_history import (
    GEOMETRY,
    MAX_SEQUENCES,
    Command,
    History,
    commands,
    histories,
    result_bytes,
)

SOON_S = 60.0
SMALL_SEGMENT_BYTES = 1500
UNLIMITED = SegmentLimits(max_bytes=1 << 30, max_records=1 << 30)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Journalled:
    """A history whose mutations are written to `folder`. states[i]: after i records."""

    def __init__(self, path: Path, max_bytes: int = SMALL_SEGMENT_BYTES) -> None:
        self.folder = JournalFolder(path)
        self.memory = KvMemory("the-boot-id", max_sequences=MAX_SEQUENCES)
        life = s.Life(m.CORE_VERSION, machine_boot_id(), "the-boot-id", MAX_SEQUENCES)
        self.num_sealed = 0
        limits = SegmentLimits(max_bytes=max_bytes)
        self.writer = SegmentWriter(self.folder, life, None, limits, self._count_sealed)
        self.history = History(self.memory, self._write)
        self.states = [pack_state(self.memory)]

    def _count_sealed(self, _: int) -> None:
        self.num_sealed += 1

    def _write(self, mutation: m.Mutation, reply: m.Reply) -> None:
        kind, payload = encode(mutation)
        self.writer.append(kind, payload, convert.reply_digest(reply))
        self.states.append(pack_state(self.memory))


@contextmanager
def journalled(drawn: list[Command], max_bytes: int = SMALL_SEGMENT_BYTES) -> Iterator[Journalled]:
    with tempfile.TemporaryDirectory() as path:
        journal = Journalled(Path(path), max_bytes)
        journal.history.run(drawn)
        yield journal


@contextmanager
def recovered(
    path: Path, *, discard_damaged: bool = False, max_sequences: int = MAX_SEQUENCES
) -> Iterator[tuple[KvMemory, FileJournal, Report]]:
    memory, journal, report = recover(
        path,
        lambda: "another-boot-id",
        max_sequences=max_sequences,
        limits=UNLIMITED,
        discard_damaged=discard_damaged,
    )
    try:
        yield memory, journal, report
    finally:
        journal.close()


def state_of(path: Path) -> bytes:
    loaded = load(JournalFolder(path))
    assert loaded is not None
    return pack_state(loaded.memory)


def record_offsets(path: Path) -> list[int]:
    """Where the records of a segment begin, and where the last one ends."""
    content = path.read_bytes()
    header = s.unpack_file_header(content, s.SEGMENT_MAGIC, path.name)
    assert header is not None
    reader = s.SegmentReader(content, path.name, header.next_record)
    return [*(record.offset for record in reader), reader.end]


# --- what is recovered -----------------------------------------------------------------


@some
@given(histories)
def test_a_recovered_state_is_the_one_that_was_there(drawn: list[Command]) -> None:
    with journalled(drawn) as live, recovered(live.folder.path) as (memory, journal, report):
        assert pack_state(memory) == live.states[-1]
        assert report.outcome is Outcome.RECOVERED
        assert report.num_records == journal.num_records == len(live.states) - 1
        assume(live.num_sealed)  # more than one segment


@few
@given(histories)
def test_torn_anywhere_in_the_last_record_the_state_is_the_one_before(
    drawn: list[Command],
) -> None:
    with journalled(drawn, max_bytes=1 << 20) as live:
        path = live.folder.segment(1)
        content = path.read_bytes()
        *_, start, end = record_offsets(path)
        assert end == len(content)
        for torn_at in range(start, end):
            path.write_bytes(content[:torn_at])
            assert state_of(live.folder.path) == live.states[-2]
        with recovered(live.folder.path) as (memory, _, report):
            assert pack_state(memory) == live.states[-2]
            assert report.num_torn_bytes == end - 1 - start
        assert path.stat().st_size == start


@some
@given(histories, st.data())
def test_a_changed_byte_before_the_tail_is_refused(
    drawn: list[Command], data: st.DataObject
) -> None:
    with journalled(drawn) as live:
        number = data.draw(st.sampled_from(live.folder.segment_numbers()))
        path = live.folder.segment(number)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        offset = max((start for start in record_offsets(path)[:-1] if start <= at), default=0)
        path.write_bytes(content)
        with pytest.raises(JournalDamaged) as caught, recovered(live.folder.path):
            pass
        assert (caught.value.file, caught.value.offset) == (path.name, offset)
        assert not isinstance(caught.value, JournalDiverged)
        folder = live.folder.path
        for advice in (f"octavo kvmem verify {folder}", f"octavo kvmem purge {folder}"):
            assert advice in str(caught.value)
        assert path.read_bytes() == content, "nothing is touched"


@some
@given(st.lists(histories, min_size=1, max_size=3), st.data())
def test_a_snapshot_and_what_follows_are_the_whole(
    drawn: list[list[Command]], data: st.DataObject
) -> None:
    """Folded several times in the middle of a history, up to any sealed segment."""
    with journalled([]) as live:
        for part in drawn:
            live.history.run(part)
            numbers = live.folder.segment_numbers()
            until = data.draw(st.sampled_from(numbers))
            done = fold(live.folder, until)
            assert (done is None) == (until == numbers[0])
            if done is not None:
                assert live.folder.snapshot_numbers() == [until]
                assert live.folder.segment_numbers() == [n for n in numbers if n >= until]
        with recovered(live.folder.path) as (memory, journal, _):
            assert pack_state(memory) == live.states[-1]
            assert journal.num_records == len(live.states) - 1


@some
@given(histories, st.booleans())
def test_a_batch_sent_again_after_recovery_gets_the_same_reply(
    drawn: list[Command], folded: bool
) -> None:
    with journalled(drawn) as live:
        if folded:
            fold(live.folder, live.folder.segment_numbers()[-1])
        with recovered(live.folder.path) as (memory, _, _):
            kept = live.memory.ledger.replies
            again = [sent for sent in live.history.sent if sent.batch.batch_seq in kept]
            assert len(again) == len(kept)
            for sent in again if live.memory.ledger.mutations_open else ():
                reply = memory.commit(m.ApplyBatch(sent.batch))
                assert result_bytes(reply) == result_bytes(sent.result)


@some
@given(histories, st.lists(commands, max_size=20))
def test_a_recovered_journal_goes_on(before: list[Command], after: list[Command]) -> None:
    with journalled(before) as live:
        with recovered(live.folder.path) as (memory, journal, _):
            history = History(
                memory, lambda mutation, reply: journal.append(mutation, digest(reply))
            )
            history.num_workers = live.history.num_workers
            history.num_requests = live.history.num_requests
            # What was sent in the life before is not known to this history.
            history.run([command for command in after if command[0] != "send_again"])
            state = pack_state(memory)
        assert state_of(live.folder.path) == state


digest = convert.reply_digest


@given(st.integers(0, 6), st.integers(0, 2**40), st.text(max_size=9))
def test_every_mutation_is_read_as_it_was_written(count: int, number: int, text: str) -> None:
    """Of batches the histories say more."""
    made: list[m.Mutation] = [
        m.GrantSession(text, text[::-1]),
        m.ConfirmPool(text, GEOMETRY, number),
        m.CloseSession(),
        m.Expire([f"{text}{i}" for i in range(count)]),
        m.Configure(count % 2 == 0, Quota(number, count)),
        m.Pin(Domain(text, text[::-1]), np.arange(count, dtype=np.int32), number, count % 2 == 1),
        m.Unpin(number),
    ]
    for mutation in made:
        kind, payload = encode(mutation)
        again = decode(kind, payload, KvMemory("x", max_sequences=1).ledger.fence)
        assert repr(again) == repr(mutation)
    assert {type(mutation) for mutation in made} == set(KINDS) - {m.ApplyBatch}
    assert set(KINDS) == set(m.Mutation.__args__)
    assert sorted(kind.number for kind in KINDS.values()) == list(range(1, len(KINDS) + 1))


# --- what is not -----------------------------------------------------------------------


def lived(path: Path, max_bytes: int = SMALL_SEGMENT_BYTES) -> Journalled:
    live = Journalled(path, max_bytes)
    live.history.run([("family", i, i, i) for i in range(12)])
    return live


def rewrite_record(path: Path, index: int, **changes: int) -> None:
    """Write a segment again, with another reply digest or core version in one record."""
    content = path.read_bytes()
    header = s.unpack_file_header(content, s.SEGMENT_MAGIC, path.name)
    assert header is not None
    whole = content[: s.FILE_HEADER_BYTES]
    for i, record in enumerate(s.SegmentReader(content, path.name, header.next_record)):
        changed = dataclasses.replace(record, **changes) if i == index else record
        fields = (changed.kind, changed.number, changed.unix_time_ms, changed.reply_digest)
        whole += s.pack_record(changed.core_version, *fields, changed.payload)
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "changes",
    [{"reply_digest": 12345}, {"core_version": m.CORE_VERSION + 1}, {"kind": 77}, {"kind": 1}],
)
def test_a_replay_that_differs_begins_another_life(tmp_path: Path, changes: dict[str, int]) -> None:
    live = lived(tmp_path)
    rewrite_record(live.folder.segment(2), 1, **changes)
    before = {path.name: path.read_bytes() for path in live.folder.files()}
    with recovered(tmp_path) as (memory, journal, report):
        assert report.outcome is Outcome.DIVERGED
        assert not report.recovered
        assert memory.ledger.kvmem_boot_id == "another-boot-id"
        assert memory.manager is None
        assert journal.num_records == 0
    assert report.set_aside is not None
    assert report.set_aside.name.startswith("diverged-")
    assert {path.name: path.read_bytes() for path in report.set_aside.iterdir()} == before
    with recovered(tmp_path) as (memory, _, report):
        assert report.outcome is Outcome.RECOVERED
        assert memory.ledger.kvmem_boot_id == "another-boot-id"


def test_another_core_version_begins_another_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived(tmp_path)
    monkeypatch.setattr("kvmem_svc.journal.load.CORE_VERSION", m.CORE_VERSION + 1)
    with recovered(tmp_path) as (memory, _, report):
        assert report.outcome is Outcome.DIVERGED
        assert memory.ledger.kvmem_boot_id == "another-boot-id"


def test_a_snapshot_of_a_state_that_makes_no_sense_begins_another_life(tmp_path: Path) -> None:
    live = lived(tmp_path)
    newest = live.folder.segment_numbers()[-1]
    fold(live.folder, newest)
    path = live.folder.snapshot(newest)
    header, _ = s.unpack_snapshot(path.read_bytes(), path.name)
    path.write_bytes(s.pack_snapshot(header, b"\x80"))  # msgpack of {}
    with recovered(tmp_path) as (_, _, report):
        assert report.outcome is Outcome.DIVERGED


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    live = lived(tmp_path)
    newest = live.folder.segment_numbers()[-1]
    fold(live.folder, newest)
    path = live.folder.snapshot(newest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match=rf"{path.name}, byte 132"), recovered(tmp_path):
        pass


def test_a_reboot_of_the_machine_voids_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = lived(tmp_path)
    fold(live.folder, 2)
    # Whatever a machine that went down without a word has left of it.
    live.folder.segment(3).write_bytes(live.folder.segment(3).read_bytes()[:200])
    live.folder.segment(2).unlink()
    monkeypatch.setattr(recover_module, "machine_boot_id", lambda: "after the reboot")
    with recovered(tmp_path) as (memory, _, report):
        assert report.outcome is Outcome.VOID
        assert memory.ledger.kvmem_boot_id == "another-boot-id"
        assert [path.name for path in live.folder.files()] == ["000001.log"]
        assert live.folder.set_aside_folders() == []
    with recovered(tmp_path) as (_, _, report):
        assert report.outcome is Outcome.RECOVERED


def test_a_damaged_journal_is_set_aside_when_that_is_asked_for(tmp_path: Path) -> None:
    live = lived(tmp_path)
    path = live.folder.segment(2)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    with pytest.raises(JournalDamaged), recovered(tmp_path):
        pass
    with recovered(tmp_path, discard_damaged=True) as (memory, _, report):
        assert report.outcome is Outcome.DISCARDED
        assert memory.ledger.kvmem_boot_id == "another-boot-id"
        assert report.set_aside is not None
        assert report.set_aside.name.startswith("damaged-")
        assert (report.set_aside / path.name).read_bytes()[:1] == b"?"


def test_asking_to_discard_a_damaged_journal_keeps_a_whole_one(tmp_path: Path) -> None:
    live = lived(tmp_path)
    with recovered(tmp_path, discard_damaged=True) as (memory, _, report):
        assert report.outcome is Outcome.RECOVERED
        assert pack_state(memory) == live.states[-1]


def test_a_recovered_memory_keeps_its_size(tmp_path: Path) -> None:
    live = lived(tmp_path)
    with recovered(tmp_path, max_sequences=MAX_SEQUENCES + 1) as (memory, _, _):
        assert memory.max_sequences == MAX_SEQUENCES
        assert pack_state(memory) == live.states[-1]


def test_a_new_folder_begins_a_life(tmp_path: Path) -> None:
    with recovered(tmp_path / "a" / "b") as (memory, _, report):
        assert report.outcome is Outcome.NEW
        assert memory.ledger.kvmem_boot_id == "another-boot-id"
    with recovered(tmp_path / "a" / "b") as (memory, _, report):
        assert report.outcome is Outcome.RECOVERED, "also when nothing has happened yet"


def test_a_journal_is_one_process_alone(tmp_path: Path) -> None:
    with recovered(tmp_path), pytest.raises(JournalLocked), recovered(tmp_path):
        pass
    with recovered(tmp_path):
        pass
    (tmp_path / "000001.log").write_bytes(b"?" * 200)
    for _ in range(2):  # a refused start lets it go again
        with pytest.raises(JournalDamaged), recovered(tmp_path):
            pass


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot use the journal folder"):
        JournalFolder(tmp_path / "file" / "journal")


# --- folding ---------------------------------------------------------------------------


def test_a_fold_that_was_killed_anywhere_changes_nothing(tmp_path: Path) -> None:
    live = lived(tmp_path)
    newest = live.folder.segment_numbers()[-1]
    before = {path: path.read_bytes() for path in live.folder.files()}
    assert fold(live.folder, newest) is not None
    snapshot = live.folder.snapshot(newest)
    content = snapshot.read_bytes()
    # Killed while it wrote; before it took away what is covered; in the middle of that.
    kept = sorted(path for path in before if path.name < f"{newest:06}")
    scratch = snapshot.with_suffix(".tmp")
    for named, remaining in itertools.product([False, True], range(len(kept) + 1)):
        if not named and remaining < len(kept):
            continue
        for path in kept:
            path.unlink(missing_ok=True)
        for path in kept[len(kept) - remaining :]:
            path.write_bytes(before[path])
        snapshot.unlink(missing_ok=True)
        scratch.write_bytes(content[: len(content) // 2])
        if named:
            snapshot.write_bytes(content)
        with recovered(tmp_path) as (memory, _, _):
            assert pack_state(memory) == live.states[-1]
            assert not scratch.exists()
            expected = [newest] if named else live.folder.segment_numbers()
            assert live.folder.segment_numbers() == expected


def test_a_fold_of_a_diverging_journal_leaves_it_as_it_is(tmp_path: Path) -> None:
    live = lived(tmp_path)
    rewrite_record(live.folder.segment(2), 0, reply_digest=1)
    before = [path.name for path in live.folder.files()]
    with pytest.raises(JournalDiverged):
        fold(live.folder, live.folder.segment_numbers()[-1])
    assert [path.name for path in live.folder.files()] == before


def test_who_recovers_waits_for_who_folds(tmp_path: Path) -> None:
    live = lived(tmp_path)
    order: list[str] = []
    held = threading.Event()

    def hold() -> None:
        with live.folder.fold_lock():
            held.set()
            time.sleep(0.2)  # for as long as it takes the other to come here and wait
            order.append("folded")

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with pytest.raises(JournalLocked):
        fold(live.folder, 2)
    with recovered(tmp_path) as (memory, _, _):
        order.append("recovered")
        assert pack_state(memory) == live.states[-1]
    thread.join()
    assert order == ["folded", "recovered"]


def run_fold(path: Path, *options: str) -> int:
    command = [sys.executable, "-m", "kvmem_svc.journal.fold", str(path), *options]
    return subprocess.run(command, check=False, timeout=SOON_S, capture_output=True).returncode


def test_the_folding_process(tmp_path: Path) -> None:
    live = lived(tmp_path)
    with live.folder.fold_lock():
        assert run_fold(tmp_path) == fold_module.BUSY_EXIT_CODE
    # Its service has ended meanwhile: it does nothing.
    assert run_fold(tmp_path, "--parent-pid", "1") == 0
    assert live.folder.snapshot_numbers() == []
    assert run_fold(tmp_path, "--parent-pid", str(os.getpid())) == 0
    newest = live.folder.segment_numbers()[-1]
    assert live.folder.snapshot_numbers() == [newest]
    assert live.folder.segment_numbers() == [newest]
    assert oct(live.folder.snapshot(newest).stat().st_mode & 0o777) == "0o600"
    assert state_of(tmp_path) == live.states[-1]
    live.folder.snapshot(newest).write_bytes(b"")
    (tmp_path / f"{newest:06}.log").rename(tmp_path / f"{newest + 1:06}.log")
    assert run_fold(tmp_path, "--until", str(newest + 2)) == fold_module.DAMAGED_EXIT_CODE


def test_sealed_segments_are_folded_while_the_journal_goes_on(tmp_path: Path) -> None:
    memory, journal, _ = recover(
        tmp_path,
        lambda: "boot",
        max_sequences=MAX_SEQUENCES,
        limits=SegmentLimits(max_bytes=SMALL_SEGMENT_BYTES),
    )
    folder = JournalFolder(tmp_path)
    history = History(memory, lambda mutation, reply: journal.append(mutation, digest(reply)))
    deadline = time.monotonic() + SOON_S
    while len(folder.snapshot_numbers()) < 1 or folder.snapshot_numbers()[0] < 4:
        assert time.monotonic() < deadline
        history.run([("family", 1, 1, 1), ("expire", 0, 2, 0)])
        time.sleep(0.01)
    journal.close()
    with recovered(tmp_path) as (again, _, report):
        assert pack_state(again) == pack_state(memory)
        assert report.num_records < journal.num_records
