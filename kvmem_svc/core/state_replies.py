"""Sessions and the reply window as plain values: see `state`."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from kvmem_svc.core import batch as b
from kvmem_svc.core.mutations import Session
from kvmem_svc.core.session import SessionLedger
from kvmem_svc.core.state_plain import Plain, array, column, scalars, set_scalars

LEDGER_SCALARS = ("kvmem_boot_id", "worker_boot_id", "epoch", "mutations_open", "next_batch_seq")


def dump_ledger(ledger: SessionLedger) -> Plain:
    return {
        **scalars(ledger, LEDGER_SCALARS),
        "session": None if ledger.session is None else list(astuple(ledger.session)),
        "replies": [
            [batch_seq, digest, _dump_result(result)]
            for batch_seq, (digest, result) in ledger.replies.items()
        ],
    }


def load_ledger(ledger: SessionLedger, plain: Plain) -> None:
    set_scalars(ledger, LEDGER_SCALARS, plain)
    ledger.session = None if plain["session"] is None else Session(*plain["session"])
    for batch_seq, digest, result in plain["replies"]:
        ledger.replies[batch_seq] = (digest, _load_result(result))


def _dump_result(result: b.BatchResult) -> Plain:
    deltas = result.deltas
    return {
        "batch_seq": result.batch_seq,
        "results": [_dump_op_result(one) for one in result.results],
        "deltas": [
            column(deltas.sequence_ids),
            column(deltas.table_indices),
            column(deltas.block_ids),
            column(deltas.table_versions),
        ],
        "copies": _dump_copies(result.copies),
        "levels": list(astuple(result.levels)),
        "num_allocated_blocks": result.num_allocated_blocks,
        "num_freed_blocks": result.num_freed_blocks,
        "swap_ins": _dump_copies(result.swap_ins),
        "swap_outs": _dump_copies(result.swap_outs),
    }


def _dump_copies(copies: b.BlockCopies) -> list[list[Any]]:
    return [column(copies.src_block_ids), column(copies.dst_block_ids)]


def _load_result(plain: Plain) -> b.BatchResult:
    return b.BatchResult(
        plain["batch_seq"],
        [_load_op_result(*one) for one in plain["results"]],
        b.TableDeltas(*map(array, plain["deltas"])),
        b.BlockCopies(*map(array, plain["copies"])),
        b.PoolLevels(*plain["levels"]),
        plain["num_allocated_blocks"],
        plain["num_freed_blocks"],
        b.BlockCopies(*map(array, plain["swap_ins"])),
        b.BlockCopies(*map(array, plain["swap_outs"])),
    )


def _dump_op_result(result: b.OpResult) -> list[Any]:
    """[status, message, what the op returned: None, or its kind and its fields]."""
    value: list[Any] | None
    match result.value:
        case None:
            value = None
        case b.Arrived(sequence_id, arrival_number, candidate_ids):
            value = ["arrived", sequence_id, arrival_number, list(candidate_ids)]
        case b.Admitted(tables):
            value = ["admitted", [_dump_table(table) for table in tables]]
        case b.SwappedIn(tables):
            value = ["swapped in", [_dump_table(table) for table in tables]]
        case b.Forked(child_ids, block_ids, table_version):
            value = ["forked", list(child_ids), column(block_ids), table_version]
        case b.Reserved(failed_groups, quota_groups):
            value = ["reserved", column(failed_groups), column(quota_groups)]
    return [int(result.status), result.message, value]


def _dump_table(table: b.BlockTable) -> list[Any]:
    return [
        table.sequence_id,
        column(table.block_ids),
        table.table_version,
        table.num_computed_tokens,
    ]


def _load_op_result(status: int, message: str, value: list[Any] | None) -> b.OpResult:
    return b.OpResult(b.OpStatus(status), message, None if value is None else _load_value(*value))


def _load_value(kind: str, *fields: Any) -> b.OpValue:
    if kind == "arrived":
        return b.Arrived(*fields)
    if kind == "admitted":
        return b.Admitted(_load_tables(fields[0]))
    if kind == "swapped in":
        return b.SwappedIn(_load_tables(fields[0]))
    if kind == "forked":
        child_ids, block_ids, table_version = fields
        return b.Forked(child_ids, array(block_ids), table_version)
    if kind == "reserved":
        return b.Reserved(*map(array, fields))
    raise ValueError(f"no op returns {kind!r}")


def _load_tables(plain: list[list[Any]]) -> list[b.BlockTable]:
    return [b.BlockTable(i, array(blocks), *rest) for i, blocks, *rest in plain]
