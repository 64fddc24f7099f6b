"""What the CLI draws: answers, block tables, traces. Functions from data to rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from octavo.admin_types import PoolLevels, PoolStats
from octavo.cli.block_mirror import How, Picture, PicturedSlot, RequestStory
from octavo.cli.text import printable
from octavo.cli.trace_tree import Node, RequestTrace, Span
from octavo.types import Candidate

ANSWER_STYLES = ("bold bright_blue", "bold magenta", "bold green", "bold yellow")
SHARED, KEPT, COPIED, NEW = "bold cyan", "white", "bold yellow", "green"
_SERVICE_STYLES = {
    "octavo-client": "white",
    "octavo-scheduler": "cyan",
    "octavo-kvmem": "green",
    "octavo-worker": "magenta",
}
SHOWN_STEPS = 3
# Of the counts that spans carry as attributes (with or without `octavo.`), those worth showing.
_SHOWN_COUNTS = {
    "num_prompt_tokens": "prompt token",
    "num_output_tokens": "output token",
    "num_tokens": "token",
    "num_sequences": "sequence",
    "num_allocated_blocks": "new block",
    "num_copied_blocks": "block copy",
    "num_freed_blocks": "freed block",
    "num_children": "new sequence",
}


def answer_name(index: int) -> str:
    """A, B, C ... for candidates 0, 1, 2 ..."""
    return chr(ord("A") + index) if index < 26 else str(index)


def answer_style(index: int) -> str:
    return ANSWER_STYLES[index % len(ANSWER_STYLES)]


def heading(number: int, text: str) -> Text:
    return Text.assemble("\n", (f" {number} ", "bold black on cyan"), " ", (text, "bold"))


# ---------------------------------------------------------------- answers


def answers(candidates: Sequence[Candidate]) -> Table:
    """The candidates under each other, each with how it ended."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for candidate in candidates:
        end = f" ({len(candidate.token_ids)} tokens, {candidate.finish_reason})"
        table.add_row(
            Text(f"answer {answer_name(candidate.index)}", answer_style(candidate.index)),
            Text.assemble(printable(candidate.text.strip()), (end, "dim")),
        )
    return table


def num_common_tokens(candidates: Sequence[Candidate]) -> int:
    """How many tokens all candidates begin with."""
    together = zip(*(candidate.token_ids for candidate in candidates), strict=False)
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, together))


def parting_line(candidates: Sequence[Candidate]) -> Text:
    """Where the answers begin to differ."""
    common = num_common_tokens(candidates)
    if common == 0:
        return Text("They differ from their first token on.")
    if len({candidate.token_ids for candidate in candidates}) == 1:
        return Text("They are the same, token for token.")
    return Text(f"They begin with the same {counted(common, 'token')}, then they part.")


# ---------------------------------------------------------------- block tables


def block_tables(picture: Picture, block_size: int, copied_from: frozenset[int]) -> Table:
    """The candidates' tables side by side, one row for each logical block."""
    table = Table(box=box.ROUNDED, title_justify="left", header_style="bold")
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    for index in range(len(picture.tables)):
        style = answer_style(index)
        table.add_column(Text(f"answer {answer_name(index)}", style), no_wrap=True)
    for row in range(max(map(len, picture.tables), default=0)):
        cells = [
            _slot_cell(entries[row], copied_from) if row < len(entries) else Text("")
            for entries in picture.tables
        ]
        table.add_row(_span_of(row, block_size), *cells)
    return table


def _span_of(table_index: int, block_size: int) -> str:
    """The tokens that an entry of a block table is about."""
    return f"{table_index * block_size} – {(table_index + 1) * block_size - 1}"


def _slot_cell(entry: PicturedSlot, copied_from: frozenset[int]) -> Text:
    slot = entry.slot
    if entry.ref_count > 1:
        note, style = f"shared, ref_count {entry.ref_count}", SHARED
    elif slot.how is How.COPIED:
        note, style = f"copied from block {slot.src_block_id}", COPIED
    elif slot.how is How.ADDED:
        note, style = "new", NEW
    elif slot.block_id in copied_from:
        note, style = "the original", KEPT
    else:
        note, style = "its own", KEPT
    return Text.assemble((f"block {slot.block_id:<4}", style), " ", (note, style))


