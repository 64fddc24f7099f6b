"""Blocks of the pool and of the host tier, and the prefix cache, as plain values: see `state`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.eviction import LruQueue
from kvmem_svc.core.host_tier import HostTier
from kvmem_svc.core.moves import Moves, StepMoves
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import KEY_BYTES, Domain, LookupCounters, PrefixCache
from kvmem_svc.core.state_plain import (
    Plain,
    array,
    column,
    mapping,
    pairs,
    scalars,
    set_scalars,
)

POOL_SCALARS = (
    *("num_in_use", "num_quarantined", "peak_in_use", "num_allocations", "num_freed"),
    *("num_copies_on_write", "num_evictions", "_num_returned", "_num_ever_used", "_last_stamp"),
)
MOVES_SCALARS = ("step_id", "acknowledged_step", "pending_step")
HOST_SCALARS = (
    *("num_in_use", "num_quarantined", "num_swapped_out", "num_swapped_in", "_num_ever_used"),
)
CACHE_SCALARS = ("enabled", "num_published", "_last_serial")


def dump_pool(pool: BlockPool) -> Plain:
    return {
        **scalars(pool, POOL_SCALARS),
        "ref_counts": column(pool.ref_counts[: pool.num_ever_used]),
        "returned": column(pool.free_blocks()),
        "num_blocks_of": column(pool.num_blocks_of),
        # Of blocks that nobody holds it does not matter.
        "tenants": column(pool._tenants[np.flatnonzero(pool.ref_counts[: pool.num_ever_used])]),
        # As it lies: the order in which blocks come back is the order they are given out in.
        # Those taken out of it meanwhile are left out.
        "quarantine": [
            [step, [_stamped(pool, *one) for one in held if pool._still_there(*one).size]]
            for step, held in pool._quarantine.items()
        ],
        "probation": _dump_queue(pool, pool._evictable.probation),
        "protected": _dump_queue(pool, pool._evictable.protected),
        "was_found": column(
            np.flatnonzero(pool._evictable.was_found[: pool.num_ever_used]).astype(np.int32)
        ),
        "cache": _dump_cache(pool),
        "moves": _dump_moves(pool.moves),
    }


def _stamped(pool: BlockPool, stamp: int, blocks: b.Column) -> list[Any]:
    return [stamp, column(pool._still_there(stamp, blocks))]


def load_pool(pool: BlockPool, plain: Plain) -> None:
    set_scalars(pool, POOL_SCALARS, plain)
    pool.ref_counts[: pool.num_ever_used] = array(plain["ref_counts"])
    pool._returned[: pool._num_returned] = array(plain["returned"])
    pool.num_blocks_of = array(plain["num_blocks_of"]).astype(np.int64)
    in_use = np.flatnonzero(pool.ref_counts[: pool.num_ever_used])
    pool._tenants[in_use] = array(plain["tenants"])
    pool._quarantine = {
        step: [(stamp, array(blocks)) for stamp, blocks in held]
        for step, held in plain["quarantine"]
    }
    for held in pool._quarantine.values():
        for stamp, blocks in held:
            pool._stamps[blocks] = stamp
    order = pool._evictable
    _load_queue(pool, order.probation.add, *map(array, plain["probation"]))
    _load_queue(pool, order.protect, *map(array, plain["protected"]))
    order.was_found[array(plain["was_found"])] = True
    _load_cache(pool.cache, plain["cache"])
    _load_moves(pool.moves, plain["moves"])


def _dump_queue(pool: BlockPool, queue: LruQueue) -> list[list[Any]]:
    blocks = queue.blocks()
    return [column(blocks), column(pool._stamps[blocks])]


def _load_queue(
    pool: BlockPool, add: Callable[[int, b.Column], None], blocks: b.Column, stamps: b.Column
) -> None:
    """`blocks` in the order they are evicted in; those retired together are one after the other."""
    pool._stamps[blocks] = stamps
    pool._is_cached[blocks] = True
    for group in np.split(blocks, np.flatnonzero(np.diff(stamps)) + 1):
        if group.size:
            add(int(pool._stamps[group[0]]), group)


# --- the host tier, and what steps do with both ----------------------------------------


def dump_host(host: HostTier) -> Plain:
    return {
        **scalars(host, HOST_SCALARS),
        "ref_counts": column(host.ref_counts[: host.num_ever_used]),
        "returned": column(host.free_blocks()),
        "quarantine": [[step, list(map(column, held))] for step, held in host._quarantine.items()],
    }


def load_host(host: HostTier, plain: Plain) -> None:
    set_scalars(host, HOST_SCALARS, plain)
    host.ref_counts[: host.num_ever_used] = array(plain["ref_counts"])
    host._returned = array(plain["returned"]).tolist()
    host._quarantine = {step: list(map(array, held)) for step, held in plain["quarantine"]}


def _dump_moves(moves: StepMoves) -> Plain:
    return {
        **scalars(moves, MOVES_SCALARS),
        "by_step": [[step, _dump_step(one)] for step, one in moves.by_step.items()],
        "pending": _dump_step(moves.pending),
    }


def _load_moves(moves: StepMoves, plain: Plain) -> None:
    set_scalars(moves, MOVES_SCALARS, plain)
    moves.by_step = {step: Moves(*map(mapping, one)) for step, one in plain["by_step"]}
    moves.pending = Moves(*map(mapping, plain["pending"]))


def _dump_step(moves: Moves) -> list[list[list[int]]]:
    return [pairs(moves.copies), pairs(moves.swap_ins), pairs(moves.swap_outs)]


# --- the prefix cache ------------------------------------------------------------------


def _dump_cache(pool: BlockPool) -> Plain:
    """Of the published blocks, lowest first; the index is made of their keys."""
    cache = pool.cache
    published = np.flatnonzero(cache.serials[: pool.num_ever_used]).astype(np.int32)
    return {
        **scalars(cache, CACHE_SCALARS),
        "counters": list(astuple(cache.counters)),
        "blocks": column(published),
        "serials": column(cache.serials[published]),
        "parent_serials": column(cache.parent_serials[published]),
        "keys": b"".join(map(cache.key_of, published.tolist())),
        "tokens": column(cache.tokens[published]),
        "domains": [[block, *astuple(one)] for block, one in sorted(cache.domains.items())],
    }


def _load_cache(cache: PrefixCache, plain: Plain) -> None:
    set_scalars(cache, CACHE_SCALARS, plain)
    cache.counters = LookupCounters(*plain["counters"])
    published, keys = array(plain["blocks"]), plain["keys"]
    cache.serials[published] = array(plain["serials"])
    cache.parent_serials[published] = array(plain["parent_serials"])
    cache.tokens[published] = array(plain["tokens"]).reshape(-1, cache.block_size)
    cache.keys.reshape(-1, KEY_BYTES)[published] = np.frombuffer(keys, np.uint8).reshape(
        -1, KEY_BYTES
    )
    for i, block in enumerate(published.tolist()):
        cache.index[keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]] = block
    cache.domains = {block: Domain(*domain) for block, *domain in plain["domains"]}
