"""What must always hold. `check_levels` costs nothing and runs after every batch;
`check_integrity` reads everything and runs when the memory falls idle, if enough has happened
for that to cost little a block."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from kvmem_svc.core.errors import InvariantViolation
from kvmem_svc.core.host_tier import HostTier
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import KEY_BYTES
from kvmem_svc.core.sequences import SequenceTable, Status


def check_levels(manager: BlockManager) -> None:
    """Each count is kept on its own; together they are the pool, and the host tier."""
    pool, host = manager.pool, manager.host
    counts = (pool.num_free, pool.num_cached, pool.num_in_use, pool.num_quarantined)
    if sum(counts) != pool.num_blocks or min(counts) < 0:
        _violated(
            f"free {pool.num_free} + cached {pool.num_cached} + in use {pool.num_in_use} +"
            f" quarantined {pool.num_quarantined} is not {pool.num_blocks}"
        )
    num_free = host.num_free
    if (
        num_free + host.num_in_use + host.num_quarantined != host.num_blocks
        or num_free < 0
        or host.num_in_use < 0
        or host.num_quarantined < 0
    ):
        _violated(
            f"of the host tier free {num_free} + in use {host.num_in_use} + quarantined"
            f" {host.num_quarantined} is not {host.num_blocks}"
        )


def check_integrity(manager: BlockManager) -> None:
    """Raises InvariantViolation with what does not balance. O(blocks ever used)."""
    check_levels(manager)
    _check_sequences(manager.sequences, manager)
    held = _held_counts(manager)
    _check_references(manager.pool, held)
    _check_each_block_is_once(manager.pool, held)
    _check_host_blocks(manager.host, manager.sequences)
    _check_moves(manager)
    _check_writers(manager.pool, manager.sequences)
    _check_cache(manager.pool)
    _check_chains(manager.sequences)
    _check_tenants(manager)


def _held_counts(manager: BlockManager) -> np.ndarray:
    """How many table entries and pins hold each block ever used; int64."""
    pool, table = manager.pool, manager.sequences
    entries = [table.tables[row, : table.table_len[row]] for row in table.live_rows()]
    entries += [pin.blocks for pin in manager.pins.values()]
    blocks = np.concatenate(entries) if entries else np.zeros(0, np.int32)
    used = pool.num_ever_used
    if blocks.size and not 0 <= blocks.min() <= blocks.max() < used:
        _violated(f"a table holds block {blocks.min()} or {blocks.max()}, not in 0 .. {used - 1}")
    return np.bincount(blocks, minlength=used)


def _check_references(pool: BlockPool, held: np.ndarray) -> None:
    ref_counts = pool.ref_counts[: held.size]
    wrong = np.flatnonzero(ref_counts != held)
    if wrong.size:
        block = int(wrong[0])
        _violated(
            f"{wrong.size} blocks are miscounted; block {block} has ref_count"
            f" {ref_counts[block]} and {held[block]} table entries hold it"
        )
    if np.count_nonzero(held) != pool.num_in_use:
        _violated(f"{np.count_nonzero(held)} blocks are held, num_in_use is {pool.num_in_use}")


def _check_each_block_is_once(pool: BlockPool, held: np.ndarray) -> None:
    free = np.bincount(pool.free_blocks(), minlength=held.size)
    quarantined = np.bincount(pool.quarantined_blocks(), minlength=held.size)
    cached = np.bincount(pool.cached_blocks(), minlength=held.size)
    places = free + cached + quarantined + (held > 0)
    wrong = np.flatnonzero(places != 1)
    if wrong.size:
        block = int(wrong[0])
        _violated(
            f"{wrong.size} blocks are not in exactly one place; block {block} is"
            f" {free[block]} times free, {cached[block]} times cached, {quarantined[block]} times"
            f" in quarantine and held by {held[block]} tables"
        )
    if int(quarantined.sum()) != pool.num_quarantined:
        _violated(
            f"{int(quarantined.sum())} blocks are in quarantine, num_quarantined is"
            f" {pool.num_quarantined}"
        )


def _check_host_blocks(host: HostTier, table: SequenceTable) -> None:
    """Each is free, in quarantine, or of as many swapped sequences as its count says."""
    used = host.num_ever_used
    if not set(table.swap_maps) <= set(table.live_rows().tolist()):
        _violated("a row has a swap map and no sequence")
    entries = [swap_map.host_blocks for swap_map in table.swap_maps.values()]
    held = np.bincount(np.concatenate([np.zeros(0, np.int32), *entries]), minlength=used)
    if held.size > used or not np.array_equal(held, host.ref_counts[:used]):
        _violated("host blocks have other references than the swap maps that name them")
    free = np.bincount(host.free_blocks(), minlength=used)
    quarantined = np.bincount(host.quarantined_blocks(), minlength=used)
    wrong = np.flatnonzero(free + quarantined + (held > 0) != 1)
    if wrong.size:
        block = int(wrong[0])
        _violated(
            f"{wrong.size} host blocks are not in exactly one place; {block} is {free[block]}"
            f" times free, {quarantined[block]} times in quarantine, and {held[block]} swapped"
            " sequences have it"
        )
    if int(quarantined.sum()) != host.num_quarantined:
        _violated(
            f"{int(quarantined.sum())} host blocks are in quarantine, not {host.num_quarantined}"
        )


def _check_moves(manager: BlockManager) -> None:
    """What a step is to read or write with its copies and swaps is held: it is not free."""
    pool, host = manager.pool, manager.host
    for step, moves in pool.moves.by_step.items():
        blocks, host_blocks = moves.blocks(), moves.host_blocks()
        if np.isin(blocks, pool.free_blocks()).any() or pool.is_cached(blocks).any():
            _violated(f"a block that step {step} copies or swaps is free")
        if np.isin(host_blocks, host.free_blocks()).any():
            _violated(f"a host block that step {step} swaps is free")


def _check_sequences(table: SequenceTable, manager: BlockManager) -> None:
    rows = table.live_rows()
    in_host = np.array([table.num_host_blocks(row) for row in rows.tolist()], np.int32)
    capacity = (table.table_len[rows] + in_host) * table.block_size
    status, has_blocks = table.status[rows], table.table_len[rows] != 0
    swapped = status == Status.SWAPPED
    checks = {
        "is not live": ~np.isin(status, (Status.WAITING, Status.RUNNING, Status.SWAPPED)),
        "waits or is swapped and has blocks": (status != Status.RUNNING) & has_blocks,
        "runs without blocks": (status == Status.RUNNING) & ~has_blocks,
        "is swapped and nowhere, or in the host tier and not swapped": swapped != (in_host > 0),
        "has more computed than slots": table.num_computed[rows] > capacity,
        "has more computed than tokens": table.num_computed[rows] > table.length[rows],
        "is longer than the model": table.length[rows] > table.max_model_len + 1,
        "is shorter than its prompt": table.length[rows] < table.num_prompt_tokens[rows],
    }
    for what, wrong in checks.items():
        if wrong.any():
            _violated(f"sequence {table.live_ids[rows[int(wrong.argmax())]]} {what}")
    if rows.size + table.num_free_rows != table.max_sequences:
        _violated(f"{rows.size} rows live + {table.num_free_rows} free != {table.max_sequences}")
    live = {i for record in manager.requests.values() for i in record.live.values()}
    if live != set(table.live_ids[rows].tolist()):
        _violated("the records and the table name different live sequences")
    finished = {f.sequence_id for r in manager.requests.values() for f in r.finished.values()}
    if finished != set(table.finished):
        _violated("the records and the table name different finished sequences")


def _check_writers(pool: BlockPool, table: SequenceTable) -> None:
    """A row that is taken for the sole holder of what it may write to must be that: else it
    would write in place."""
    for row in table.live_rows():
        if not table.may_share[row]:
            first = table.num_computed[row] // table.block_size
            blocks = table.tables[row, first : table.table_len[row]]
            if (pool.ref_counts[blocks] > 1).any() or pool.cache.is_published(blocks).any():
                _violated(f"sequence {table.live_ids[row]} shares blocks and does not know it")


def _check_cache(pool: BlockPool) -> None:
    """The index and the published blocks are the same, and so are cached blocks without holder."""
    cache, used = pool.cache, pool.num_ever_used
    published = np.flatnonzero(cache.serials[:used])
    if sorted(cache.index.values()) != published.tolist():
        _violated(f"{published.size} blocks are published, the index has {len(cache.index)}")
    by_block = sorted(cache.index, key=cache.index.__getitem__)
    if b"".join(by_block) != cache.keys.reshape(-1, KEY_BYTES)[published].tobytes():
        _violated("the index finds a block by a key that is not its own")
    roots = published[cache.parent_serials[published] == 0]
    if not set(roots.tolist()) <= set(cache.domains) <= set(published.tolist()):
        _violated("it is not known of every published block whose it is, or of others too")
    cached = np.flatnonzero(pool.is_cached(np.arange(used)))
    if sorted(pool.cached_blocks().tolist()) != cached.tolist():
        _violated(f"{cached.size} blocks are cached, the queue has {pool.num_cached}")
    if not cache.is_published(cached).all() or pool.cache.is_published(pool.free_blocks()).any():
        _violated("a cached block is not published, or a free one is")


def _check_tenants(manager: BlockManager) -> None:
    """What each tenant has adds up."""
    pool, tenants = manager.pool, manager.tenants
    in_use = np.flatnonzero(pool.ref_counts[: pool.num_ever_used])
    counted = np.bincount(pool.tenants_of(in_use), minlength=pool.num_blocks_of.size)
    if not np.array_equal(counted, pool.num_blocks_of):
        _violated("blocks in use are not counted for the tenants that have them")
    for name, number in tenants.numbers.items():
        tenant = tenants.tenant(number)
        records = [record for record in manager.requests.values() if record.tenant == name]
        num_seats = sum(record.num_seats for record in records)
        if (tenant.num_records, tenant.num_sequences) != (len(records), num_seats):
            _violated(f"tenant {name!r} has {len(records)} requests and {num_seats} sequences")
        if any(record.tenant_number != number for record in records):
            _violated(f"a request of tenant {name!r} is counted for another one")


def _check_chains(table: SequenceTable) -> None:
    """A row is caching if it has a chain to go on from; what that stands for is whole blocks."""
    if set(table.chains) != set(np.flatnonzero(table.is_caching).tolist()):
        _violated("rows with a chain are not those that are caching")
    chained = table.chained_len
    if (chained % table.block_size).any() or (chained > table.length).any():
        _violated("a chain stands for half a block, or for more than the sequence's tokens")


def _violated(what: str) -> NoReturn:
    raise InvariantViolation(what)
