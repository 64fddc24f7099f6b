"""The sequence table as plain values: see `state`."""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.sequences import SequenceTable, SwapMap
from kvmem_svc.core.state_plain import Plain, array, column

# Columns of which the rows of live sequences are dumped; the others are 0.
ROW_COLUMNS = (
    *("live_ids", "length", "num_computed", "table_len", "table_version", "candidate"),
    *("num_prompt_tokens", "tenant", "status", "may_share", "is_caching", "chained_len"),
    *("state_words", "has_word"),
)


def dump_sequences(table: SequenceTable) -> Plain:
    """Tokens and block tables are those of the live rows, one after the other."""
    rows = table.live_rows()
    tokens = [table.tokens[row, : table.length[row]] for row in rows]
    blocks = [table.tables[row, : table.table_len[row]] for row in rows]
    return {
        "rows": column(rows.astype(np.int32)),
        **{name: column(getattr(table, name)[rows]) for name in ROW_COLUMNS},
        "tokens": column(np.concatenate([b.NO_INT32, *tokens])),
        "tables": column(np.concatenate([b.NO_INT32, *blocks])),
        # Of which domain they are stands in the records.
        "chains": [
            [row, one.key, one.serial, one.is_foreign] for row, one in sorted(table.chains.items())
        ],
        "swap_maps": [
            [row, column(one.host_blocks), one.was_caching]
            for row, one in sorted(table.swap_maps.items())
        ],
        "long_states": [[row, state] for row, state in sorted(table.long_states.items())],
        "generation": column(np.array(table._generation, np.uint64)),
        "free_rows": column(np.array(table._free_rows, np.int32)),
        "num_given_finished": table._num_given_finished,
    }


def load_sequences(table: SequenceTable, plain: Plain) -> None:
    rows = array(plain["rows"])
    for name in ROW_COLUMNS:
        getattr(table, name)[rows] = array(plain[name])
    _fill(table.tokens, rows, table.length, array(plain["tokens"]))
    _fill(table.tables, rows, table.table_len, array(plain["tables"]))
    table.swap_maps = {
        row: SwapMap(array(host_blocks), was_caching)
        for row, host_blocks, was_caching in plain["swap_maps"]
    }
    table.long_states = {row: state for row, state in plain["long_states"]}
    table._generation = array(plain["generation"]).tolist()
    table._free_rows = array(plain["free_rows"]).tolist()
    table._num_given_finished = plain["num_given_finished"]


def _fill(matrix: b.Column, rows: b.Column, lengths: b.Column, values: b.Column) -> None:
    """Cut `values` into the beginnings of the matrix's `rows`."""
    start = 0
    for row in rows.tolist():
        length = int(lengths[row])
        matrix[row, :length] = values[start : start + length]
        start += length
    assert start == values.size, f"{values.size} values for {start} cells"
