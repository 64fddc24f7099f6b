"""The state codec: everything is in it, and what is loaded goes on as what was dumped."""

from __future__ import annotations

import dataclasses

import msgpack
from hypothesis import HealthCheck, given, settings

from kvmem_svc.core import batch as b
from kvmem_svc.core import mutations as m
from kvmem_svc.core import state, state_blocks, state_replies, state_sequences
from kvmem_svc.core.eviction import EvictionOrder
from kvmem_svc.core.host_tier import HostTier
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.moves import Moves, StepMoves
from kvmem_svc.core.pins import HeldPrefix
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import Chain, Domain, LookupCounters, PrefixCache
from kvmem_svc.core.records import FinishedSequence, RequestRecord
from kvmem_svc.core.sequences import SequenceTable, SwapMap
from kvmem_svc.core.session import SessionLedger
from kvmem_svc.core.tenants import Quota, Tenant, Tenants
from kvmem_svc.journal.load import pack_state, unpack_state
from tests.kvmem.journal_history import (
    GEOMETRY,
    MAX_SEQUENCES,
    Command,
    History,
    histories,
    result_bytes,
)

MANY = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def new_memory() -> KvMemory:
    return KvMemory("boot", max_sequences=MAX_SEQUENCES)


def run(drawn: list[Command]) -> tuple[History, list[m.Mutation]]:
    made: list[m.Mutation] = []
    history = History(new_memory(), lambda mutation, _: made.append(mutation))
    history.run(drawn)
    return history, made


@MANY
@given(histories)
def test_what_is_loaded_is_what_was_dumped(drawn: list[Command]) -> None:
    memory = run(drawn)[0].memory
    packed = pack_state(memory)
    again = unpack_state(packed)
    assert pack_state(again) == packed
    assert again.manager is not None
    check_integrity(again.manager)
    assert again.stats() == memory.stats()
    assert again.levels() == memory.levels()


@MANY
@given(histories, histories)
def test_it_goes_on_in_the_same_way(before: list[Command], after: list[Command]) -> None:
    """The same mutations after it: the same replies and the same state."""
    history, _ = run(before)
    again = unpack_state(pack_state(history.memory))
    replies: list[tuple[m.Mutation, m.Reply]] = []
    history.on_mutation = lambda mutation, reply: replies.append((mutation, reply))
    history.run(after)
    for mutation, reply in replies:
        other = again.commit(mutation)
        if isinstance(reply, b.BatchResult):
            assert result_bytes(other) == result_bytes(reply)
        else:
            assert other == reply
    assert pack_state(again) == pack_state(history.memory)


@MANY
@given(histories)
def test_the_reply_window_is_in_it(drawn: list[Command]) -> None:
    history, _ = run(drawn)
    again = unpack_state(pack_state(history.memory))
    kept = history.memory.ledger.replies
    newest = [sent for sent in history.sent if sent.batch.batch_seq in kept]
    assert len(newest) == len(kept)
    if history.memory.ledger.mutations_open:
        for sent in newest:
            assert result_bytes(again.commit(m.ApplyBatch(sent.batch))) == result_bytes(sent.result)
        assert pack_state(again) == pack_state(history.memory)


def test_copies_that_a_former_epoch_never_made_are_in_it() -> None:
    history, _ = run([("family", 3, 0, 1), ("takeover", 0, 0, 0)])
    memory = history.memory
    assert memory.pending_copies()
    again = unpack_state(pack_state(memory))
    assert again.pending_copies() == memory.pending_copies()
    for one in (memory, again):
        one.commit(m.GrantSession("next"))
    confirm = m.ConfirmPool(memory.ledger.worker_boot_id, GEOMETRY, memory.last_step_id)
    history.commit_mutation(confirm)
    again.commit(confirm)
    assert again.pending_copies() == memory.pending_copies() == ()
    assert pack_state(again) == pack_state(memory)


def test_a_memory_without_a_pool() -> None:
    memory = new_memory()
    memory.commit(m.GrantSession("a", "b"))
    packed = pack_state(memory)
    again = unpack_state(packed)
    assert pack_state(again) == packed
    assert again.manager is None
    assert again.ledger.session == memory.ledger.session


def test_it_holds_plain_values_alone() -> None:
    memory = run([("arrive", 5, 1, 1), ("admit", 0, 0, 1), ("decode", 1, 1, 1)])[0].memory
    assert msgpack.unpackb(msgpack.packb(state.dump(memory))) == state.dump(memory)


# --- completeness ----------------------------------------------------------------------