def bullets(lines: Iterable[Text]) -> Table:
    """Sentences with a dot before each, the rest of each indented."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column()
    for line in lines:
        table.add_row("•", line)
    return table


def story_lines(story: RequestStory, block_size: int) -> list[Text]:
    """What the tables show, in sentences."""
    return [
        _prompt_line(story.num_prompt_tokens, block_size),
        _sharing_line(story.widest),
        *_copy_lines(story, block_size),
        _growth_line(story.widest),
        *_later_lines(story),
        *_preemption_lines(story.num_preemptions),
    ]


def _prompt_line(num_tokens: int, block_size: int) -> Text:
    full, rest = divmod(num_tokens, block_size)
    fills = f"fills {counted(full, 'block')}"
    if rest:
        fills += f" and {rest} of the {block_size} places of one more"
    return Text(
        f"The prompt is {num_tokens} tokens long. At {block_size} tokens a block it {fills}."
    )


def _sharing_line(picture: Picture) -> Text:
    shared = picture.num_shared_blocks
    if not shared:
        return Text("No block was shared: the prompt does not fill a single block.")
    return Text.assemble(
        "It was computed once. ",
        (f"{counted(shared, 'block')} of it {'is' if shared == 1 else 'are'} shared", SHARED),
        f": all {len(picture.tables)} answers point at the same memory.",
    )


def _copy_lines(story: RequestStory, block_size: int) -> list[Text]:
    if not story.copies:
        whole = story.num_prompt_tokens % block_size == 0
        why = ": the prompt ends exactly at a block's end, so nobody had to write into a shared one"
        return [Text(f"No block was copied{why if whole else ''}.")]
    return [
        Text.assemble(
            f"Block {copy.src_block_id} (tokens {_span_of(copy.table_index, block_size)}) still had"
            " room, and each answer goes on in it with tokens of its own. So before answer"
            f" {answer_name(copy.candidate)} wrote there, it was ",
            (f"copied on write: block {copy.src_block_id} → block {copy.dst_block_id}", COPIED),
            f" (step {copy.step_id}).",
        )
        for copy in story.copies
    ]


def _growth_line(picture: Picture) -> Text:
    new = [
        entry.slot.block_id
        for table in picture.tables
        for entry in table
        if entry.slot.how is How.ADDED
    ]
    physical, logical = len(picture.block_ids), picture.num_logical_blocks
    saved = f" instead of {logical}" if logical > physical else ""
    grew = Text("As the answers grew, ")
    if new:
        grew.append(f"new blocks were added one at a time: {_numbers(new)}", NEW)
    else:
        grew.append("no further block was needed")
    return grew.append(f". In all, {counted(physical, 'physical block')}{saved}.")


def _later_lines(story: RequestStory) -> list[Text]:
    """Blocks that came when not all answers were there any more."""
    by_candidate: dict[int, list[int]] = {}
    for candidate, block_id in story.taken_later:
        by_candidate.setdefault(candidate, []).append(block_id)
    return [
        Text(
            f"When another answer had ended, answer {answer_name(candidate)} went on and took"
            f" {'block' if len(block_ids) == 1 else 'blocks'} {_numbers(block_ids)}."
        )
        for candidate, block_ids in by_candidate.items()
    ]


def _preemption_lines(num_preemptions: int) -> list[Text]:
    if not num_preemptions:
        return []
    return [Text(f"The request was preempted {counted(num_preemptions, 'time')} on the way.")]


def pool_table(before: PoolStats, story: RequestStory, after: PoolStats) -> Table:
    """The pool's levels before the request, at the fullest moment, and after it."""
    table = Table(box=box.ROUNDED, header_style="bold")
    table.add_column("the pool")
    for name in ("free", "cached", "in use", "on its way back", "total"):
        table.add_column(name, justify="right")
    total = before.geometry.num_blocks if before.geometry is not None else 0
    moments = [("before", before.levels), ("at its fullest", story.lowest_levels)]
    for moment, levels in (*moments, ("after", after.levels)):
        if levels is not None:
            table.add_row(moment, *_level_cells(levels), str(total))
    return table


