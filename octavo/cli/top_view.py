"""What `octavo top` draws: a moment of the memory service, and what changed since the one before.

Functions from data to rich renderables; no clock, no network. They fit any width: what is least
needed is left out first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from octavo.admin_types import PoolStats, SequenceStatus, SequenceSummary, SessionStats
from octavo.cli.render import counted
from octavo.cli.text import one_line

MIN_WIDTH = 20
# Narrower, the table of sequences has no tenants; narrower still, no numbers of blocks.
WIDTH_WITH_TENANTS = 76
WIDTH_WITH_BLOCKS = 48
_STATUS_STYLES = {
    SequenceStatus.RUNNING: "green",
    SequenceStatus.SWAPPED: "magenta",
    SequenceStatus.WAITING: "yellow",
    SequenceStatus.FINISHED: "dim",
}


@dataclass(frozen=True)
class Sample:
    """The memory service at `at_s`, seconds on any clock that never goes back.

    truncated: there are more sequences than these.
    """

    at_s: float
    stats: PoolStats
    sequences: tuple[SequenceSummary, ...]
    truncated: bool = False


@dataclass(frozen=True)
class Rates:
    """hit_share: of the prompt tokens that were looked up meanwhile; None: none were."""

    steps_per_s: float
    tokens_per_s: float
    hit_share: float | None


@dataclass(frozen=True)
class _Share:
    """Blocks of one state. The mark tells it from the others without colours."""

    name: str
    num_blocks: int
    mark: str
    style: str


def rates(former: Sample | None, sample: Sample) -> Rates | None:
    """What went on between two moments; None when they do not belong to one life."""
    if former is None or sample.at_s <= former.at_s:
        return None
    before, after = former.stats, sample.stats
    num_tokens = after.num_recorded_tokens - before.num_recorded_tokens
    if before.kvmem_boot_id != after.kvmem_boot_id or num_tokens < 0:
        return None  # it was started again, from its journal or without
    seconds = sample.at_s - former.at_s
    looked_up = after.prefix_cache.num_lookup_tokens - before.prefix_cache.num_lookup_tokens
    found = after.prefix_cache.num_hit_tokens - before.prefix_cache.num_hit_tokens
    return Rates(
        max(0, after.last_step_id - before.last_step_id) / seconds,
        num_tokens / seconds,
        found / looked_up if looked_up > 0 and found >= 0 else None,
    )


def frame(
    address: str,
    sample: Sample | None,
    former: Sample | None,
    *,
    width: int,
    num_rows: int = 20,
    problem: str = "",
) -> RenderableType:
    """Everything at once. problem: why there is nothing newer, in a sentence; num_rows: of
    sequences, at most."""
    title = Text.assemble(("octavo top", "bold"), " ", one_line(address), overflow="ellipsis")
    title.no_wrap = True
    parts: list[RenderableType] = [title]
    if problem:
        parts.append(Panel(Text(one_line(problem), "bold red"), border_style="red"))
    if sample is not None:
        parts += _body(sample, rates(former, sample), max(width, MIN_WIDTH), num_rows)
    return Group(*parts)


def _body(
    sample: Sample, meanwhile: Rates | None, width: int, num_rows: int
) -> list[RenderableType]:
    stats = sample.stats
    parts: list[RenderableType] = [_session_line(stats.session)]
    if stats.geometry is None:
        return [*parts, Text("No worker's pool is attached.", "yellow")]
    parts += [
        pool_bar(stats, width),
        _legend(stats),
        *_facts(stats, meanwhile),
        _sequence_line(sample),
    ]
    if len({one.tenant for one in sample.sequences}) > 1:
        parts.append(_tenant_table(sample.sequences, width))
    if sample.sequences:
        parts.append(_sequence_table(sample.sequences, width, num_rows))
    return parts


# ---------------------------------------------------------------- the session


def _session_line(session: SessionStats) -> Text:
    holder = one_line(session.holder)
    line = Text()
    if not holder and not session.epoch:
        line.append("nobody has opened a session yet", "yellow")
    elif session.orphaned_ms:
        line.append(f"no session for {session.orphaned_ms / 1000:.1f} s", "bold red")
        line.append(f"; epoch {session.epoch} was {holder or 'closed'}")
        line.append("'s" if holder else "")
    else:
        line.append(f"epoch {session.epoch}", "bold")
        line.append(f", held by {holder}")
        if session.holder_address:
            line.append(f" at {one_line(session.holder_address)}")
        if not session.mutations_open:
            line.append(", takeover under way", "yellow")
    if not session.journal_healthy:
        line.append("; the journal cannot be written: nothing is acknowledged", "bold red")
    return line


# ---------------------------------------------------------------- the pool


def _shares(stats: PoolStats) -> list[_Share]:
    levels = stats.levels
    num_shared = min(stats.num_shared_blocks, levels.num_in_use_blocks)
    return [
        _Share("shared", num_shared, "█", "bold cyan"),
        _Share("in use", levels.num_in_use_blocks - num_shared, "▓", "green"),
        _Share("quarantined", levels.num_quarantined_blocks, "~", "yellow"),
        _Share("reserved", levels.num_reserved_blocks, "+", "magenta"),
        _Share("cached", levels.num_cached_blocks, "▒", "blue"),
        _Share("free", levels.num_free_blocks, "·", "dim"),
    ]


def pool_bar(stats: PoolStats, width: int) -> Text:
    """The pool as one line, each state as long as its share of the blocks; at least a mark for
    each that has a block."""
    shares = [share for share in _shares(stats) if share.num_blocks]
    bar = Text(no_wrap=True)
    for share, length in zip(shares, _lengths([s.num_blocks for s in shares], width), strict=True):
        bar.append(share.mark * length, share.style)
    return bar


def _lengths(counts: Sequence[int], width: int) -> list[int]:
    """Whole numbers in proportion to the counts, each at least 1, that sum to `width` (or to
    how many there are, where that is more)."""
    total = sum(counts)
    lengths = [max(1, count * width // total) for count in counts]
    while counts and sum(lengths) != max(width, len(counts)):
        # Where it is furthest from its due: too short, or too long and not the last mark.
        short = sum(lengths) < width
        due = [
            (count * width / total - length) * (1 if short else -1)
            for count, length in zip(counts, lengths, strict=True)
        ]
        candidates = [i for i in range(len(counts)) if short or lengths[i] > 1]
        lengths[max(candidates, key=lambda i: due[i])] += 1 if short else -1
    return lengths


def _legend(stats: PoolStats) -> Text:
    geometry = stats.geometry
    assert geometry is not None
    text = Text(f"{geometry.num_blocks:,} blocks of {geometry.block_size}:")
    for share in _shares(stats):
        if share.num_blocks or share.name in ("in use", "cached", "free"):
            text.append(f"  {share.mark}", share.style).append(
                f" {share.name} {share.num_blocks:,}"
            )
    return text


# ---------------------------------------------------------------- what goes on


def _facts(stats: PoolStats, meanwhile: Rates | None) -> list[Text]:
    lines = [_rate_line(stats, meanwhile), _cache_line(stats, meanwhile)]
    geometry, levels = stats.geometry, stats.levels
    if geometry is not None and geometry.num_host_blocks:
        in_use = geometry.num_host_blocks - levels.num_free_host_blocks
        lines.append(
            _fact(
                "host tier",
                f"{in_use:,} of {counted(geometry.num_host_blocks, 'block')} in use,"
                f" {stats.num_swapped_out_blocks:,} swapped out,"
                f" {stats.num_swapped_in_blocks:,} in",
            )
        )
    return lines


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<10}", "bold"), " ", value)


def _rate_line(stats: PoolStats, meanwhile: Rates | None) -> Text:
    steps, tokens = ("–", "–")
    if meanwhile is not None:
        steps, tokens = f"{meanwhile.steps_per_s:.1f}", f"{meanwhile.tokens_per_s:.1f}"
    return _fact(
        "rates",
        f"{steps} steps/s, {tokens} tokens/s; in all"
        f" {counted(stats.num_preemptions, 'preemption')},"
        f" {counted(stats.num_copies_on_write, 'copy')} on write,"
        f" {stats.peak_in_use_blocks:,} blocks at the peak",
    )


def _cache_line(stats: PoolStats, meanwhile: Rates | None) -> Text:
    cache = stats.prefix_cache
    if not cache.enabled:
        return _fact("cache", "switched off")
    if not cache.num_lookup_tokens:
        found = "nothing was looked up yet"
    else:
        found = f"{cache.num_hit_tokens / cache.num_lookup_tokens:.0%} of prompt tokens found"
        if meanwhile is not None and meanwhile.hit_share is not None:
            found += f" (now {meanwhile.hit_share:.0%})"
    pins = f", {counted(cache.num_pins, 'pin')}" if cache.num_pins else ""
    return _fact("cache", f"{found}; {counted(cache.num_evictions, 'eviction')}{pins}")


# ---------------------------------------------------------------- sequences


def _sequence_line(sample: Sample) -> Text:
    stats = sample.stats
    requests = counted(stats.num_requests, "request")
    sequences = f"{counted(stats.num_sequences, 'live sequence')}"
    ended = f", {stats.num_finished_sequences} ended" if stats.num_finished_sequences else ""
    expired = f", {stats.num_expired_requests} expired" if stats.num_expired_requests else ""
    shown = f" (the first {len(sample.sequences)} are looked at)" if sample.truncated else ""
    return _fact("requests", f"{requests}, {sequences}{ended}{expired}{shown}")


def _table(width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", width=width)
    table.show_header = True
    return table


def _tenant_table(sequences: Iterable[SequenceSummary], width: int) -> Table:
    by_tenant: defaultdict[str, list[SequenceSummary]] = defaultdict(list)
    for one in sequences:
        by_tenant[one.tenant].append(one)
    table = _table(width)
    table.add_column("tenant", no_wrap=True, ratio=1)
    for name in ("running", "waiting", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for tenant, theirs in sorted(by_tenant.items(), key=lambda item: -_num_blocks(item[1])):
        running = sum(one.status is SequenceStatus.RUNNING for one in theirs)
        waiting = sum(
            one.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED) for one in theirs
        )
        name = Text(one_line(tenant) or "(none)")
        table.add_row(name, str(running), str(waiting), f"{_num_blocks(theirs):,}")
    return table


def _num_blocks(sequences: Iterable[SequenceSummary]) -> int:
    """Entries of their tables: a block that two hold counts for both."""
    return sum(one.num_blocks for one in sequences)


def _sequence_table(sequences: Sequence[SequenceSummary], width: int, num_rows: int) -> Group:
    order = list(_STATUS_STYLES)
    ranked = sorted(sequences, key=lambda one: (order.index(one.status), one.arrival_number))
    table = _table(width)
    table.add_column("request", no_wrap=True, ratio=1)
    if width >= WIDTH_WITH_TENANTS:
        table.add_column("tenant", no_wrap=True, max_width=16)
    table.add_column("state", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    if width >= WIDTH_WITH_BLOCKS:
        table.add_column("computed", justify="right", no_wrap=True)
        table.add_column("blocks", justify="right", no_wrap=True)
    for one in ranked[:num_rows]:
        table.add_row(*_cells(one, width))
    left_out = len(ranked) - num_rows
    return Group(table, *([Text(f"… {left_out} more", "dim")] if left_out > 0 else []))


def _cells(one: SequenceSummary, width: int) -> list[Text]:
    name = one_line(one.request_id) + (f" [{one.candidate}]" if one.candidate else "")
    cells = [Text(name)]
    if width >= WIDTH_WITH_TENANTS:
        cells.append(Text(one_line(one.tenant)))
    cells.append(Text(one.status, _STATUS_STYLES[one.status]))
    cells.append(Text(f"{one.num_prompt_tokens}+{one.num_tokens - one.num_prompt_tokens}"))
    if width >= WIDTH_WITH_BLOCKS:
        computed = one.num_computed_tokens / one.num_tokens if one.num_tokens else 0
        cells.append(Text(f"{computed:.0%}"))
        cells.append(Text(_blocks_in_words(one)))
    return cells


def _blocks_in_words(one: SequenceSummary) -> str:
    if one.num_host_blocks:
        return f"{one.num_host_blocks} host"
    shared = f" ({one.num_shared_blocks} shared)" if one.num_shared_blocks else ""
    return f"{one.num_blocks}{shared}"
