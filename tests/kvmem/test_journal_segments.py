"""The bytes of the journal: what is torn, what is damage, what is whole."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem_svc.journal import segment as s
from kvmem_svc.journal import writer as w
from kvmem_svc.journal.errors import JournalDamaged, JournalLocked, OtherVersion
from kvmem_svc.journal.folder import MAX_SET_ASIDE, JournalFolder
from kvmem_svc.journal.reader import JournalReader, machine_boot_ids

LIFE = s.Life(1, "m" * 36, "0123456789abcdef", 64)
payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def segment_of(contents: list[bytes], first: int = 1) -> bytes:
    whole = s.pack_file_header(s.SEGMENT_MAGIC, s.FileHeader(LIFE, first))
    for i, payload in enumerate(contents):
        whole += s.pack_record(1, 3, first + i, 1700 + i, 99 + i, payload)
    return whole


def read(content: bytes, first: int = 1) -> tuple[list[bytes], s.SegmentReader]:
    reader = s.SegmentReader(content, "x.log", first)
    return [record.payload for record in reader], reader


def read_whole(content: bytes) -> None:
    s.unpack_file_header(content, s.SEGMENT_MAGIC, "x.log")
    read(content)


def test_the_layouts_are_as_long_as_documented() -> None:
    assert s.FILE_HEADER_BYTES == 128
    assert s.RECORD_HEADER_BYTES == 36
    assert len(s.pack_file_header(s.SEGMENT_MAGIC, s.FileHeader(LIFE, 1))) == 128


def test_the_checksum_is_crc32c() -> None:
    assert s.crc32c(b"123456789") == 0xE3069283  # RFC 3720's Castagnoli polynomial


@given(payloads, st.integers(1, 2**40))
def test_what_is_packed_is_read(contents: list[bytes], first: int) -> None:
    content = segment_of(contents, first)
    header = s.unpack_file_header(content, s.SEGMENT_MAGIC, "x.log")
    assert header == s.FileHeader(LIFE, first)
    records, reader = [], s.SegmentReader(content, "x.log", first)
    records.extend(reader)
    assert [r.payload for r in records] == contents
    assert [r.number for r in records] == list(range(first, first + len(contents)))
    assert [r.reply_digest for r in records] == list(range(99, 99 + len(contents)))
    assert [r.unix_time_ms for r in records] == list(range(1700, 1700 + len(contents)))
    assert {(r.kind, r.core_version) for r in records} == {(3, 1)}
    assert (reader.end, reader.num_torn_bytes) == (len(content), 0)
    assert reader.next_record == first + len(contents)


@settings(max_examples=25)
@given(payloads)
def test_cut_at_any_byte_of_the_last_record_the_ones_before_are_there(
    contents: list[bytes],
) -> None:
    content, kept = segment_of(contents), segment_of(contents[:-1])
    for end in range(len(kept), len(content)):
        payloads_read, reader = read(content[:end])
        assert payloads_read == contents[:-1]
        assert (reader.end, reader.num_torn_bytes) == (len(kept), end - len(kept))


@settings(max_examples=25)
@given(payloads, st.integers(1, 255))
def test_a_changed_byte_anywhere_is_damage(contents: list[bytes], flip: int) -> None:
    """Also in a length, which might otherwise make the rest look like a torn tail."""
    content = segment_of(contents)
    starts = [s.FILE_HEADER_BYTES]
    for payload in contents:
        starts.append(starts[-1] + s.RECORD_HEADER_BYTES + len(payload))
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= flip
        with pytest.raises(JournalDamaged) as caught:
            read_whole(bytes(changed))
        assert type(caught.value) is JournalDamaged
        assert caught.value.file == "x.log"
        expected = max((start for start in starts if start <= at), default=0)
        assert caught.value.offset == expected


def test_another_format_version_is_told_from_damage() -> None:
    content = bytearray(segment_of([]))
    content[8] = 2
    content[-4:] = s.crc32c(bytes(content[:-4])).to_bytes(4, "little")
    with pytest.raises(OtherVersion, match="format version 2"):
        s.unpack_file_header(bytes(content), s.SEGMENT_MAGIC, "x.log")


@given(st.binary(max_size=40), st.integers(1, 255))
def test_a_changed_byte_of_a_snapshot_is_damage(state: bytes, flip: int) -> None:
    header = s.FileHeader(LIFE, 7)
    content = s.pack_snapshot(header, state)
    assert s.unpack_snapshot(content, "x.snap") == (header, state)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= flip
        with pytest.raises(JournalDamaged):
            s.unpack_snapshot(bytes(changed), "x.snap")
    for end in range(len(content)):
        with pytest.raises(JournalDamaged):
            s.unpack_snapshot(content[:end], "x.snap")


# --- the writer ------------------------------------------------------------------------


class Writing:
    """A writer on a folder, and what it has sealed."""

    def __init__(
        self,
        path: Path,
        max_bytes: int = 1 << 20,
        tail: w.Tail | None = None,
        max_records: int = 1000,
    ) -> None:
        self.folder = JournalFolder(path)
        self.sealed: list[int] = []
        limits = w.SegmentLimits(max_bytes=max_bytes, max_records=max_records)
        self.writer = w.SegmentWriter(self.folder, LIFE, tail, limits, self.sealed.append)

    def append(self, *contents: bytes) -> None:
        for payload in contents:
            self.writer.append(3, payload, 0)


def read_folder(path: Path) -> tuple[list[bytes], JournalReader]:
    reader = JournalReader(JournalFolder(path))
    return [record.payload for _, record in reader.records()], reader


def test_records_go_on_in_the_next_segment_when_one_is_full(tmp_path: Path) -> None:
    room = s.FILE_HEADER_BYTES + 2 * (s.RECORD_HEADER_BYTES + 10)
    writing = Writing(tmp_path, max_bytes=room)
    contents = [bytes([i]) * 10 for i in range(5)]
    writing.append(*contents)
    assert writing.sealed == [2, 3]
    assert [p.stat().st_size for p in sorted(tmp_path.glob("*.log"))] == [room, room, 128 + 46]
    found, reader = read_folder(tmp_path)
    assert found == contents
    assert reader.life == LIFE
    assert reader.tail == w.Tail(3, 128 + 46, 5, 6)
    writing.append(b"y" * 1000)  # more than a segment holds: it has one of its own
    writing.append(b"z")
    assert read_folder(tmp_path)[0] == [*contents, b"y" * 1000, b"z"]
    assert writing.sealed == [2, 3, 4, 5]


def test_a_segment_has_so_many_records_and_no_more(tmp_path: Path) -> None:
    Writing(tmp_path, max_records=3).append(b"a", b"b", b"c", b"d")
    _, reader = read_folder(tmp_path)
    assert reader.tail is not None
    assert (reader.tail.segment, reader.tail.first_record, reader.tail.next_record) == (2, 4, 5)
    again = Writing(tmp_path, tail=reader.tail, max_records=3)
    again.append(b"e", b"f")
    assert again.sealed == []
    again.append(b"g")
    assert again.sealed == [3]
    assert read_folder(tmp_path)[0] == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_an_old_segment_is_sealed_although_it_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_000_000
    monkeypatch.setattr(w, "unix_time_ms", lambda: now_ms)
    writing = Writing(tmp_path)
    writing.append(b"a", b"b")
    now_ms += w.SegmentLimits.max_age_ms
    writing.append(b"c")
    assert writing.sealed == []
    now_ms += 1
    writing.append(b"d")
    assert writing.sealed == [2]
    assert read_folder(tmp_path)[0] == [b"a", b"b", b"c", b"d"]


def test_writing_goes_on_after_the_last_whole_record(tmp_path: Path) -> None:
    first = Writing(tmp_path)
    first.append(b"one", b"two")
    path = tmp_path / "000001.log"
    path.write_bytes(path.read_bytes()[:-1])
    found, reader = read_folder(tmp_path)
    assert found == [b"one"]
    assert reader.num_torn_bytes == s.RECORD_HEADER_BYTES + 2
    Writing(tmp_path, tail=reader.tail).append(b"three")
    found, reader = read_folder(tmp_path)
    assert (found, reader.num_torn_bytes) == ([b"one", b"three"], 0)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """As on a full disk, writing fails where a file would grow beyond num_bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 35, 36, 40, 45])
