"""Proof that the simulator bites: known bugs are planted, one at a time, and each must be found.

`python -m simulator.mutants` prints a table (mutant, seed that found it, by which check) and
exits 1 when one survives. A mutant is a few substitutions in the source of a core; one
that matches nothing, or more than one place, is an error. Each runs in a process of its own, where
the changed source is compiled in place of the real one.

Nothing here may import a core before the changed source is in place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated

import typer

MAX_SEEDS = 300
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Edit:
    """In the source of `module`, `old` becomes `new`; `old` must stand there exactly once."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A bug, in words, and the edits that make it."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Find:
    """`seed` None: the mutant survived."""

    name: str
    seed: int | None
    check: str = ""
    violation: str = ""


class MutationError(Exception):
    """An edit does not fit the source."""


POOL = "kvmem_svc.core.pool"
SLOTS = "kvmem_svc.core.slots"
SESSION = "kvmem_svc.core.session"
FORK = "kvmem_svc.core.fork"
MOVES = "kvmem_svc.core.moves"
MEMORY = "kvmem_svc.core.memory"
GATEKEEPER = "kvmem_svc.core.gatekeeper"
STATE = "kvmem_svc.core.state_replies"
MACHINE = "scheduler_svc.core.machine"
POLICY = "scheduler_svc.core.policy"
PLANNER = "scheduler_svc.core.planner"
STEPPER = "scheduler_svc.core.stepper"
ADOPTION = "scheduler_svc.core.adoption"
DELIVERY = "scheduler_svc.core.delivery"
MIRROR = "scheduler_svc.core.worker_mirror"
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
OUTCOME = "scheduler_svc.core.step_outcome"
SEQUENCE = "scheduler_svc.core.sequence"
FENCING = "model_worker.fencing"


def _mutant(name: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits))


