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
PLANNER = "scheduler_svc.core.planner"
STEPPER = "scheduler_svc.core.stepper"
ADOPTION = "scheduler_svc.core.adoption"
DELIVERY = "scheduler_svc.core.delivery"
MIRROR = "scheduler_svc.core.worker_mirror"
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
            "ops.Preempt(tuple(s.sequence_id for s in group.live))",
            "ops.Preempt(tuple(s.sequence_id for s in group.live[:1]))",
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
            "self._deltas, self._copies, self._dropped = [], [], []\n        step",
            "self._copies, self._dropped = [], []\n        step",
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
        (STEPPER, "elif self.outbox.holds(ops.Free, ops.Fork):", "elif False:"),
    ),
    # The scheduler, taking over.
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
