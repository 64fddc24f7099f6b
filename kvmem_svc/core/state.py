"""The whole state of the memory as plain values, and back: what a snapshot holds.

`dump` gives dicts and lists of int, str, bytes, bool and None; columns of numbers are
[dtype, bytes]. Equal states give equal values in equal order, also when one of them was loaded
and went on: whatever has an order that matters (free lists, quarantine) keeps it. Caches and
scratch are left out; a test compares the attributes of every class here with what is dumped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.eviction import LruQueue
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Configure, Session
from kvmem_svc.core.pins import HeldPrefix
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import KEY_BYTES, Chain, Domain, LookupCounters, PrefixCache
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import ROW_MASK, SequenceTable
from kvmem_svc.core.session import SessionLedger
from kvmem_svc.core.tenants import Quota, Tenant, Tenants

Plain = dict[str, Any]

# Attributes that are dumped as they are, by the part of the state that has them.
MEMORY_SCALARS = ("max_sequences", "last_step_id", "acknowledged_step", "num_batches")
LEDGER_SCALARS = ("kvmem_boot_id", "worker_boot_id", "epoch", "mutations_open", "next_batch_seq")
MANAGER_SCALARS = (
    *("num_preemptions", "num_expired_requests", "_next_arrival_number", "_next_pin_id"),
)
POOL_SCALARS = (
    *("num_in_use", "num_quarantined", "peak_in_use", "num_allocations", "num_freed"),
    *("num_copies_on_write", "num_evictions", "_num_returned", "_num_ever_used", "_last_stamp"),
    *("_step_id", "_acknowledged_step", "_pending_step"),
)
CACHE_SCALARS = ("enabled", "num_published", "_last_serial")
# Columns of the sequence table of which the rows of live sequences are dumped; the others are 0.
ROW_COLUMNS = (
    *("live_ids", "length", "num_computed", "table_len", "table_version", "candidate"),
    *("num_prompt_tokens", "tenant", "status", "may_share", "is_caching", "chained_len"),
    *("state_words", "has_word"),
)
RECORD_SCALARS = (
    *("request_id", "arrival_number", "num_candidates", "num_prompt_tokens", "tenant"),
    *("request_spec", "request_digest", "cache_salt", "tenant_number"),
)


def dump(memory: KvMemory) -> Plain:
    """Everything that decides how `memory` goes on."""
    memory.settle()
    manager = memory.manager
    return {
        **_scalars(memory, MEMORY_SCALARS),
        "configuration": [
            memory.configuration.use_prefix_cache,
            *astuple(memory.configuration.quota),
        ],
        "ledger": _dump_ledger(memory.ledger),
        "manager": None if manager is None else _dump_manager(manager),
    }


def load(plain: Plain) -> KvMemory:
    """The memory that `dump` was of. Any exception means: it was not."""
    memory = KvMemory(plain["ledger"]["kvmem_boot_id"], max_sequences=plain["max_sequences"])
    _set_scalars(memory, MEMORY_SCALARS, plain)
    _load_ledger(memory.ledger, plain["ledger"])
    if plain["manager"] is not None:
        memory.manager = _load_manager(memory.max_sequences, plain["manager"])
    use_prefix_cache, *quota = plain["configuration"]
    memory.configuration = Configure(use_prefix_cache, Quota(*quota))
    if memory.manager is not None:
        memory.manager.quota = memory.configuration.quota
    return memory


def _scalars(owner: object, names: Sequence[str]) -> Plain:
    return {name: getattr(owner, name) for name in names}


def _set_scalars(owner: object, names: Sequence[str], plain: Plain) -> None:
    for name in names:
        setattr(owner, name, plain[name])


def _column(values: b.Column) -> list[Any]:
    return [values.dtype.str, values.tobytes()]


def _array(column: list[Any]) -> b.Column:
    dtype, content = column
    return np.frombuffer(content, np.dtype(dtype)).copy()


# --- sessions and the reply window -----------------------------------------------------


def _dump_ledger(ledger: SessionLedger) -> Plain:
    return {
        **_scalars(ledger, LEDGER_SCALARS),
        "session": None if ledger.session is None else list(astuple(ledger.session)),
        "replies": [
            [batch_seq, digest, _dump_result(result)]
            for batch_seq, (digest, result) in ledger.replies.items()
        ],
    }


def _load_ledger(ledger: SessionLedger, plain: Plain) -> None:
    _set_scalars(ledger, LEDGER_SCALARS, plain)
    ledger.session = None if plain["session"] is None else Session(*plain["session"])
    for batch_seq, digest, result in plain["replies"]:
        ledger.replies[batch_seq] = (digest, _load_result(result))


def _dump_result(result: b.BatchResult) -> Plain:
    deltas, copies = result.deltas, result.copies
    return {
        "batch_seq": result.batch_seq,
        "results": [_dump_op_result(one) for one in result.results],
        "deltas": [
            _column(deltas.sequence_ids),
            _column(deltas.table_indices),
            _column(deltas.block_ids),
            _column(deltas.table_versions),
        ],
        "copies": [_column(copies.src_block_ids), _column(copies.dst_block_ids)],
        "levels": list(astuple(result.levels)),
        "num_allocated_blocks": result.num_allocated_blocks,
        "num_freed_blocks": result.num_freed_blocks,
    }


def _load_result(plain: Plain) -> b.BatchResult:
    return b.BatchResult(
        plain["batch_seq"],
        [_load_op_result(*one) for one in plain["results"]],
        b.TableDeltas(*map(_array, plain["deltas"])),
        b.BlockCopies(*map(_array, plain["copies"])),
        b.PoolLevels(*plain["levels"]),
        plain["num_allocated_blocks"],
        plain["num_freed_blocks"],
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
        case b.Forked(child_ids, block_ids, table_version):
            value = ["forked", list(child_ids), _column(block_ids), table_version]
        case b.Reserved(failed_groups, quota_groups):
            value = ["reserved", _column(failed_groups), _column(quota_groups)]
    return [int(result.status), result.message, value]


def _dump_table(table: b.BlockTable) -> list[Any]:
    return [
        table.sequence_id,
        _column(table.block_ids),
        table.table_version,
        table.num_computed_tokens,
    ]


def _load_op_result(status: int, message: str, value: list[Any] | None) -> b.OpResult:
    return b.OpResult(b.OpStatus(status), message, None if value is None else _load_value(*value))


def _load_value(kind: str, *fields: Any) -> b.Arrived | b.Admitted | b.Forked | b.Reserved:
    if kind == "arrived":
        return b.Arrived(*fields)
    if kind == "admitted":
        tables = [b.BlockTable(i, _array(blocks), *rest) for i, blocks, *rest in fields[0]]
        return b.Admitted(tables)
    if kind == "forked":
        child_ids, block_ids, table_version = fields
        return b.Forked(child_ids, _array(block_ids), table_version)
    if kind == "reserved":
        return b.Reserved(*map(_array, fields))
    raise ValueError(f"no op returns {kind!r}")


# --- requests --------------------------------------------------------------------------


def _dump_manager(manager: BlockManager) -> Plain:
    return {
        **_scalars(manager, MANAGER_SCALARS),
        "geometry": list(astuple(manager.geometry)),
        "pool": _dump_pool(manager.pool),
        "sequences": _dump_sequences(manager.sequences),
        "requests": [_dump_record(record) for record in manager.requests.values()],
        "tenants": _dump_tenants(manager.tenants),
        "pins": [_dump_pin(pin) for pin in manager.pins.values()],
    }


def _load_manager(max_sequences: int, plain: Plain) -> BlockManager:
    manager = BlockManager(max_sequences, b.PoolGeometry(*plain["geometry"]))
    _set_scalars(manager, MANAGER_SCALARS, plain)
    _load_pool(manager.pool, plain["pool"])
    _load_sequences(manager.sequences, plain["sequences"])
    _load_tenants(manager.tenants, plain["tenants"])
    for one in plain["pins"]:
        pin = _load_pin(*one)
        manager.pins[pin.pin_id] = pin
    manager.pool.cache.public = [pin.public() for pin in manager.pins.values() if pin.is_public]
    chains = {row: chain for row, *chain in plain["sequences"]["chains"]}
    for one in plain["requests"]:
        record = _load_record(one)
        manager.requests[record.request_id] = record
        for sequence_id in record.live.values():
            row = sequence_id & ROW_MASK
            manager.sequences.records[row] = record
            if row in chains:
                manager.sequences.chains[row] = Chain(record.domain, *chains[row])
        for finished in record.finished.values():
            manager.sequences.finished[finished.sequence_id] = finished
    return manager


def _dump_tenants(tenants: Tenants) -> Plain:
    return {
        "entries": [None if one is None else list(astuple(one)) for one in tenants.entries],
        "free": list(tenants._free),
    }


def _load_tenants(tenants: Tenants, plain: Plain) -> None:
    tenants.entries = [None if one is None else Tenant(*one) for one in plain["entries"]]
    tenants._free = list(plain["free"])
    tenants.numbers = {
        entry.name: number for number, entry in enumerate(tenants.entries) if entry is not None
    }


def _dump_pin(pin: HeldPrefix) -> list[Any]:
    domain = list(astuple(pin.domain))
    columns = [_column(pin.blocks), _column(pin.tokens)]
    return [pin.pin_id, domain, *columns, pin.ttl_ms, pin.is_public]


def _load_pin(pin_id: int, domain: list[str], *rest: Any) -> HeldPrefix:
    blocks, tokens, ttl_ms, is_public = rest
    return HeldPrefix(pin_id, Domain(*domain), _array(blocks), _array(tokens), ttl_ms, is_public)


def _dump_record(record: RequestRecord) -> Plain:
    return {
        **_scalars(record, RECORD_SCALARS),
        "live": [list(pair) for pair in record.live.items()],
        "finished": [_dump_finished(finished) for finished in record.finished.values()],
    }


def _load_record(plain: Plain) -> RequestRecord:
    record = RequestRecord(*(plain[name] for name in RECORD_SCALARS))
    record.live.update((candidate, sequence_id) for candidate, sequence_id in plain["live"])
    for fields in plain["finished"]:
        finished = _load_finished(record.request_id, *fields)
        record.finished[finished.candidate] = finished
    return record


def _dump_finished(finished: FinishedSequence) -> list[Any]:
    return [
        finished.sequence_id,
        finished.candidate,
        _column(finished.token_ids),
        finished.num_prompt_tokens,
        finished.num_computed_tokens,
        finished.table_version,
        int(finished.finish_reason),
        finished.scheduler_state,
    ]


def _load_finished(
    request_id: str, sequence_id: int, candidate: int, token_ids: list[Any], *rest: Any
) -> FinishedSequence:
    num_prompt, num_computed, table_version, reason, scheduler_state = rest
    return FinishedSequence(
        sequence_id,
        request_id,
        candidate,
        _array(token_ids),
        num_prompt,
        num_computed,
        table_version,
        b.FinishReason(reason),
        scheduler_state,
    )


# --- sequences -------------------------------------------------------------------------


def _dump_sequences(table: SequenceTable) -> Plain:
    """Tokens and block tables are those of the live rows, one after the other."""
    rows = table.live_rows()
    tokens = [table.tokens[row, : table.length[row]] for row in rows]
    blocks = [table.tables[row, : table.table_len[row]] for row in rows]
    return {
        "rows": _column(rows.astype(np.int32)),
        **{name: _column(getattr(table, name)[rows]) for name in ROW_COLUMNS},
        "tokens": _column(np.concatenate([b.NO_INT32, *tokens])),
        "tables": _column(np.concatenate([b.NO_INT32, *blocks])),
        # Of which domain they are stands in the records.
        "chains": [
            [row, one.key, one.serial, one.is_foreign] for row, one in sorted(table.chains.items())
        ],
        "long_states": [[row, state] for row, state in sorted(table.long_states.items())],
        "generation": _column(np.array(table._generation, np.uint64)),
        "free_rows": _column(np.array(table._free_rows, np.int32)),
        "num_given_finished": table._num_given_finished,
    }


def _load_sequences(table: SequenceTable, plain: Plain) -> None:
    rows = _array(plain["rows"])
    for name in ROW_COLUMNS:
        getattr(table, name)[rows] = _array(plain[name])
    _fill(table.tokens, rows, table.length, _array(plain["tokens"]))
    _fill(table.tables, rows, table.table_len, _array(plain["tables"]))
    table.long_states = {row: state for row, state in plain["long_states"]}
    table._generation = _array(plain["generation"]).tolist()
    table._free_rows = _array(plain["free_rows"]).tolist()
    table._num_given_finished = plain["num_given_finished"]


def _fill(matrix: b.Column, rows: b.Column, lengths: b.Column, values: b.Column) -> None:
    """Cut `values` into the beginnings of the matrix's `rows`."""
    start = 0
    for row in rows.tolist():
        length = int(lengths[row])
        matrix[row, :length] = values[start : start + length]
        start += length
    assert start == values.size, f"{values.size} values for {start} cells"


