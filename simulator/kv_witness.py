"""Sees the memory service and the worker at once, and knows every request: whether what is cached
is what it is taken for, and for whom.

A slot's tag names the tokens it was computed from. So a cached block is right when its slots have
the tags of the tokens that it is published for, at the moment when it is published and whenever it
is found. Whose it is stands beside the tags, block by block; who may read what was computed for
others follows from the public pins alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvmem_svc.core import batch as kv
from kvmem_svc.core import mutations
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.pool import BlockPool
from kvmem_svc.core.prefix_cache import ROOT_SERIAL, Domain
from scheduler_svc.core.sequence import Request
from simulator.admissions import Admissions
from simulator.marks import Marks
from simulator.prefix_tree import PrefixTree
from simulator.solo_runs import SoloRuns
from simulator.worker import TagWorker, Violation, expect


@dataclass(frozen=True)
class _KnownPin:
    """What an operator was told it holds; `until_ms`: at least, 0 until it is let go. `borrowed`:
    blocks that were computed for others, and found since they were public at that time."""

    domain: Domain
    tokens: tuple[int, ...]
    is_public: bool
    until_ms: int
    borrowed: frozenset[int]


class KvWitness:
    """One for a world. `enter` every request before it is sent."""

    def __init__(self, tree: PrefixTree, solo_runs: SoloRuns, marks: Marks) -> None:
        # The workers of all lives, by boot id.
        self.workers: dict[str, TagWorker] = {}
        self._tree, self._solo_runs, self._marks = tree, solo_runs, marks
        self._requests: dict[str, Request] = {}
        self._paths: dict[tuple[str, int], list[int]] = {}
        # Of a request that goes on with another one's answer: tokens of its prompt before that.
        self._asked: dict[str, int] = {}
        # Blocks of others that a request was given, from its newest admission on.
        self._lent: dict[str, set[int]] = {}
        # Of one life of the memory service and of its pool.
        self._pool: BlockPool | None = None
        self._pins: dict[int, _KnownPin] = {}
        # Distinct ones, at any time.
        self.most_pinned_blocks = 0
        self._newest_serial = self._num_evictions = 0

    # ---- requests ----

    def enter(self, request: Request, num_asked_tokens: int = 0) -> None:
        """`num_asked_tokens`: its prompt goes on from a prompt of so many, with its answer."""
        self._requests[request.request_id] = request
        self._asked[request.request_id] = num_asked_tokens

    def path(self, request_id: str, candidate: int) -> Sequence[int]:
        """As `worker.Witness` has it."""
        key = request_id, candidate
        if key not in self._paths:
            request = self._requests[request_id]
            path = [0]
            output = self._solo_runs.of(request, candidate)
            # Nobody has a use for the KV of the last one: that it is, is known beforehand. Of an
            # eos it is not.
            output = output[: request.params.max_tokens - 1]
            for token in (*request.prompt_token_ids, *output):
                path.append(self._tree.extend(path[-1], token))
            self._paths[key] = path
        return self._paths[key]

    def domain(self, request_id: str) -> tuple[str, str]:
        """As `worker.Witness` has it."""
        request = self._requests[request_id]
        return request.tenant, request.cache_salt

    def may_read(self, request_id: str, block_id: int) -> bool:
        """As `worker.Witness` has it."""
        return block_id in self._lent.get(request_id, ())

    # ---- what the memory service does ----

    def on_started(self, memory: KvMemory) -> None:
        """A life of the memory service begins: everything that is published is looked at again."""
        if not memory.num_batches:
            self._pins.clear()
        self._pool = None
        self._look_at(memory)

    def on_recorded(
        self,
        memory: KvMemory,
        mutation: mutations.Mutation,
        reply: mutations.Reply,
        now_ms: int,
        *,
        is_asked_for: bool,
    ) -> None:
        """A mutation was carried out and journalled; somebody asked for it, or its time came."""
        manager = memory.manager
        match mutation, reply:
            case mutations.Pin(), mutations.Pinned():
                self._on_pinned(memory, mutation, reply, now_ms)
            case mutations.Unpin(pin_id), _:
                pin = self._pins.pop(pin_id, None)
                if pin is not None and not is_asked_for:
                    self._on_pin_ended(pin, now_ms)
            case mutations.ConfirmPool(), mutations.PoolConfirmed(is_new_pool=True):
                self._pins.clear()
            case mutations.Configure(use_prefix_cache=False), _:
                self._pins.clear()
                self._marks.hit("cache switched off", manager is not None)
        self._look_at(memory)
        if isinstance(mutation, mutations.ApplyBatch) and isinstance(reply, kv.BatchResult):
            assert manager is not None
            worker = self.workers[memory.ledger.worker_boot_id]
            Admissions(self, manager, worker, reply).check(mutation.batch)
            for block_id in reply.deltas.block_ids.tolist():
                worker.forget_block(block_id)
            for block_id in reply.swap_outs.dst_block_ids.tolist():
                worker.forget_host_block(block_id)
        if manager is not None:
            pinned = {block for pin in manager.pins.values() for block in pin.blocks.tolist()}
            self.most_pinned_blocks = max(self.most_pinned_blocks, len(pinned))
            self._check_pins(manager)
            self._check_quotas(manager)

    def _on_pinned(
        self, memory: KvMemory, pin: mutations.Pin, reply: mutations.Pinned, now_ms: int
    ) -> None:
        if not reply.pin_id:
            return
        self._marks.hit("prefix pinned")
        assert memory.manager is not None
        blocks: list[int] = memory.manager.pins[reply.pin_id].blocks.tolist()
        domains = self.workers[memory.ledger.worker_boot_id].domains
        own = pin.domain.tenant, pin.domain.cache_salt
        tokens = tuple(pin.token_ids[: reply.num_pinned_tokens].tolist())
        borrowed = [i for i, block in enumerate(blocks) if domains.get(block, own) != own]
        num_borrowed_tokens = (borrowed[-1] + 1 if borrowed else 0) * len(tokens) // len(blocks)
        expect(
            self.may_find(own, tokens[:num_borrowed_tokens]),
            "tenants are apart",
            f"{own} pins {num_borrowed_tokens} tokens that were computed for others",
        )
        self._pins[reply.pin_id] = _KnownPin(
            pin.domain,
            tokens,
            pin.is_public,
            now_ms + pin.ttl_ms if pin.ttl_ms else 0,
            frozenset(blocks[i] for i in borrowed),
        )

    def _on_pin_ended(self, pin: _KnownPin, now_ms: int) -> None:
        self._marks.hit("pin expired")
        expect(
            0 < pin.until_ms <= now_ms,
            "pins hold",
            f"a pin ended at {now_ms} ms, it was to hold until {pin.until_ms or 'it is let go'}",
        )

    def _check_pins(self, manager: BlockManager) -> None:
        for pin in self._pins.values():
            num_cached = manager.num_cached_tokens(pin.domain, np.array(pin.tokens, np.int32))
            expect(
                num_cached >= len(pin.tokens),
                "pins hold",
                f"of {len(pin.tokens)} pinned tokens {num_cached} are cached",
            )

    def _check_quotas(self, manager: BlockManager) -> None:
        """What only a tenant's own sequences and pins hold is within its quota, and so are they.

        What was lent counts for whoever had it first, also once nobody else has it any more.
        """
        quota, table = manager.quota, manager.sequences
        if not (quota.max_blocks or quota.max_sequences):
            return
        holders: dict[int, set[str]] = {}
        num_sequences: dict[str, int] = {}
        for row in table.live_rows().tolist():
            tenant = table.record_of(row).tenant
            num_sequences[tenant] = num_sequences.get(tenant, 0) + 1
            _note_holders(holders, table.table(row).tolist(), tenant)
        for pin in manager.pins.values():
            _note_holders(holders, pin.blocks.tolist(), pin.domain.tenant)
        lent = set().union(
            *(self._lent.get(name, ()) for name in manager.requests),
            *(pin.borrowed for pin in self._pins.values()),
        )
        owned = [next(iter(t)) for block, t in holders.items() if len(t) == 1 and block not in lent]
        num_blocks = {tenant: owned.count(tenant) for tenant in sorted(set(owned))}
        for what, most, counts in (
            ("blocks", quota.max_blocks, num_blocks),
            ("sequences", quota.max_sequences, num_sequences),
        ):
            for tenant, count in counts.items():
                expect(
                    not most or count <= most,
                    "quotas hold",
                    f"tenant {tenant!r} has {count} {what}, its quota is {most}",
                )

    def pins_that_cover(self, tokens: Sequence[int], *, public: bool) -> list[_KnownPin]:
        """Pins that begin with `tokens`."""
        wanted = tuple(tokens)
        return [
            pin
            for pin in self._pins.values()
            if pin.is_public == public and pin.tokens[: len(wanted)] == wanted
        ]

    def may_find(self, domain: tuple[str, str], tokens: Sequence[int]) -> bool:
        """Whether requests of a domain may find tokens that were computed for others: those that
        are pinned publicly, or by the domain itself, since they were."""
        own = Domain(*domain)
        mine = [pin for pin in self.pins_that_cover(tokens, public=False) if pin.domain == own]
        return not tokens or bool(mine or self.pins_that_cover(tokens, public=True))

    # ---- what is published ----

    def _look_at(self, memory: KvMemory) -> None:
        """Check what was published since the last time."""
        manager = memory.manager
        if manager is None:
            return
        pool = manager.pool
        if pool is not self._pool:
            self._pool, self._newest_serial, self._num_evictions = pool, 0, pool.num_evictions
        self._marks.hit("evicted", pool.num_evictions - self._num_evictions)
        self._num_evictions = pool.num_evictions
        serials = pool.cache.serials[: pool.num_ever_used]
        fresh = np.flatnonzero(serials > self._newest_serial).tolist()
        if fresh:
            worker = self.workers[memory.ledger.worker_boot_id]
            by_serial = {int(serials[block]): block for block in np.flatnonzero(serials).tolist()}
            for block in fresh:
                self._check_published(pool, worker, block, by_serial)
            self._newest_serial = int(serials.max())

    def _check_published(
        self, pool: BlockPool, worker: TagWorker, block: int, by_serial: dict[int, int]
    ) -> None:
        """A block that has entered the cache is full, of its tokens, after what it comes after."""
        cache, size = pool.cache, worker.block_size
        prefix = worker.slots.get((block + 1) * size - 1, 0)
        for offset in range(size - 1, -1, -1):
            tag = worker.slots.get(block * size + offset)
            wanted = int(cache.tokens[block, offset])
            if not tag or tag != prefix or self._tree.last_token(tag) != wanted:
                raise Violation(
                    "published blocks are filled",
                    f"block {block} is published with {cache.tokens[block].tolist()}, its slot"
                    f" {offset} has {self._tree.tokens(tag) if tag else 'nothing'}",
                )
            prefix = self._tree.parents[tag]
        parent = int(cache.parent_serials[block])
        if parent == ROOT_SERIAL:
            right = prefix == 0
        else:
            before = by_serial.get(parent)
            right = before is None or worker.slots.get((before + 1) * size - 1) == prefix
        expect(
            right,
            "published blocks are filled",
            f"block {block} has the KV of {self._tree.tokens(prefix)} and what comes after, and is"
            f" published after serial {parent}, block {by_serial.get(parent)}",
        )

    # ---- what is found ----

    def lend(self, request_id: str, blocks: set[int]) -> None:
        """What a request reads that was computed for others; it may until it is admitted again."""
        self._lent[request_id] = blocks

    def count_hit(self, request_id: str, length: int, found: int) -> None:
        """A request of `length` tokens was admitted, with `found` of them there already."""
        marks, request = self._marks, self._requests[request_id]
        num_prompt_tokens = len(request.prompt_token_ids)
        marks.hit("prefix found")
        marks.hit("prefix found to its end", found == length - 1)
        marks.hit("hit across turns", 0 < self._asked[request_id] < found)
        marks.hit("resumed from the cache", length > num_prompt_tokens)
        tokens = request.prompt_token_ids[:found]
        own = Domain(request.tenant, request.cache_salt)
        pinned = self.pins_that_cover(tokens, public=False)
        marks.hit("hit on a pinned prefix", any(pin.domain == own for pin in pinned))
        marks.hit("hit on a public pin", bool(self._lent.get(request_id)))

    def count_miss(self, request_id: str, manager: BlockManager) -> None:
        """Nothing was found; somebody else may have it cached."""
        request = self._requests[request_id]
        tokens = np.array(request.prompt_token_ids, np.int32)
        own = request.tenant, request.cache_salt
        others = {(one.tenant, one.cache_salt) for one in self._requests.values()} - {own}
        self._marks.hit(
            "another's prefix not found",
            any(manager.num_cached_tokens(Domain(*other), tokens) for other in sorted(others)),
        )


def _note_holders(holders: dict[int, set[str]], blocks: Iterable[int], tenant: str) -> None:
    for block in blocks:
        holders.setdefault(block, set()).add(tenant)