def test_a_record_that_does_not_fit_is_cut_off_and_written_later(tmp_path: Path, room: int) -> None:
    writing = Writing(tmp_path)
    writing.append(b"a" * 10)
    before = (tmp_path / "000001.log").read_bytes()
    with file_size_limit(len(before) + room):
        writing.append(b"b" * 10)
        assert not writing.writer.healthy
        assert "too large" in writing.writer.failure
        assert not writing.writer.flush_pending()
        assert (tmp_path / "000001.log").read_bytes() == before
        writing.append(b"c")  # one more that was under way: not before the one that waits
        assert (tmp_path / "000001.log").read_bytes() == before
    assert writing.writer.flush_pending()
    assert writing.writer.healthy
    assert writing.writer.failure == ""
    writing.append(b"d")
    assert read_folder(tmp_path)[0] == [b"a" * 10, b"b" * 10, b"c", b"d"]


@pytest.mark.parametrize("fails", ["open", "header", "truncate"])
def test_a_segment_that_cannot_be_begun_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    writing = Writing(tmp_path, max_bytes=s.FILE_HEADER_BYTES + 50)
    writing.append(b"a")

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        match fails:
            case "open":
                patched.setattr(w, "open_file", no_space)
            case "header":
                patched.setattr(w.os, "pwrite", no_space)
            case "truncate":
                patched.setattr(w.os, "ftruncate", no_space)
        writing.append(b"b" * 20)
        assert not writing.writer.healthy
        assert [p.name for p in tmp_path.glob("*.log")] == ["000001.log"]
        assert read_folder(tmp_path)[0] == [b"a"]
    assert writing.writer.flush_pending()
    assert writing.sealed == [2]
    assert read_folder(tmp_path)[0] == [b"a", b"b" * 20]