# Attributes that are not dumped, or under another name; and why.
ELSEWHERE = {
    KvMemory: {
        "ledger": "its own part",
        "manager": "its own part",
        "configuration": "its own part",
        "_checked_at": "when to check; changes nothing",
        "_carry_out": "methods",
    },
    SessionLedger: {"session": "its own part", "replies": "its own part"},
    BlockManager: {
        "geometry": "its own part",
        "pool": "its own part",
        "host": "its own part",
        "sequences": "its own part",
        "requests": "its own part",
        "tenants": "its own part",
        "pins": "its own part",
        "quota": "of the configuration",
        "_effects": "scratch of one batch",
        "_filled": "empty: dump publishes it",
        "_carry_out": "methods",
    },
    BlockPool: {
        "num_blocks": "in the geometry",
        "ref_counts": "as far as blocks were ever used",
        "cache": "its own part",
        "num_blocks_of": "its own part",
        "_tenants": "of the blocks in use",
        "_stamps": "of the blocks in quarantine, and with the queues",
        "_is_cached": "what is in the queues",
        "_evictable": "its own part",
        "_returned": "as returned",
        "_quarantine": "as quarantine",
        "moves": "its own part",
    },
    StepMoves: {"by_step": "its own part", "pending": "its own part"},
    HostTier: {
        "num_blocks": "in the geometry",
        "ref_counts": "as far as blocks were ever used",
        "_moves": "the pool's",
        "_returned": "as returned",
        "_quarantine": "as quarantine",
    },
    EvictionOrder: {
        "_max_protected": "from the geometry",
        "probation": "its own part",
        "protected": "its own part",
        "_is_protected": "what is in protected",
        "was_found": "its own part",
    },
    PrefixCache: {
        "block_size": "in the geometry",
        "serials": "of the published blocks",
        "parent_serials": "of the published blocks",
        "keys": "of the published blocks",
        "tokens": "of the published blocks",
        "index": "from the keys",
        "domains": "its own part",
        "counters": "its own part",
        "pinned": "from the pins",
        "_serials": "another view of it",
        "_parents": "another view of it",
        "_keys": "another view of it",
    },
    Tenants: {
        "entries": "its own part",
        "numbers": "from the entries",
        "_free": "as free",
    },
    SequenceTable: {
        "max_sequences": "of the memory",
        "block_size": "in the geometry",
        "max_model_len": "in the geometry",
        "tokens": "of the live rows",
        "tables": "of the live rows",
        "long_states": "its own part",
        "chains": "its own part",
        "swap_maps": "its own part",
        "records": "from the requests",
        "finished": "from the requests",
        "_generation": "as generation",
        "_free_rows": "as free_rows",
        "_num_given_finished": "as num_given_finished",
        "_known_ids": "a cache",
        "_known_rows": "a cache",
        "_stamps": "scratch",
        "_ordinals": "a constant",
    },
}
SCALARS = {
    KvMemory: state.MEMORY_SCALARS,
    SessionLedger: state_replies.LEDGER_SCALARS,
    BlockManager: state.MANAGER_SCALARS,
    BlockPool: state_blocks.POOL_SCALARS,
    StepMoves: state_blocks.MOVES_SCALARS,
    HostTier: state_blocks.HOST_SCALARS,
    PrefixCache: state_blocks.CACHE_SCALARS,
    SequenceTable: state_sequences.ROW_COLUMNS,
    Tenants: (),
    EvictionOrder: (),
}


def test_no_attribute_is_forgotten() -> None:
    """A new attribute of the state must be dumped, or said here why it is not."""
    manager = BlockManager(2, GEOMETRY)
    memory = new_memory()
    pool = manager.pool
    tables = (manager.sequences, manager.tenants, pool._evictable, pool.moves, manager.host)
    for part in (memory, memory.ledger, manager, pool, pool.cache, *tables):
        known = {*SCALARS[type(part)], *ELSEWHERE[type(part)]}
        assert set(vars(part)) == known, type(part).__name__


def test_no_field_is_forgotten() -> None:
    """Of what is dumped field by field; Arrived and its like have positional patterns."""
    fields = {
        RequestRecord: {*state.RECORD_SCALARS, "live", "finished"},
        FinishedSequence: {
            *("sequence_id", "request_id", "candidate", "token_ids", "num_prompt_tokens"),
            *("num_computed_tokens", "table_version", "finish_reason", "scheduler_state"),
        },
        b.BatchResult: {
            *("batch_seq", "results", "deltas", "copies", "levels"),
            *("num_allocated_blocks", "num_freed_blocks", "swap_ins", "swap_outs"),
        },
        b.OpResult: {"status", "message", "value"},
        b.TableDeltas: {"sequence_ids", "table_indices", "block_ids", "table_versions"},
        b.BlockCopies: {"src_block_ids", "dst_block_ids"},
        b.Arrived: {"sequence_id", "arrival_number", "candidate_sequence_ids"},
        b.Admitted: {"tables"},
        b.SwappedIn: {"tables"},
        Moves: {"copies", "swap_ins", "swap_outs"},
        SwapMap: {"host_blocks", "was_caching"},
        b.BlockTable: {"sequence_id", "block_ids", "table_version", "num_computed_tokens"},
        Chain: {"domain", "key", "serial", "is_foreign"},
        Domain: {"tenant", "cache_salt"},
        Tenant: {"name", "num_records", "num_sequences"},
        HeldPrefix: {"pin_id", "domain", "blocks", "tokens", "ttl_ms", "is_public"},
        m.Configure: {"use_prefix_cache", "quota"},
        Quota: {"max_blocks", "max_sequences"},
        LookupCounters: {"num_lookups", "num_hits", "num_lookup_tokens", "num_hit_tokens"},
        b.Forked: {"child_sequence_ids", "block_ids", "table_version"},
        b.Reserved: {"failed_groups", "quota_groups"},
    }
    for kind, expected in fields.items():
        assert {field.name for field in dataclasses.fields(kind)} == expected, kind.__name__