# --- blocks ----------------------------------------------------------------------------


def _dump_pool(pool: BlockPool) -> Plain:
    return {
        **_scalars(pool, POOL_SCALARS),
        "ref_counts": _column(pool.ref_counts[: pool.num_ever_used]),
        "returned": _column(pool.free_blocks()),
        "num_blocks_of": _column(pool.num_blocks_of),
        # Of blocks that nobody holds it does not matter.
        "tenants": _column(pool._tenants[np.flatnonzero(pool.ref_counts[: pool.num_ever_used])]),
        # As it lies: the order in which blocks come back is the order they are given out in.
        # Those taken out of it meanwhile are left out.
        "quarantine": [
            [step, [_stamped(pool, *one) for one in held if pool._still_there(*one).size]]
            for step, held in pool._quarantine.items()
        ],
        "probation": _dump_queue(pool, pool._evictable.probation),
        "protected": _dump_queue(pool, pool._evictable.protected),
        "was_found": _column(
            np.flatnonzero(pool._evictable.was_found[: pool.num_ever_used]).astype(np.int32)
        ),
        "cache": _dump_cache(pool),
        "copies": [[step, _pairs(copies)] for step, copies in pool._copies.items()],
        "pending": _pairs(pool._pending),
    }


def _stamped(pool: BlockPool, stamp: int, blocks: b.Column) -> list[Any]:
    return [stamp, _column(pool._still_there(stamp, blocks))]


