"""Publishing: blocks that a step has filled with committed tokens enter the prefix cache.

A Commit says what is computed. What a sequence was *given* (shared with another one that may be
computing it at this moment) counts as computed too, but is not known to be filled. So blocks are
published only when a Commit has raised the number: steps are executed in order, hence whatever the
step that raised it could read was filled.

What is to be published is found out when it is committed, and published a little later: see
`BlockManager.publish_filled`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmem_svc.core.batch import Column
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import Rows, SequenceTable
from kvmem_svc.core.slots import expand


@dataclass(frozen=True, slots=True)
class Filled:
    """The next counts[i] blocks of rows[i], after those already in its chain, are computed."""

    rows: Rows
    counts: Column


def filled_blocks(table: SequenceTable, rows: Rows, before: Column) -> Filled | None:
    """What became full and is to be published. before: num_computed of `rows` until now, int32."""
    block_size = table.block_size
    ahead = table.num_computed[rows] - table.chained_len[rows]
    # One comparison for both: a negative number is a large one here.
    due = (ahead.view(np.uint32) >= block_size) & table.is_caching[rows]
    if not due.any():
        return None
    rows, ahead, before = rows[due], ahead[due], before[due]
    # Slots that others may hold are to be written again.
    table.may_share[rows[ahead < 0]] = True
    is_filled = (ahead > 0) & (table.num_computed[rows] > before)
    if not is_filled.any():
        return None
    return Filled(rows[is_filled], ahead[is_filled] // block_size)


def publish(table: SequenceTable, pool: BlockPool, filled: Filled) -> None:
    """Publish it. Its sequences must be as they were, but for slots made after those computed."""
    block_size = table.block_size
    rows, counts = filled.rows, filled.counts
    owner, offset = expand(counts)
    holders = rows[owner]
    index = table.chained_len[holders] // block_size + offset
    blocks = table.tables[holders, index]
    destinations = pool.moves.destinations()
    if destinations.size and (awaits_copy := np.isin(blocks, destinations)).any():
        # What was computed is in the block that is yet to be copied, or in the host tier.
        counts = counts.copy()
        np.minimum.at(counts, owner[awaits_copy], offset[awaits_copy])
        kept = offset < counts[owner]
        holders, index, blocks = holders[kept], index[kept], blocks[kept]
    positions = (index * block_size)[:, np.newaxis] + np.arange(block_size)
    tokens = table.tokens[holders[:, np.newaxis], positions]
    chains = [table.chain_of(row) for row in rows.tolist()]
    replaced = pool.cache.publish(chains, counts.tolist(), blocks, tokens)
    table.chained_len[rows] += counts * block_size
    if replaced:
        pool.drop_content(np.array(replaced, np.int32))