MUTANTS = (
    # The memory service.
    _mutant(
        "a freed block skips the quarantine",
        (POOL, "        if moves.nothing_in_flight:", "        if True:"),
    ),
    _mutant(
        "quarantine ends a step too early",
        (
            POOL,
            "in self._quarantine if step <= acknowledged_step]",
            "in self._quarantine if step <= acknowledged_step + 1]",
        ),
    ),
    _mutant(
        "blocks of a copy under way are not held",
        (POOL, "        if touched.size:", "        if False:"),
    ),
    _mutant(
        "fork without references",
        (FORK, "pool.reference(blocks, op.num_children)", "pool.reference(blocks, 0)"),
    ),
    _mutant(
        "no copy on write",
        (
            SLOTS,
            "is_shared = (pool.ref_counts[block_id] > 1) |",
            "is_shared = (pool.ref_counts[block_id] > 99) |",
        ),
    ),
    _mutant(
        "copy on write leaves out one writer",
        (SLOTS, "pool.ref_counts[block_id] - 1 +", "pool.ref_counts[block_id] - 2 +"),
    ),
    _mutant(
        "reserve forgets the table version",
        (
            SLOTS,
            "= sequences.table_version[changed_rows] + 1",
            "= sequences.table_version[changed_rows]",
        ),
    ),
    _mutant(
        "a batch sent again is applied again",
        (
            SESSION,
            "if batch_seq == self.next_batch_seq:",
            "if batch_seq >= self.next_batch_seq - 1:",
        ),
    ),
    _mutant(
        "kvmem checks no fence",
        (
            SESSION,
            "        if fence.kvmem_boot_id != self.kvmem_boot_id:",
            "        if self.session is not None:\n            return self.session\n"
            "        if fence.kvmem_boot_id != self.kvmem_boot_id:",
        ),
    ),
    # The memory service, taken over and recovered.
    _mutant(
        "a takeover forgets the copies that nobody made",
        (MOVES, "if step > last_executed_step:", "if False:"),
    ),
    _mutant(
        "blocks come back while the former session's step runs",
        (
            MEMORY,
            "        return self.ledger.grant(",
            "        if self.manager is not None:\n"
            "            self.manager.begin_step(self.last_step_id + 1, self.last_step_id)\n"
            "        return self.ledger.grant(",
        ),
    ),
    _mutant(
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
    _mutant(
        "what the worker executed last is not asked",
        (MEMORY, "self._go_on_from(mutation.last_executed_step)", "self._go_on_from(0)"),
    ),
    _mutant(
        "a snapshot leaves out the replies that may be asked for again",
        (STATE, "in ledger.replies.items()\n", "in ()\n"),
    ),
    _mutant(
        "a batch sent again after a recovery is applied again",
        (
            STATE,
            "LEDGER_SCALARS, plain)\n",
            "LEDGER_SCALARS, plain)\n"
            '    ledger.next_batch_seq = max(1, plain["next_batch_seq"] - 1)\n',
        ),
    ),
    # The memory service's prefix cache.
    _mutant(
        "cached blocks are found whatever the tenant",
        (PREFIX_CACHE, "tenant, salt = self.tenant.encode(),", 'tenant, salt = b"",'),
        (PREFIX_CACHE, "return self.domains.get(block) == chain.domain", "return True"),
    ),
    _mutant(
        "cached blocks are found whatever the cache_salt",
        (PREFIX_CACHE, '"little") + tenant + salt', '"little") + tenant'),
        (
            PREFIX_CACHE,
            "return self.domains.get(block) == chain.domain",
            "return block in self.domains and self.domains[block].tenant == chain.domain.tenant",
        ),
    ),
    _mutant(
        "a cached block is found whatever came before it",
        (PREFIX_CACHE, "return blake2b(parent + tokens,", "return blake2b(tokens,"),
        (PREFIX_CACHE, "if self._parents[block] != chain.serial or", "if"),
    ),
    _mutant(
        "a key is taken for the tokens that it is of",
        (
            PREFIX_CACHE,
            "return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()",
            "return blake2b(parent + tokens, digest_size=1).digest() * KEY_BYTES",
        ),
        (PREFIX_CACHE, " or self.tokens[block].tobytes() != tokens:", ":"),
    ),
    _mutant(
        "blocks are published when their tokens are known",
        (
            PUBLICATION,
            "ahead = table.num_computed[rows] - table.chained_len[rows]",
            "ahead = table.length[rows] - table.chained_len[rows]",
        ),
    ),
    _mutant(
        "a child goes on with its parent's chain",
        (FORK, "chain = replace(table.chain_of(parent))", "chain = table.chain_of(parent)"),
    ),
    _mutant(
        "a prompt that is found to its end is written in place",
        (ADMISSION, "        num_computed < num_filled,\n", "        False,\n"),
    ),
    _mutant(
        "a prompt that is found to its end is not computed",
        (
            ADMISSION,
            "min(num_filled, _num_lookup_tokens(table, row) - 1)",
            "min(num_filled, _num_lookup_tokens(table, row))",
        ),
    ),
    _mutant(
        "a cached block that is found may be evicted",
        (
            POOL,
            "            self._stamps[idle] = 0\n            self._count_for(idle, tenant)\n",
            "            self._count_for(idle, tenant)\n",
        ),
    ),
    _mutant(
        "an evicted block keeps its key",
        (POOL, "        self.cache.forget(blocks)  # before", "        # before"),
    ),
    _mutant(
        "a pin ends at the next look at the clock",
        (
            GATEKEEPER,
            "self._pin_ends_ms.items() if end_ms <= now_ms]",
            "self._pin_ends_ms.items()]",
        ),
    ),
    _mutant(
        "every pin is public",
        (PINS, "None if self.is_public else self.domain", "None"),
    ),
    _mutant(
        "a public pin is found after it was let go",
        (
            MANAGER,
            "        if pin is not None:\n            self._tell_what_is_pinned()\n",
            "        if pin is not None:\n",
        ),
    ),
    # Its host tier.
    _mutant(
        "a block that is swapped out is not held until it is moved",
        (MOVES, "*self.swap_ins, *self.swap_outs.values()]", "*self.swap_ins]"),
    ),
    _mutant(
        "a host block is given again before it is read",
        (
            HOST_TIER,
            "np.isin(retired, moves.touched_host_blocks())",
            "np.isin(retired, retired[:0])",
        ),
        (HOST_TIER, "        if moves.nothing_in_flight:\n", "        if True:\n"),
    ),
    _mutant(
        "a host block counts for one of those that share it",
        (SWAPS, "host.allocate(plan.num_holders)", "host.allocate(np.ones_like(plan.num_holders))"),
    ),
    _mutant(
        "candidates that come back write to what they share",
        (SWAPS, "< shared[places[writes]] - 1]", "< shared[places[writes]] - 2]"),
    ),
    _mutant(
        "a snapshot leaves out where the swapped ones are",
        (STATE_SEQUENCES, "in sorted(table.swap_maps.items())\n", "in ()\n"),
    ),
    _mutant(
        "what was swapped out outlives its worker",
        (SEQUENCES, "        self.swap_maps.clear()\n        self.tables", "        self.tables"),
    ),
    _mutant(
        "a takeover forgets the swaps that nobody made",
        (MOVES, "        if later.swap_outs:\n", "        if False:\n"),
    ),
    # Its quotas.
    _mutant(
        "a tenant is given a block more than its quota",
        (
            QUOTAS,
            "if count and current + count > limit:",
            "if count and current + count > limit + 1:",
        ),
        (QUOTAS, "((current + needed > limit) &", "((current + needed > limit + 1) &"),
    ),
    _mutant(
        "a tenant is refused the last block of its quota",
        (QUOTAS, "if count and current + count > limit:", "if count and current + count >= limit:"),
    ),
    _mutant(
        "a tenant has a sequence more than its quota",
        (QUOTAS, "current + count <= limit:", "current + count <= limit + 1:"),
    ),
    # The worker.
    _mutant(
        "the worker checks no epoch",
        (FENCING, "if fence.epoch < newest.epoch:", "if False:"),
        (FENCING, "        return fence.epoch > newest.epoch", "        return fence != newest"),
    ),
    _mutant(
        "the worker checks no boot id of its own",
        (FENCING, "if fence.worker_boot_id != self.worker_boot_id:", "if False:"),
    ),
    # The scheduler.
    _mutant(
        "tokens are shown before kvmem has them",
        (
            STEPPER,
            "            self.outbox.add(outcome.commit, lambda _: self._on_committed(standing))\n",
            "            self.outbox.add(outcome.commit)\n"
            "            self._on_committed(standing)\n",
        ),
    ),
    _mutant(
        "a resumed candidate does not wait for its prefix",
        (PLANNER, "return source.num_scheduled_tokens + in_step >=", "return True or in_step >="),
    ),
    _mutant(
        "preemption splits a group",
        (
            STEPPER,
            "self.outbox.add(ops.Preempt(_ids(group)))\n"
            "            for sequence in group.live:\n                sequence.forget_blocks()",
            "self.outbox.add(ops.Preempt(_ids(group)[:1]))\n"
            "            for sequence in group.live:\n                sequence.forget_blocks()",
        ),
    ),
    _mutant(
        "an abort forgets a candidate",
        (STEPPER, "        self.free(live)\n", "        self.free(live[:1])\n"),
    ),
    _mutant(
        "no reserve after a fork",
        (
            STEPPER,
            "            sequence.num_writable_slots = sequence.num_computed_tokens\n",
            "            sequence.num_writable_slots = (\n"
            "                len(sequence.block_table) * self.block_size\n            )\n",
        ),
    ),
    _mutant(
        "table deltas are sent twice",
        (
            MIRROR,
            "self._deltas, self._copies, self._dropped = [], [], []\n        self._swap_ins",
            "self._copies, self._dropped = [], []\n        self._swap_ins",
        ),
    ),
    _mutant(
        "copies of a preempted group are made",
        (MIRROR, "if self._holds(c[0], c[2])]", "]"),
    ),
    _mutant(
        "the worker is not told whom to forget",
        (MIRROR, "self._dropped.append(sequence.sequence_id)", "pass"),
    ),
    _mutant(
        "step numbers begin again with each session",
        (
            STEPPER,
            "self._last_step_id = self._acknowledged_step = connected.last_step_id",
            "self._last_step_id = self._acknowledged_step = 0",
        ),
    ),
    _mutant(
        "one is ended for want of blocks that an abort gives back",
        (STEPPER, "if not self.outbox.holds(ops.Free, ops.Fork, ops.Preempt):", "if True:"),
    ),
    _mutant(
        "what is in flight is committed as computed",
        (
            OUTCOME,
            "np.array([sequence.num_computed_tokens for",
            "np.array([sequence.num_scheduled_tokens for",
        ),
    ),
    _mutant(
        "a step has a token too many",
        (
            PLANNER,
            "num_tokens = min(sequence.num_unscheduled_tokens, tokens_left)",
            "num_tokens = min(sequence.num_unscheduled_tokens, tokens_left + 1)",
        ),
    ),
    _mutant(
        "a group too many is admitted",
        (PLANNER, "group.num_seats > seats or", "seats <= 0 or"),
    ),
    _mutant(
        "a step ahead computes a spare token",
        (
            SEQUENCE,
            "self.num_inflight_draws >= params.max_tokens",
            "self.num_inflight_draws > params.max_tokens",
        ),
    ),
    _mutant(
        "a step runs ahead of a fork",
        (SEQUENCE, "return is_last or not self.group.forked", "return is_last"),
    ),
    _mutant(
        "what was found is computed again",
        (
            MIRROR,
            "table.num_computed_tokens, 0 if is_first else num_shared_tokens",
            "0, 0 if is_first else num_shared_tokens",
        ),
    ),
    _mutant(
        "priorities count for nothing",
        (POLICY, "number - group.request.priority * ARRIVALS_PER_PRIORITY", "number"),
    ),
    _mutant(
        "the first in turn gives way",
        (POLICY, "return max(running, key=turn)", "return min(running, key=turn)"),
    ),
    _mutant(
        "whoever fits is admitted, whoever waits",
        (
            PLANNER,
            "needed + spare > free:\n                break",
            "needed + spare > free:\n                continue",
        ),
    ),
    _mutant(
        "one prompt is computed twice in a step",
        (PLANNER, "if under_way.will_serve(group) and not is_swapped:", "if False:"),
    ),
    _mutant(
        "a step with nothing but swaps is not executed",
        (STEPPER, "if rows or step.swap_ins or step.swap_outs:", "if rows:"),
    ),
    _mutant(
        "a swap is made again with the next step",
        (
            MIRROR,
            "        self._swap_ins, self._swap_outs = [], []\n        return step, rows",
            "        self._swap_ins = []\n        return step, rows",
        ),
    ),
    # The scheduler, taking over.
    _mutant(
        "swaps that a former session planned are not made",
        (
            STEPPER,
            "self.mirror.take_swaps(connected.pending_swap_ins, connected.pending_swap_outs)",
            "pass",
        ),
    ),
    _mutant(
        "a result that was kept is committed twice",
        (
            ADOPTION,
            "            sequence.num_computed_tokens == num_computed_tokens\n            and left",
            "            left",
        ),
    ),
    _mutant(
        "copies that a former session planned are not made",
        (STEPPER, "self.mirror.take_pending_copies(connected.pending_copies)", "pass"),
    ),
    _mutant(
        "an adopted candidate writes where its sibling does",
        (
            ADOPTION,
            "return max(end * block_size, sequence.num_computed_tokens)",
            "return len(sequence.block_table) * block_size",
        ),
    ),
    _mutant(
        "an adopted candidate does not wait for its prefix",
        (ADOPTION, "    find_prefix_sources(group.live, block_size)\n", ""),
    ),
    _mutant(
        "an adopted candidate that has ended keeps its blocks",
        (MACHINE, "        stepper.free(unfreed)\n", ""),
    ),
    _mutant(
        "sums of log-probabilities die with their scheduler",
        (ADOPTION, "_logprob_of(adopted.state_word)", "0.0"),
    ),
    _mutant(
        "what was not committed is entered again",
        (ADOPTION, "output_token_ids[: sequence.num_committed_tokens]", "output_token_ids"),
    ),
    _mutant(
        "a candidate is forgotten when its request is entered again",
        (
            ADOPTION,
            "        for sequence in group.sequences\n",
            "        for sequence in group.sequences[:1]\n",
        ),
        (
            ADOPTION,
            "return len(candidates) == request.params.n and all(",
            "return bool(candidates) and all(",
        ),
    ),
    _mutant(
        "the first to attach stays",
        (
            DELIVERY,
            "self._by_request[request_id] = Recipient(received)",
            "self._by_request.setdefault(request_id, Recipient(received))",
        ),
    ),
    _mutant(
        "a caller who comes back is told everything again",
        (DELIVERY, "{index: len(had.token_ids) for index, had in received.items()}", "{}"),
    ),
    _mutant(
        "a request whose caller does not come is announced to nobody",
        (
            MACHINE,
            "                self._commands.append(events.Adopted(request_id))\n",
            "                pass\n",
        ),
    ),
)


# ---- planting ----


def mutated(source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits made. Raises MutationError."""
    for edit in edits:
        count = source.count(edit.old)
        if count != 1:
            raise MutationError(f"{edit.old!r} stands {count} times in {edit.module}")
        source = source.replace(edit.old, edit.new)
    return source


def edits_by_module(mutant: Mutant) -> dict[str, list[Edit]]:
    modules: dict[str, list[Edit]] = {}
    for edit in mutant.edits:
        modules.setdefault(edit.module, []).append(edit)
    return modules


def source_path(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


class _MutatingLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, edits: Sequence[Edit]) -> None:
        super().__init__(module, str(source_path(module)))
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        """As compiled from the changed source; no cached bytecode is read or written."""
        del fullname
        source = self.get_data(self.path).decode()
        return self.source_to_code(mutated(source, self._edits).encode(), self.path)


class _MutatingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._edits = edits_by_module(mutant)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        edits = self._edits.get(fullname)
        if edits is None:
            return None
        loader = _MutatingLoader(fullname, edits)
        return importlib.util.spec_from_file_location(fullname, loader.path, loader=loader)


def plant(mutant: Mutant) -> None:
    """From here on the process imports the mutant in place of the real modules."""
    for module in edits_by_module(mutant):
        assert module not in sys.modules, f"{module} has been imported already"
    sys.meta_path.insert(0, _MutatingFinder(mutant))


# ---- hunting ----


def hunt(mutant: Mutant, max_seeds: int) -> Find:
    """Run seeds until a check fails. For a fresh process: it keeps the mutant for good."""
    plant(mutant)
    from simulator.world import simulate

    for seed in range(max_seeds):
        outcome = simulate(seed)
        if outcome.violation:
            return Find(mutant.name, seed, outcome.check, outcome.violation)
    return Find(mutant.name, None)


def hunt_all(mutants: Sequence[Mutant], max_seeds: int, num_processes: int) -> Iterator[Find]:
    """Each mutant in a process of its own; in order, as they are found."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, max_tasks_per_child=1) as executor:
        yield from executor.map(partial(hunt, max_seeds=max_seeds), mutants)


def main(
    only: Annotated[str, typer.Option(help="Those with this in their name")] = "",
    max_seeds: Annotated[int, typer.Option(min=1)] = MAX_SEEDS,
    processes: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Plant every bug and find it."""
    mutants = [mutant for mutant in MUTANTS if only in mutant.name]
    width = max((len(mutant.name) for mutant in mutants), default=0)
    survivors = 0
    for find in hunt_all(mutants, max_seeds, processes):
        seed = "SURVIVES" if find.seed is None else f"seed {find.seed}"
        print(f"{find.name:<{width}}  {seed:>8}  {find.check}", flush=True)
        survivors += find.seed is None
    num_found = len(mutants) - survivors
    print(f"{num_found} of {len(mutants)} mutants found, within {max_seeds} seeds each")
    raise typer.Exit(1 if survivors or not mutants else 0)


if __name__ == "__main__":
    typer.run(main)
