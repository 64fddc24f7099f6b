"""Publishing: blocks that a step has filled with committed tokens enter the prefix cache.

A Commit says what is computed. What a sequence was *given* (shared with another one that may be
computing it at this moment) counts as computed too, but is not known to be filled. So blocks are
published only when a Commit has raised the number: steps are executed in order, hence whatever the
step that raised it could read was filled.
"""

from __future__ import annotations

import numpy as np

from kvmem_svc.core.batch import Column
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.sequences import Rows, SequenceTable
from kvmem_svc.core.slots import expand


def publish_computed(table: SequenceTable, pool: BlockPool, rows: Rows, before: Column) -> None:
    """Publish what became full. before: num_computed of `rows` until now, int32."""
    block_size = table.block_size
    computed = table.num_computed[rows]
    ahead = computed - table.chained_len[rows]
    # One comparison for both: a negative number is a large one here.
    due = (ahead.view(np.uint32) >= block_size) & table.is_caching[rows]
    if not due.any():
        return
    # Slots that others may hold are to be written again.
    table.may_share[rows[due & (ahead < 0)]] = True
    due &= (ahead > 0) & (computed > before)
    if due.any():
        _publish(table, pool, rows[due], ahead[due] // block_size)


def _publish(table: SequenceTable, pool: BlockPool, rows: Rows, counts: Column) -> None:
    """The next counts[i] blocks of rows[i] are computed."""
    block_size = table.block_size
    owner, offset = expand(counts)
    holders = rows[owner]
    index = table.chained_len[holders] // block_size + offset
    blocks = table.tables[holders, index]
    destinations = pool.copy_destinations()
    if destinations.size and (awaits_copy := np.isin(blocks, destinations)).any():
        # What was computed is in the block that is yet to be copied.
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