def test_appending_on_and_on_without_health_is_a_bug(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    with file_size_limit(s.FILE_HEADER_BYTES):
        for _ in range(w.MAX_WAITING_RECORDS):
            writing.append(b"x")
        with pytest.raises(AssertionError, match="not healthy"):
            writing.append(b"x")


# --- the folder ------------------------------------------------------------------------


def written(path: Path, num_segments: int = 3) -> None:
    writing = Writing(path, max_bytes=s.FILE_HEADER_BYTES + 60)
    writing.append(*[bytes([i]) * 20 for i in range(num_segments)])


def test_only_its_owner_can_read_a_journal(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    written(tmp_path)
    folder = JournalFolder(tmp_path)
    os.close(folder.lock())
    with folder.fold_lock():
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    modes = {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ["000001.log", "000002.log", "000003.log", "lock", "fold.lock"], "0o600"
    )


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    held = folder.lock()
    with pytest.raises(JournalLocked, match="another process works on the journal"):
        JournalFolder(tmp_path).lock()
    os.close(held)
    os.close(folder.lock())


def test_a_fold_is_waited_for(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    holding, release = threading.Event(), threading.Event()

    def fold() -> None:
        with folder.fold_lock():
            holding.set()
            release.wait()

    thread = threading.Thread(target=fold)
    thread.start()
    holding.wait()
    with pytest.raises(JournalLocked, match="being folded"), folder.fold_lock(0.05):
        pass
    release.set()
    with folder.fold_lock():
        pass
    thread.join()


def test_a_sealed_segment_that_ends_within_a_record_is_damage(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "000002.log"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match=r"000002\.log, byte 128: the segment ends within"):
        read_folder(tmp_path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_segment_is_damage(tmp_path: Path, missing: int) -> None:
    written(tmp_path)
    (tmp_path / f"{missing:06}.log").unlink()
    with pytest.raises(JournalDamaged, match=rf"00000{missing}\.log, byte 0: .* missing"):
        read_folder(tmp_path)


def test_a_segment_of_another_life_is_damage(tmp_path: Path) -> None:
    written(tmp_path)
    content = (tmp_path / "000003.log").read_bytes()
    other = s.FileHeader(dataclasses.replace(LIFE, kvmem_boot_id="other"), 3)
    header = s.pack_file_header(s.SEGMENT_MAGIC, other)
    (tmp_path / "000003.log").write_bytes(header + content[len(header) :])
    with pytest.raises(JournalDamaged, match=r"000003\.log.*belongs to"):
        read_folder(tmp_path)


def test_segments_in_the_wrong_order_are_damage(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "000002.log").rename(tmp_path / "x")
    (tmp_path / "000003.log").rename(tmp_path / "000002.log")
    (tmp_path / "x").rename(tmp_path / "000003.log")
    with pytest.raises(JournalDamaged, match="begins with record 3 where 2 is due"):
        read_folder(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 1, 127])
def test_a_segment_that_was_not_begun_in_full_is_not_there(tmp_path: Path, num_bytes: int) -> None:
    written(tmp_path)
    path = tmp_path / "000003.log"
    path.write_bytes(path.read_bytes()[:num_bytes])
    found, reader = read_folder(tmp_path)
    assert found == [b"\0" * 20, b"\1" * 20]
    assert reader.num_torn_bytes == num_bytes
    assert reader.tail is not None
    assert reader.tail.segment == 2
    writing = Writing(tmp_path, max_bytes=s.FILE_HEADER_BYTES + 60, tail=reader.tail)
    writing.append(b"next")
    assert writing.sealed == [3]
    assert read_folder(tmp_path)[0] == [b"\0" * 20, b"\1" * 20, b"next"]
    (tmp_path / "000002.log").write_bytes(b"")
    with pytest.raises(JournalDamaged, match=r"000002\.log, byte 0"):
        read_folder(tmp_path)


def test_a_journal_that_was_never_begun_is_empty(tmp_path: Path) -> None:
    assert read_folder(tmp_path)[1].life is None
    (tmp_path / "000001.log").write_bytes(b"OCTA")
    found, reader = read_folder(tmp_path)
    assert (found, reader.life, reader.tail) == ([], None, None)


def test_the_machines_boot_id_is_found_whatever_is_damaged(tmp_path: Path) -> None:
    written(tmp_path)
    for name in ("000001.log", "000002.log"):
        (tmp_path / name).write_bytes(b"damaged" * 100)
    assert machine_boot_ids(JournalFolder(tmp_path)) == {LIFE.machine_boot_id}


def test_what_is_set_aside_does_not_grow_without_end(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    kept = []
    for i in range(MAX_SET_ASIDE + 2):
        written(tmp_path)
        target = folder.set_aside("damaged")
        os.utime(target, ns=(i, i))
        kept.append(target)
        assert folder.files() == []
        assert len(list(target.iterdir())) == 3
        assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert folder.set_aside_folders() == kept[-MAX_SET_ASIDE:]
    assert folder.remove_set_aside() == MAX_SET_ASIDE
    assert folder.set_aside_folders() == []