def _level_cells(levels: PoolLevels) -> tuple[Text, str, str, str]:
    return (
        Text(str(levels.num_free_blocks), "bold"),
        str(levels.num_cached_blocks),
        str(levels.num_in_use_blocks),
        str(levels.num_quarantined_blocks),
    )


def given_back_line(story: RequestStory) -> Text:
    blocks = set(story.given_back)
    kept = story.blocks_used - blocks
    if kept:
        return Text(f"Blocks {_numbers(kept)} were NOT given back.", "bold red")
    return Text.assemble(
        "At the end ",
        (f"all {counted(len(blocks), 'block')} went back", "bold"),
        f" to the pool: {_numbers(blocks)}.",
    )


# ---------------------------------------------------------------- traces


def trace(request: RequestTrace) -> RenderableType:
    """The request's own spans as a tree, the first steps that computed it, and the totals."""
    caption = Text(
        "A line is a span: what was done, and for how long. Names begin with the process it was"
        " done in; octavo is this client.",
        "dim",
    )
    parts: list[RenderableType] = [caption, _tree("The request", request.roots)]
    parts += [
        Text(f"No span of {service} arrived in this request's trace.", "bold red")
        for service in request.missing_services
    ]
    if not request.steps:
        return Group(*parts, Text("No step that computed it arrived.", "bold red"))
    title = f"The {counted(len(request.steps), 'step')} that computed it (traces linked to it)"
    steps = _tree(title, request.steps[:SHOWN_STEPS])
    if len(request.steps) > SHOWN_STEPS:
        steps.add(Text(f"… {len(request.steps) - SHOWN_STEPS} more", "dim"))
    return Group(*parts, steps, _totals(request), _share_line(request))


def _share_line(request: RequestTrace) -> Text:
    """How much of the request's time the worker computed."""
    whole_ms = max(root.span.duration_ms for root in request.roots)
    of_name = {total.name: total.total_ms for total in request.totals()}
    if "worker.execute" not in of_name or not whole_ms:
        return Text("")
    worker_ms = of_name["worker.execute"]
    return Text(
        f"Of the {milliseconds(whole_ms)} the request took, the worker was computing for"
        f" {milliseconds(worker_ms)} ({worker_ms / whole_ms:.0%})."
    )


def _tree(title: str, nodes: Iterable[Node]) -> Tree:
    tree = Tree(Text(title, "bold"), guide_style="dim")
    for node in nodes:
        _grow(tree, node)
    return tree


def _grow(tree: Tree, node: Node) -> None:
    branch = tree.add(_span_label(node.span))
    for child in node.children:
        _grow(branch, child)


def _span_label(span: Span) -> Text:
    label = Text.assemble(
        (span.name, _SERVICE_STYLES.get(span.service, "")), "  ", milliseconds(span.duration_ms)
    )
    counts = [
        counted(value, _SHOWN_COUNTS[name])
        for name, value in ((key.removeprefix("octavo."), v) for key, v in span.attributes.items())
        if name in _SHOWN_COUNTS and isinstance(value, int) and value > 0
    ]
    return label.append(f"  {', '.join(counts)}" if counts else "", "dim")


def _totals(request: RequestTrace) -> Table:
    table = Table(box=box.ROUNDED, header_style="bold")
    table.add_column("in all steps")
    table.add_column("service")
    for name in ("spans", "together", "on average"):
        table.add_column(name, justify="right")
    for total in request.totals():
        style = _SERVICE_STYLES.get(total.service, "")
        table.add_row(
            Text(total.name, style),
            Text(total.service, style),
            str(total.count),
            milliseconds(total.total_ms),
            milliseconds(total.total_ms / total.count),
        )
    return table


# ---------------------------------------------------------------- words


def milliseconds(duration_ms: float) -> str:
    return f"{duration_ms:.2f} ms" if duration_ms < 10 else f"{duration_ms:.0f} ms"


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `2 copies`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun.removesuffix('y') + 'ie' if noun.endswith('y') else noun}s"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def error_line(message: str) -> str:
    """One line of markup for stderr."""
    return f"[bold red]error:[/] {escape(printable(message))}"
