"""`octavo kvmem show ADDRESS`: the block map of drawn states, and of a real memory service."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from rich.cells import cell_len
from rich.text import Text

from octavo import admin_types as kv
from octavo.cli.block_map import LETTERS, MAX_ROWS, block_map
from tests.cli.test_block_mirror_live import Holder, admit, append, arrive, commit, fork
from tests.cli.test_render import text_of
from tests.cli.test_top import SOON_S, STATS


def view(request_id: str, candidate: int, blocks: dict[int, int]) -> kv.SequenceView:
    """blocks: the ref_count of each."""
    number = hash((request_id, candidate))
    ids, ref_counts = tuple(blocks), tuple(blocks.values())
    status = kv.SequenceStatus.RUNNING if blocks else kv.SequenceStatus.WAITING
    return kv.SequenceView(
        number, request_id, candidate, status, 20, 20, 10, 1, ids, ref_counts, None
    )


def stats(num_blocks: int) -> kv.PoolStats:
    assert STATS.geometry is not None
    return replace(STATS, geometry=replace(STATS.geometry, num_blocks=num_blocks))


TABLES = kv.BlockTables(
    (
        view("waits", 0, {}),
        view("first", 0, {0: 2, 1: 1}),
        view("first", 1, {0: 2, 9: 1}),
        view("second", 0, {17: 2, 3: 1}),
        view("third", 0, {17: 2}),
    ),
    truncated=False,
)


def drawn(tables: kv.BlockTables, num_blocks: int, width: int = 100) -> str:
    return text_of(block_map(tables, stats(num_blocks), width), width=width)


def test_every_block_has_a_character_of_whoever_holds_it() -> None:
    lines = drawn(TABLES, 20, width=31).splitlines()
    assert lines[0].rstrip() == " 0  AA·B···· ·A······ ·&··"
    assert drawn(TABLES, 20, width=21).splitlines()[:2] == [
        " 0  AA·B···· ·A······",
        "16  ·&··",
    ]


def test_shared_blocks_have_a_colour_of_their_own() -> None:
    picture = next(iter(block_map(TABLES, stats(20), 40).renderables))
    assert isinstance(picture, Text)
    styles = {picture.plain[span.start : span.end]: str(span.style) for span in picture.spans}
    assert styles["&"] == "bold cyan"
    firsts = [str(span.style) for span in picture.spans if picture.plain[span.start] == "A"]
    assert firsts == ["bold cyan", "green", "green"]
    assert styles["B"] == "yellow"


def test_the_legend_names_the_requests_that_hold_something() -> None:
    shown = drawn(TABLES, 20)
    rows = [line.split() for line in shown.splitlines() if line[:3] in ("A  ", "B  ", "C  ")]
    assert rows == [
        ["A", "first", "2", "20", "3"],
        ["B", "second", "1", "20", "2"],
        ["C", "third", "1", "20", "1"],
    ]
    assert "waits" not in shown
    assert "25 in use, 30 cached, 5 quarantined, 0 reserved, 40 free" in shown


def test_when_letters_run_out() -> None:
    many = tuple(view(f"r{number}", 0, {number: 1}) for number in range(len(LETTERS) + 3))
    shown = drawn(kv.BlockTables(many, truncated=False), 64, width=100)
    assert shown.replace(" ", "").replace("\n", "")[1:].startswith(LETTERS + "***" + "·" * 9)
    assert "3 more" in shown


def test_a_large_pool_has_several_blocks_a_character() -> None:
    held = dict.fromkeys(range(4900, 5391), 1)
    tables = kv.BlockTables((view("r", 0, held),), truncated=True)
    shown = drawn(tables, 100_000, width=80)
    picture = shown.split("One character is")[0].splitlines()
    assert len(picture) <= MAX_ROWS
    assert "One character is 49 blocks" in shown
    cells = "".join(line[7:].replace(" ", "") for line in picture)
    assert cells == "·" * 100 + "█" * 10 + "░" + "·" * (2041 - 111)
    assert "There are more sequences than are drawn." in shown
    assert drawn(kv.BlockTables((view("r", 0, {0: 1}),), truncated=False), 100_000, 80)[7] == "░"


@pytest.mark.parametrize("width", [20, 40, 80, 211])
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 20, 4096, 1_000_000])
def test_it_fits(width: int, num_blocks: int) -> None:
    tables = kv.BlockTables((view("a-very-long-request-id" * 9, 0, {0: 1}),), truncated=False)
    shown = drawn(tables, num_blocks, width)
    assert max(map(cell_len, shown.splitlines())) <= width


def test_there_is_no_pool_yet() -> None:
    assert "No worker's pool" in text_of(block_map(TABLES, replace(STATS, geometry=None), 80))


# ---- the command ----


def show(*arguments: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    return subprocess.run(
        [sys.executable, "-m", "octavo", "kvmem", "show", *arguments],
        capture_output=True,
        text=True,
        env={**plain, "COLUMNS": "100", "OCTAVO_STATE_DIR": str(state_dir)},
        timeout=SOON_S,
        check=False,
    )


def test_the_map_of_a_real_service_on_the_terminal_and_in_a_file(
    kvmem_address: str, socket_dir: Path
) -> None:
    svg = socket_dir / "blocks.svg"
    with grpc.insecure_channel(kvmem_address) as channel:
        holder = Holder(channel)
        results = holder.apply(arrive("a", 6), arrive("b", 3))
        first, second = (result.arrived.sequence_id for result in results)
        holder.apply(admit(first, 6), admit(second, 3))
        holder.apply(commit(first, 6))
        holder.apply(fork(first, 1))
        holder.apply(append(first, 1))
        done = show(kvmem_address, "--svg", str(svg), state_dir=socket_dir)
    assert done.returncode == 0, done.stderr
    picture = done.stdout.splitlines()[0].split(maxsplit=1)[1].replace(" ", "")
    # The prompt's two blocks, the other one's, and the copy that was made for the append.
    assert sorted(picture) == sorted("AAAB" + "·" * 12)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "second" not in svg.read_text()


def test_what_does_not_go_together(kvmem_address: str, socket_dir: Path) -> None:
    for arguments, told in (
        ((kvmem_address, "--tokens"), "--tokens is for a journal"),
        ((str(socket_dir), "--svg", "x.svg"), "--svg is for a running service"),
        ((kvmem_address, "--live"), "give no address with it"),
        ((kvmem_address, "--svg", str(socket_dir)), "cannot be written"),
    ):
        done = show(*arguments, state_dir=socket_dir)
        assert done.returncode == 2
        assert told in " ".join(done.stderr.replace("│", " ").split())


def test_a_folder_is_still_a_journal(socket_dir: Path) -> None:
    folder = socket_dir / "looks-like:1"
    folder.mkdir()
    done = show(str(folder), state_dir=socket_dir)
    assert "cannot be reached" not in done.stderr
    done = show("looks-like:1", state_dir=socket_dir)
    assert "the memory service cannot be reached at looks-like:1" in done.stderr
    done = show("--live", state_dir=socket_dir)
    assert "no Octavo is running" in done.stderr