def _pairs(copies: dict[int, int]) -> list[list[int]]:
    return [[dst, src] for dst, src in copies.items()]


def _load_pool(pool: BlockPool, plain: Plain) -> None:
    _set_scalars(pool, POOL_SCALARS, plain)
    pool.ref_counts[: pool.num_ever_used] = _array(plain["ref_counts"])
    pool._returned[: pool._num_returned] = _array(plain["returned"])
    pool.num_blocks_of = _array(plain["num_blocks_of"]).astype(np.int64)
    in_use = np.flatnonzero(pool.ref_counts[: pool.num_ever_used])
    pool._tenants[in_use] = _array(plain["tenants"])
    pool._quarantine = {
        step: [(stamp, _array(blocks)) for stamp, blocks in held]
        for step, held in plain["quarantine"]
    }
    for held in pool._quarantine.values():
        for stamp, blocks in held:
            pool._stamps[blocks] = stamp
    order = pool._evictable
    _load_queue(pool, order.probation.add, *map(_array, plain["probation"]))
    _load_queue(pool, order.protect, *map(_array, plain["protected"]))
    order.was_found[_array(plain["was_found"])] = True
    _load_cache(pool.cache, plain["cache"])
    pool._copies = {step: dict(map(tuple, pairs)) for step, pairs in plain["copies"]}
    pool._pending = dict(map(tuple, plain["pending"]))


