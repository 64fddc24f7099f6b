"""The block pool as a picture: one character a block, or a few of them, and who holds it.

`block_map` is a function from data to a rich renderable; `show_blocks` asks a service and draws it.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from octavo.admin_types import BlockTables, PoolStats
from octavo.cli.inspecting import inspecting
from octavo.cli.render import counted
from octavo.cli.text import one_line

LETTERS = string.ascii_uppercase + string.ascii_lowercase
# Of whoever has no letter left.
OTHERS = "*"
# Held by sequences of more than one request.
SEVERAL = "&"
UNHELD = "·"
STYLES = ("green", "yellow", "magenta", "bright_blue", "red", "bright_green")
SHARED_STYLE = "bold cyan"
UNHELD_STYLE = "dim"
# In steps from none to all blocks of a character held.
SHADES = "·░▒▓█"
MAX_ROWS = 32
MAX_SEQUENCES = 65_536
GROUP = 8


def show_blocks(address: str, console: Console, svg: Path | None) -> None:
    """Draw what the service at `address` holds; `svg`: into that file as well, of what the
    console recorded. Raises OctavoError, and OSError for a file that cannot be written."""
    with inspecting(address) as inspector:
        stats = inspector.pool_stats()
        tables = inspector.block_tables(max_sequences=MAX_SEQUENCES)
    console.print(block_map(tables, stats, console.width))
    if svg is not None:
        console.save_svg(str(svg), title=f"octavo: the blocks of {one_line(address)}")


@dataclass
class _Request:
    """What the picture says of one request."""

    mark: str
    style: str
    num_tokens: int = 0
    num_sequences: int = 0
    blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Held:
    """Who holds one block; ref_count: in how many tables it is."""

    request_ids: frozenset[str]
    ref_count: int


def block_map(tables: BlockTables, stats: PoolStats, width: int) -> Group:
    """The pool, with a legend: each request has a letter."""
    if stats.geometry is None:
        return Group(Text("No worker's pool is attached.", "yellow"))
    requests, held = _requests_of(tables), _held_by(tables)
    num_blocks = stats.geometry.num_blocks
    label = len(str(num_blocks - 1)) + 2
    per_row = max(GROUP, (width - label + 1) // (GROUP + 1) * GROUP)
    per_cell = -(-num_blocks // (per_row * MAX_ROWS))
    lines = [
        _row(range(start, min(start + per_row * per_cell, num_blocks)), per_cell, requests, held)
        for start in range(0, num_blocks, per_row * per_cell)
    ]
    picture = [
        Text(f"{row * per_row * per_cell:>{label - 2}}  ", "dim", no_wrap=True).append(line)
        for row, line in enumerate(lines)
    ]
    return Group(*picture, *_legend(stats, per_cell, tables), _request_table(requests, width))


def _requests_of(tables: BlockTables) -> dict[str, _Request]:
    requests: dict[str, _Request] = {}
    for view in tables.sequences:
        if not view.block_ids:
            continue
        number = len(requests)
        request = requests.setdefault(
            view.request_id,
            _Request(
                LETTERS[number] if number < len(LETTERS) else OTHERS, STYLES[number % len(STYLES)]
            ),
        )
        request.num_sequences += 1
        request.num_tokens = max(request.num_tokens, view.num_tokens)
        request.blocks.update(view.block_ids)
    return requests


def _held_by(tables: BlockTables) -> dict[int, _Held]:
    held: dict[int, _Held] = {}
    for view in tables.sequences:
        for block_id, ref_count in zip(view.block_ids, view.ref_counts, strict=True):
            before = held[block_id].request_ids if block_id in held else frozenset()
            held[block_id] = _Held(before | {view.request_id}, ref_count)
    return held


def _row(
    blocks: range, per_cell: int, requests: Mapping[str, _Request], held: Mapping[int, _Held]
) -> Text:
    row = Text(no_wrap=True)
    for number, start in enumerate(range(blocks.start, blocks.stop, per_cell)):
        if number and number % GROUP == 0:
            row.append(" ")
        if per_cell == 1:
            row.append(*_cell(held.get(start), requests))
        else:
            row.append(*_shade(range(start, min(start + per_cell, blocks.stop)), held))
    return row


def _cell(block: _Held | None, requests: Mapping[str, _Request]) -> tuple[str, str]:
    if block is None:
        return UNHELD, UNHELD_STYLE
    if len(block.request_ids) > 1:
        return SEVERAL, SHARED_STYLE
    (request_id,) = block.request_ids
    request = requests[request_id]
    return request.mark, SHARED_STYLE if block.ref_count > 1 else request.style


def _shade(blocks: range, held: Mapping[int, _Held]) -> tuple[str, str]:
    """Some blocks in one character: how many are held, and whether most of those are shared."""
    theirs = [held[block_id] for block_id in blocks if block_id in held]
    if not theirs:
        return UNHELD, UNHELD_STYLE
    shade = SHADES[max(1, len(theirs) * (len(SHADES) - 1) // len(blocks))]
    num_shared = sum(block.ref_count > 1 for block in theirs)
    return shade, SHARED_STYLE if 2 * num_shared > len(theirs) else "green"


def _legend(stats: PoolStats, per_cell: int, tables: BlockTables) -> list[Text]:
    levels = stats.levels
    if per_cell == 1:
        how = Text.assemble(
            "A letter is a block of that request; ",
            ("cyan", SHARED_STYLE),
            ": several sequences hold it, ",
            (SEVERAL, SHARED_STYLE),
            ": of several requests; ",
        )
    else:
        how = Text.assemble(
            f"One character is {counted(per_cell, 'block')}: the darker, the more are held; ",
            ("cyan", SHARED_STYLE),
            ": most of them by several sequences; ",
        )
    how.append(UNHELD, UNHELD_STYLE).append(": no sequence holds it.")
    counts = Text(
        f"{levels.num_in_use_blocks:,} in use, {levels.num_cached_blocks:,} cached,"
        f" {levels.num_quarantined_blocks:,} quarantined, {levels.num_reserved_blocks:,} reserved,"
        f" {levels.num_free_blocks:,} free"
    )
    lines = [how, counts]
    if tables.truncated:
        lines.append(Text("There are more sequences than are drawn.", "yellow"))
    return lines


def _request_table(requests: Mapping[str, _Request], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", width=width)
    table.add_column("", no_wrap=True)
    table.add_column("request", no_wrap=True, ratio=1)
    for name in ("sequences", "tokens", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for request_id, request in list(requests.items())[: len(LETTERS)]:
        table.add_row(
            Text(request.mark, request.style),
            Text(one_line(request_id)),
            str(request.num_sequences),
            str(request.num_tokens),
            str(len(request.blocks)),
        )
    if len(requests) > len(LETTERS):
        table.add_row(OTHERS, Text(f"{len(requests) - len(LETTERS)} more"), "", "", "")
    return table
