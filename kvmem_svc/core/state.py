"""The whole state of the memory as plain values, and back: what a snapshot holds.

`dump` gives dicts and lists of int, str, bytes, bool and None; columns of numbers are
[dtype, bytes]. Equal states give equal values in equal order, also when one of them was loaded
and went on: whatever has an order that matters (free lists, quarantine) keeps it. Caches and
scratch are left out; a test compares the attributes of every class here with what is dumped.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from kvmem_svc.core import batch as b
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Configure
from kvmem_svc.core.pins import HeldPrefix
from kvmem_svc.core.prefix_cache import Chain, Domain
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import ROW_MASK
from kvmem_svc.core.state_blocks import dump_host, dump_pool, load_host, load_pool
from kvmem_svc.core.state_plain import Plain, array, column, scalars, set_scalars
from kvmem_svc.core.state_replies import dump_ledger, load_ledger
from kvmem_svc.core.state_sequences import dump_sequences, load_sequences
from kvmem_svc.core.tenants import Quota, Tenant, Tenants

# Attributes that are dumped as they are, by the part of the state that has them.
MEMORY_SCALARS = ("max_sequences", "last_step_id", "acknowledged_step", "num_batches")
MANAGER_SCALARS = (
    *("num_preemptions", "num_expired_requests", "_next_arrival_number", "_next_pin_id"),
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
        **scalars(memory, MEMORY_SCALARS),
        "configuration": [
            memory.configuration.use_prefix_cache,
            *astuple(memory.configuration.quota),
        ],
        "ledger": dump_ledger(memory.ledger),
        "manager": None if manager is None else _dump_manager(manager),
    }


def load(plain: Plain) -> KvMemory:
    """The memory that `dump` was of. Any exception means: it was not."""
    memory = KvMemory(plain["ledger"]["kvmem_boot_id"], max_sequences=plain["max_sequences"])
    set_scalars(memory, MEMORY_SCALARS, plain)
    load_ledger(memory.ledger, plain["ledger"])
    if plain["manager"] is not None:
        memory.manager = _load_manager(memory.max_sequences, plain["manager"])
    use_prefix_cache, *quota = plain["configuration"]
    memory.configuration = Configure(use_prefix_cache, Quota(*quota))
    if memory.manager is not None:
        memory.manager.quota = memory.configuration.quota
    return memory


# --- requests --------------------------------------------------------------------------


def _dump_manager(manager: BlockManager) -> Plain:
    return {
        **scalars(manager, MANAGER_SCALARS),
        "geometry": list(astuple(manager.geometry)),
        "pool": dump_pool(manager.pool),
        "host": dump_host(manager.host),
        "sequences": dump_sequences(manager.sequences),
        "requests": [_dump_record(record) for record in manager.requests.values()],
        "tenants": _dump_tenants(manager.tenants),
        "pins": [_dump_pin(pin) for pin in manager.pins.values()],
    }


def _load_manager(max_sequences: int, plain: Plain) -> BlockManager:
    manager = BlockManager(max_sequences, b.PoolGeometry(*plain["geometry"]))
    set_scalars(manager, MANAGER_SCALARS, plain)
    load_pool(manager.pool, plain["pool"])
    load_host(manager.host, plain["host"])
    load_sequences(manager.sequences, plain["sequences"])
    _load_tenants(manager.tenants, plain["tenants"])
    for one in plain["pins"]:
        pin = _load_pin(*one)
        manager.pins[pin.pin_id] = pin
    manager.pool.cache.pinned = [pin.prefix() for pin in manager.pins.values()]
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
    columns = [column(pin.blocks), column(pin.tokens)]
    return [pin.pin_id, domain, *columns, pin.ttl_ms, pin.is_public]


def _load_pin(pin_id: int, domain: list[str], *rest: Any) -> HeldPrefix:
    blocks, tokens, ttl_ms, is_public = rest
    return HeldPrefix(pin_id, Domain(*domain), array(blocks), array(tokens), ttl_ms, is_public)


def _dump_record(record: RequestRecord) -> Plain:
    return {
        **scalars(record, RECORD_SCALARS),
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
        column(finished.token_ids),
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
        array(token_ids),
        num_prompt,
        num_computed,
        table_version,
        b.FinishReason(reason),
        scheduler_state,
    )
