"""`octavo top`: what it draws of drawn states, and of a real memory service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from rich.cells import cell_len

from octavo import admin_types as kv
from octavo.admin import KvMemoryInspector
from octavo.cli import top
from octavo.cli.top_view import Sample, frame, pool_bar, rates
from octavo.types import PoolGeometry
from tests.cli.test_block_mirror_live import Holder, admit, arrive, commit, fork
from tests.cli.test_render import text_of

SOON_S = 60
SESSION = kv.SessionStats("scheduler-7", "unix:/s.sock", 5, True)
CACHE = kv.PrefixCacheStats(True, 10, 6, 1000, 250, 40, 3, 1)
STATS = kv.PoolStats(
    PoolGeometry(100, 16, 512, 0, "bf16", 8),
    kv.PoolLevels(
        num_free_blocks=40,
        num_cached_blocks=30,
        num_in_use_blocks=25,
        num_quarantined_blocks=5,
        num_reserved_blocks=0,
        num_free_sequences=9,
        num_free_host_blocks=2,
    ),
    num_requests=2,
    num_sequences=3,
    num_shared_blocks=10,
    peak_in_use_blocks=77,
    num_allocations=0,
    num_copies_on_write=1,
    num_preemptions=4,
    num_batches=0,
    kvmem_boot_id="k",
    worker_boot_id="w",
    session=SESSION,
    prefix_cache=CACHE,
    num_swapped_out_blocks=12,
    num_swapped_in_blocks=6,
    last_step_id=100,
    num_recorded_tokens=5000,
)


def sequence(
    number: int,
    status: kv.SequenceStatus = kv.SequenceStatus.RUNNING,
    tenant: str = "acme",
    **fields: object,
) -> kv.SequenceSummary:
    made = kv.SequenceSummary(
        number, f"request-{number}", number, 0, tenant, status, 10, 14, 7, 3, 1, 0, None
    )
    return replace(made, **fields)


SAMPLE = Sample(10.0, STATS, (sequence(1), sequence(2, kv.SequenceStatus.WAITING, "other")))


def drawn(sample: Sample | None, former: Sample | None = None, width: int = 100, **more) -> str:
    return text_of(frame("unix:/k.sock", sample, former, width=width, **more), width=width)


def with_stats(**fields: object) -> Sample:
    return replace(SAMPLE, stats=replace(STATS, **fields))


# ---- rates ----


def test_rates_are_what_changed_by_the_time_it_took() -> None:
    later = replace(
        SAMPLE,
        at_s=12.0,
        stats=replace(
            STATS,
            last_step_id=150,
            num_recorded_tokens=5300,
            prefix_cache=replace(CACHE, num_lookup_tokens=1100, num_hit_tokens=325),
        ),
    )
    between = rates(SAMPLE, later)
    assert between is not None
    assert (between.steps_per_s, between.tokens_per_s, between.hit_share) == (25.0, 150.0, 0.75)
    shown = drawn(later, SAMPLE)
    assert "25.0 steps/s, 150.0 tokens/s" in shown
    assert "30% of prompt tokens found (now 75%)" in shown


@pytest.mark.parametrize(
    "changed", [{"kvmem_boot_id": "another"}, {"num_recorded_tokens": 0}], ids=str
)
def test_there_are_no_rates_over_a_restart(changed: dict[str, object]) -> None:
    later = replace(with_stats(**changed), at_s=12.0)
    assert rates(SAMPLE, later) is None
    assert "– steps/s, – tokens/s" in drawn(later, SAMPLE)
    assert rates(None, SAMPLE) is None
    assert rates(SAMPLE, SAMPLE) is None


# ---- the pool ----


@pytest.mark.parametrize("width", [1, 5, 6, 20, 99, 100, 333])
def test_the_bar_is_as_wide_as_it_may_be_and_leaves_no_state_out(width: int) -> None:
    bar = pool_bar(STATS, width).plain
    assert len(bar) == max(width, 5)
    assert "".join(dict.fromkeys(bar)) == "█▓~▒·"


def test_the_bar_is_in_proportion() -> None:
    bar = pool_bar(STATS, 100).plain
    assert {mark: bar.count(mark) for mark in "█▓~▒·"} == {
        "█": 10,
        "▓": 15,
        "~": 5,
        "▒": 30,
        "·": 40,
    }


def test_every_number_of_the_pool_is_told() -> None:
    shown = drawn(SAMPLE)
    assert "100 blocks of 16:" in shown
    for words in ("shared 10", "in use 15", "quarantined 5", "cached 30", "free 40"):
        assert words in shown
    assert "reserved" not in shown
    assert "host tier  6 of 8 blocks in use, 12 swapped out, 6 in" in shown
    assert "4 preemptions, 1 copy on write, 77 blocks at the peak" in shown
    assert "25% of prompt tokens found; 3 evictions, 1 pin" in shown


def test_what_is_not_there_is_not_told_of() -> None:
    assert STATS.geometry is not None
    shown = drawn(
        with_stats(
            geometry=replace(STATS.geometry, num_host_blocks=0),
            prefix_cache=kv.PrefixCacheStats(enabled=False),
        )
    )
    assert "host tier" not in shown
    assert "cache      switched off" in shown
    assert "No worker's pool is attached" in drawn(with_stats(geometry=None))


# ---- the session ----


@pytest.mark.parametrize(
    ("session", "told"),
    [
        (SESSION, "epoch 5, held by scheduler-7 at unix:/s.sock"),
        (replace(SESSION, mutations_open=False), "takeover under way"),
        (replace(SESSION, orphaned_ms=3200), "no session for 3.2 s; epoch 5 was scheduler-7's"),
        (kv.SessionStats(), "nobody has opened a session yet"),
        (replace(SESSION, journal_healthy=False), "the journal cannot be written"),
    ],
)
def test_the_session_in_words(session: kv.SessionStats, told: str) -> None:
    assert told in drawn(with_stats(session=session))


# ---- sequences ----


def rows_of(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines() if line.startswith("request-")]


def test_running_ones_come_first_and_the_rest_is_counted() -> None:
    waiting = tuple(sequence(i, kv.SequenceStatus.WAITING) for i in range(1, 6))
    swapped = sequence(8, kv.SequenceStatus.SWAPPED, num_blocks=0, num_host_blocks=3)
    shown = drawn(replace(SAMPLE, sequences=(*waiting, sequence(9), swapped)), num_rows=3)
    assert rows_of(shown) == [
        ["request-9", "acme", "running", "10+4", "50%", "3", "(1", "shared)"],
        ["request-8", "acme", "swapped", "10+4", "50%", "3", "host"],
        ["request-1", "acme", "waiting", "10+4", "50%", "3", "(1", "shared)"],
    ]
    assert "… 4 more" in shown


def test_tenants_are_told_apart_when_there_are_several() -> None:
    shown = drawn(SAMPLE)
    assert ["acme", "1", "0", "3"] in [line.split() for line in shown.splitlines()]
    assert ["other", "0", "1", "3"] in [line.split() for line in shown.splitlines()]
    alone = drawn(replace(SAMPLE, sequences=(sequence(1),)))
    assert not any(line.split() == ["acme", "1", "0", "3"] for line in alone.splitlines())


def test_more_sequences_than_are_looked_at() -> None:
    assert "(the first 2 are looked at)" in drawn(replace(SAMPLE, truncated=True))


@pytest.mark.parametrize("width", [20, 30, 47, 48, 60, 76, 200])
def test_it_fits_whatever_the_terminal_is(width: int) -> None:
    long = sequence(3, request_id="a-very-long-request-id-" * 8, tenant="t" * 64)
    shown = drawn(replace(SAMPLE, sequences=(*SAMPLE.sequences, long)), SAMPLE, width=width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "running" in shown


def test_names_cannot_steer_the_terminal() -> None:
    evil = sequence(3, request_id="\x1b[2J[bold]x\ny", tenant="\x07")
    shown = drawn(
        replace(with_stats(session=replace(SESSION, holder="\x1b]0;x\x07")), sequences=(evil,))
    )
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "␛[2J[bold]x␊y" in shown


def test_a_problem_stands_above_what_was_seen_last() -> None:
    shown = drawn(SAMPLE, problem="nobody answers")
    assert shown.index("nobody answers") < shown.index("100 blocks of 16")
    assert "nobody answers" in drawn(None, problem="nobody answers")


# ---- the real thing ----


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    return subprocess.run(
        [sys.executable, "-m", "octavo", "top", *arguments],
        capture_output=True,
        text=True,
        env={**plain, "COLUMNS": "100"},
        timeout=SOON_S,
        check=False,
    )


def test_one_frame_of_a_real_service(kvmem_address: str) -> None:
    with grpc.insecure_channel(kvmem_address) as channel:
        holder = Holder(channel)
        (result,) = holder.apply(arrive("mine", 10))
        sequence_id = result.arrived.sequence_id
        holder.apply(admit(sequence_id, 10))
        holder.apply(commit(sequence_id, 10))
        holder.apply(fork(sequence_id, 1))
        done = run("--once", "--interval", "0.1", "--address", kvmem_address)
    assert done.returncode == 0, done.stderr
    # Its lease may be over by now, on a busy machine.
    assert re.search("epoch 1(, held by test| was test's)", done.stdout)
    assert "16 blocks of 4:  █ shared 3  ▓ in use 0  ▒ cached 0  · free 13" in done.stdout
    assert "1 request, 2 live sequences" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("mine")]
    assert rows == [
        ["mine", "running", "10+0", "100%", "3", "(3", "shared)"],
        ["mine", "[1]", "running", "10+0", "100%", "3", "(3", "shared)"],
    ]
    assert "0.0 steps/s" in done.stdout


def test_a_look_takes_as_many_pages_as_it_needs_and_not_more_than_it_may(
    kvmem_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "PAGE_SIZE", 3)
    with grpc.insecure_channel(kvmem_address) as channel, KvMemoryInspector(kvmem_address) as asked:
        assert top.look(asked).sequences == ()
        Holder(channel).apply(*(arrive(f"r{number}", 3) for number in range(7)))
        whole = top.look(asked)
        assert sorted(one.request_id for one in whole.sequences) == [f"r{n}" for n in range(7)]
        assert not whole.truncated
        monkeypatch.setattr(top, "MAX_SEQUENCES", 6)
        part = top.look(asked)
        assert part.sequences == whole.sequences[:6]
        assert part.truncated


def test_nobody_there_is_told_at_once(socket_dir: Path) -> None:
    done = run("--once", "--address", f"unix:{socket_dir}/nobody.sock")
    assert done.returncode == 1
    assert "the memory service cannot be reached at unix:" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_waits_for_a_service_that_is_not_there(socket_dir: Path) -> None:
    """Not on a terminal it prints one frame after the other."""
    address = f"unix:{socket_dir}/late.sock"
    command = [sys.executable, "-m", "octavo", "top", "--interval", "0.1", "--address", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        _read_until(process, "cannot be reached")
        service = subprocess.Popen(
            [sys.executable, "-m", "kvmem_svc", "--address", address, "--log-level", "warning"]
        )
        try:
            _read_until(process, "nobody has opened a session yet")
        finally:
            service.kill()
            service.wait(SOON_S)
        _read_until(process, "cannot be reached")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(SOON_S) == 0
        assert process.stderr.read() == ""


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    read = ""
    while text not in read:
        line = process.stdout.readline()
        assert line, f"it ended after {read!r}"
        read += line
