"""Bugs to plant in the memory service."""

from __future__ import annotations

from simulator.mutant import mutant

POOL = "kvmem_svc.core.pool"
SLOTS = "kvmem_svc.core.slots"
SESSION = "kvmem_svc.core.session"
FORK = "kvmem_svc.core.fork"
MOVES = "kvmem_svc.core.moves"
MEMORY = "kvmem_svc.core.memory"
GATEKEEPER = "kvmem_svc.core.gatekeeper"
STATE = "kvmem_svc.core.state_replies"
MANAGER = "kvmem_svc.core.manager"
HOST_TIER = "kvmem_svc.core.host_tier"
SWAPS = "kvmem_svc.core.swaps"
SEQUENCES = "kvmem_svc.core.sequences"
STATE_SEQUENCES = "kvmem_svc.core.state_sequences"
PINS = "kvmem_svc.core.pins"
QUOTAS = "kvmem_svc.core.quotas"
ADMISSION = "kvmem_svc.core.admission"
PREFIX_CACHE = "kvmem_svc.core.prefix_cache"
PUBLICATION = "kvmem_svc.core.publication"

KVMEM_MUTANTS = (
    # The memory service.
    mutant(
        "a freed block skips the quarantine",
        (POOL, "        if moves.nothing_in_flight:", "        if True:"),
    ),
    mutant(
        "quarantine ends a step too early",
        (
            POOL,
            "in self._quarantine if step <= acknowledged_step]",
            "in self._quarantine if step <= acknowledged_step + 1]",
        ),
    ),
    mutant(
        "blocks of a copy under way are not held",
        (POOL, "        if touched.size:", "        if False:"),
    ),
    mutant(
        "fork without references",
        (FORK, "pool.reference(blocks, op.num_children)", "pool.reference(blocks, 0)"),
    ),
    mutant(
        "no copy on write",
        (
            SLOTS,
            "is_shared = (pool.ref_counts[block_id] > 1) |",
            "is_shared = (pool.ref_counts[block_id] > 99) |",
        ),
    ),
    mutant(
        "copy on write leaves out one writer",
        (SLOTS, "pool.ref_counts[block_id] - 1 +", "pool.ref_counts[block_id] - 2 +"),
    ),
    mutant(
        "reserve forgets the table version",
        (
            SLOTS,
            "= sequences.table_version[changed_rows] + 1",
            "= sequences.table_version[changed_rows]",
        ),
    ),
    mutant(
        "a batch sent again is applied again",
        (
            SESSION,
            "if batch_seq == self.next_batch_seq:",
            "if batch_seq >= self.next_batch_seq - 1:",
        ),
    ),
    mutant(
        "kvmem checks no fence",
        (
            SESSION,
            "        if fence.kvmem_boot_id != self.kvmem_boot_id:",
            "        if self.session is not None:\n            return self.session\n"
            "        if fence.kvmem_boot_id != self.kvmem_boot_id:",
        ),
    ),
    # The memory service, taken over and recovered.
    mutant(
        "a takeover forgets the copies that nobody made",
        (MOVES, "if step > last_executed_step:", "if False:"),
    ),
    mutant(
        "blocks come back while the former session's step runs",
        (
            MEMORY,
            "        return self.ledger.grant(",
            "        if self.manager is not None:\n"
            "            self.manager.begin_step(self.last_step_id + 1, self.last_step_id)\n"
            "        return self.ledger.grant(",
        ),
    ),
    mutant(
        "mutations are open before the pool is confirmed",
        (
            GATEKEEPER,
            "return self.memory.ledger.mutations_open and not self._is_pool_provisional",
            "return self.memory.ledger.mutations_open",
        ),
        (
            GATEKEEPER,
            "        if self._is_pool_provisional:\n            raise",
            "        if False:\n            raise",
        ),
    ),
    mutant(
        "what the worker executed last is not asked",
        (MEMORY, "self._go_on_from(mutation.last_executed_step)", "self._go_on_from(0)"),
    ),
    mutant(
        "a snapshot leaves out the replies that may be asked for again",
        (STATE, "in ledger.replies.items()\n", "in ()\n"),
    ),
    mutant(
        "a batch sent again after a recovery is applied again",
        (
            STATE,
            "LEDGER_SCALARS, plain)\n",
            "LEDGER_SCALARS, plain)\n"
            '    ledger.next_batch_seq = max(1, plain["next_batch_seq"] - 1)\n',
        ),
    ),
    # The memory service's prefix cache.
    mutant(
        "cached blocks are found whatever the tenant",
        (PREFIX_CACHE, "tenant, salt = self.tenant.encode(),", 'tenant, salt = b"",'),
        (PREFIX_CACHE, "return self.domains.get(block) == chain.domain", "return True"),
    ),
    mutant(
        "cached blocks are found whatever the cache_salt",
        (PREFIX_CACHE, '"little") + tenant + salt', '"little") + tenant'),
        (
            PREFIX_CACHE,
            "return self.domains.get(block) == chain.domain",
            "return block in self.domains and self.domains[block].tenant == chain.domain.tenant",
        ),
    ),
    mutant(
        "a cached block is found whatever came before it",
        (PREFIX_CACHE, "return blake2b(parent + tokens,", "return blake2b(tokens,"),
        (PREFIX_CACHE, "if self._parents[block] != chain.serial or", "if"),
    ),
    mutant(
        "a key is taken for the tokens that it is of",
        (
            PREFIX_CACHE,
            "return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()",
            "return blake2b(parent + tokens, digest_size=1).digest() * KEY_BYTES",
        ),
        (PREFIX_CACHE, " or self.tokens[block].tobytes() != tokens:", ":"),
    ),
    mutant(
        "blocks are published when their tokens are known",
        (
            PUBLICATION,
            "ahead = table.num_computed[rows] - table.chained_len[rows]",
            "ahead = table.length[rows] - table.chained_len[rows]",
        ),
    ),
    mutant(
        "a child goes on with its parent's chain",
        (FORK, "chain = replace(table.chain_of(parent))", "chain = table.chain_of(parent)"),
    ),
    mutant(
        "a prompt that is found to its end is written in place",
        (ADMISSION, "        num_computed < num_filled,\n", "        False,\n"),
    ),
    mutant(
        "a prompt that is found to its end is not computed",
        (
            ADMISSION,
            "min(num_filled, _num_lookup_tokens(table, row) - 1)",
            "min(num_filled, _num_lookup_tokens(table, row))",
        ),
    ),
    mutant(
        "a cached block that is found may be evicted",
        (
            POOL,
            "            self._stamps[idle] = 0\n            self._count_for(idle, tenant)\n",
            "            self._count_for(idle, tenant)\n",
        ),
    ),
    mutant(
        "an evicted block keeps its key",
        (POOL, "        self.cache.forget(blocks)  # before", "        # before"),
    ),
    mutant(
        "a pin ends at the next look at the clock",
        (
            GATEKEEPER,
            "self._pin_ends_ms.items() if end_ms <= now_ms]",
            "self._pin_ends_ms.items()]",
        ),
    ),
    mutant(
        "every pin is public",
        (PINS, "None if self.is_public else self.domain", "None"),
    ),
    mutant(
        "a public pin is found after it was let go",
        (
            MANAGER,
            "        if pin is not None:\n            self._tell_what_is_pinned()\n",
            "        if pin is not None:\n",
        ),
    ),
    # Its host tier.
    mutant(
        "a block that is swapped out is not held until it is moved",
        (MOVES, "*self.swap_ins, *self.swap_outs.values()]", "*self.swap_ins]"),
    ),
    mutant(
        "a host block is given again before it is read",
        (
            HOST_TIER,
            "np.isin(retired, moves.touched_host_blocks())",
            "np.isin(retired, retired[:0])",
        ),
        (HOST_TIER, "        if moves.nothing_in_flight:\n", "        if True:\n"),
    ),
    mutant(
        "a host block counts for one of those that share it",
        (SWAPS, "host.allocate(plan.num_holders)", "host.allocate(np.ones_like(plan.num_holders))"),
    ),
    mutant(
        "candidates that come back write to what they share",
        (SWAPS, "< shared[places[writes]] - 1]", "< shared[places[writes]] - 2]"),
    ),
    mutant(
        "a snapshot leaves out where the swapped ones are",
        (STATE_SEQUENCES, "in sorted(table.swap_maps.items())\n", "in ()\n"),
    ),
    mutant(
        "what was swapped out outlives its worker",
        (SEQUENCES, "        self.swap_maps.clear()\n        self.tables", "        self.tables"),
    ),
    mutant(
        "a takeover forgets the swaps that nobody made",
        (MOVES, "        if later.swap_outs:\n", "        if False:\n"),
    ),
    # Its quotas.
    mutant(
        "a tenant is given a block more than its quota",
        (
            QUOTAS,
            "if count and current + count > limit:",
            "if count and current + count > limit + 1:",
        ),
        (QUOTAS, "((current + needed > limit) &", "((current + needed > limit + 1) &"),
    ),
    mutant(
        "a tenant is refused the last blocks of its quota",
        (
            QUOTAS,
            "if count and current + count > limit:",
            "if count and current + count > limit - 2:",
        ),
    ),
    mutant(
        "a tenant has a sequence more than its quota",
        (QUOTAS, "current + count <= limit:", "current + count <= limit + 1:"),
    ),
)