def _dump_queue(pool: BlockPool, queue: LruQueue) -> list[list[Any]]:
    blocks = queue.blocks()
    return [_column(blocks), _column(pool._stamps[blocks])]


def _load_queue(
    pool: BlockPool, add: Callable[[int, b.Column], None], blocks: b.Column, stamps: b.Column
) -> None:
    """`blocks` in the order they are evicted in; those retired together are one after the other."""
    pool._stamps[blocks] = stamps
    pool._is_cached[blocks] = True
    for group in np.split(blocks, np.flatnonzero(np.diff(stamps)) + 1):
        if group.size:
            add(int(pool._stamps[group[0]]), group)


# --- the prefix cache ------------------------------------------------------------------


def _dump_cache(pool: BlockPool) -> Plain:
    """Of the published blocks, lowest first; the index is made of their keys."""
    cache = pool.cache
    published = np.flatnonzero(cache.serials[: pool.num_ever_used]).astype(np.int32)
    return {
        **_scalars(cache, CACHE_SCALARS),
        "counters": list(astuple(cache.counters)),
        "blocks": _column(published),
        "serials": _column(cache.serials[published]),
        "parent_serials": _column(cache.parent_serials[published]),
        "keys": b"".join(map(cache.key_of, published.tolist())),
        "tokens": _column(cache.tokens[published]),
        "domains": [[block, *astuple(one)] for block, one in sorted(cache.domains.items())],
    }


def _load_cache(cache: PrefixCache, plain: Plain) -> None:
    _set_scalars(cache, CACHE_SCALARS, plain)
    cache.counters = LookupCounters(*plain["counters"])
    published, keys = _array(plain["blocks"]), plain["keys"]
    cache.serials[published] = _array(plain["serials"])
    cache.parent_serials[published] = _array(plain["parent_serials"])
    cache.tokens[published] = _array(plain["tokens"]).reshape(-1, cache.block_size)
    cache.keys.reshape(-1, KEY_BYTES)[published] = np.frombuffer(keys, np.uint8).reshape(
        -1, KEY_BYTES
    )
    for i, block in enumerate(published.tolist()):
        cache.index[keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]] = block
    cache.domains = {block: Domain(*domain) for block, *domain in plain["domains"]}
