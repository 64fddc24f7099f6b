"""A worker without a model, which checks every KV slot it touches.

A slot holds the tag of what was computed into it: the whole prefix of tokens that ends there.
Every row reads all slots of its sequence back through the table it was given, so a double
allocation, a stale table or a missed copy is an error at the step where it happens. The next
token is a hash of the prefix, the seed and the sample index, so that every stream must equal its
solo run.

Blocks may be shared through a prefix cache, so a tag names tokens and never a sequence. A witness
knows what tokens a sequence must have, and whose KV it may read: a block also has the name of whom
it was computed for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from scheduler_svc.core import ops
from scheduler_svc.core.sequence import Request
from simulator.prefix_tree import PrefixTree

EOS = 0


class Violation(AssertionError):
    """Something that must never happen has. `check` names the checker that noticed."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check
        self.message = message


def expect(condition: object, check: str, message: str) -> None:
    if not condition:
        raise Violation(check, message)


def solo_run(request: Request, candidate: int, tree: PrefixTree | None = None) -> tuple[int, ...]:
    """What a candidate of the request must be, whatever happens around it."""
    tree = tree or PrefixTree()
    params = request.params
    sample_index = params.first_sample_index + candidate
    prefix = tree.of(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < params.max_tokens:
        token = tree.next_token(prefix, params.seed, sample_index)
        output.append(token)
        if token == EOS and not params.ignore_eos:
            break
        prefix = tree.extend(prefix, token)
    return tuple(output)


def logprob_of(token: int) -> float:
    """What the worker says of a token, wherever it is drawn. Sums of these are exact."""
    return -(token + 1) / 64


def letter_of(token: int) -> str:
    """Token 7 is the letter of code 7 + 64."""
    return chr(64 + token)


class Letters:
    """Text streams: every token is a letter, at once."""

    def push(self, token_id: int) -> str:
        return letter_of(token_id)

    def flush(self) -> str:
        return ""


class Witness(Protocol):
    """Knows what the worker does not: every request, and who may read what."""

    def path(self, request_id: str, candidate: int) -> Sequence[int]:
        """The prefixes of the tokens a candidate must have, by length, as far as their KV may be
        computed; the empty one first."""
        ...

    def domain(self, request_id: str) -> tuple[str, str]:
        """Tenant and cache_salt: whom KV is computed for."""
        ...

    def may_read(self, request_id: str, block_id: int) -> bool:
        """Whether the request was let to read a block that was computed for others."""
        ...


@dataclass
class KnownSequence:
    """What the worker knows of a sequence: its mirror of the table, and how to draw."""

    table: list[int]
    table_version: int
    request_id: str
    candidate: int
    seed: int
    sample_index: int
    # Position and token of the last draw.
    drawn: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Row:
    sequence_id: int
    known: KnownSequence
    num_computed: int
    tokens: tuple[int, ...]
    num_samples: int


@dataclass
class TagWorker:
    """KV slots by number hold the prefix (of `tree`) they were computed from; `domains`: by block,
    whom its newest slot was computed for."""

    block_size: int
    tree: PrefixTree = field(default_factory=PrefixTree)
    witness: Witness | None = None
    slots: dict[int, int] = field(default_factory=dict)
    domains: dict[int, tuple[str, str]] = field(default_factory=dict)
    # The same as `slots`, of the host tier.
    host_slots: dict[int, int] = field(default_factory=dict)
    known: dict[int, KnownSequence] = field(default_factory=dict)
    last_step_id: int = 0
    # Those the newest step wrote to.
    written_blocks: set[int] = field(default_factory=set)
    num_copies: int = 0
    num_swapped_in: int = 0
    num_swapped_out: int = 0
    max_tokens_in_step: int = 0

    def forget(self) -> None:
        """Another session begins: no table of the former one counts any more. The KV stays."""
        self.known.clear()

    def execute(self, step: ops.Step) -> ops.StepResult:
        """Raises Violation."""
        expect(
            step.step_id > self.last_step_id,
            "worker step order",
            f"step {step.step_id} after {self.last_step_id}",
        )
        self.last_step_id = step.step_id
        self._swap_in(step.swap_ins)
        self._copy(step)
        self._swap_out(step.swap_outs)
        self._update_tables(step)
        self._check_destinations(step)
        rows = self._rows(step)
        prefixes = self._write(rows)
        self._read_back(rows, prefixes)
        sampled = [
            self.tree.next_token(prefix, row.known.seed, row.known.sample_index + j)
            for row, prefix in zip(rows, prefixes, strict=True)
            for j in range(row.num_samples)
        ]
        at = 0
        for row in rows:
            at += row.num_samples
            if row.num_samples:
                row.known.drawn = (row.num_computed + len(row.tokens), sampled[at - 1])
        return ops.StepResult(
            step.step_id,
            np.array(sampled, np.int32),
            np.array([logprob_of(token) for token in sampled], np.float32),
        )

    # ---- tables ----

    def _copy(self, step: ops.Step) -> None:
        sources, destinations = step.copy_src.tolist(), step.copy_dst.tolist()
        expect(
            len(set(destinations)) == len(destinations) and not set(destinations) & set(sources),
            "worker copies",
            f"{sources} -> {destinations} cannot be made in any order",
        )
        self.num_copies += len(sources)
        for src, dst in zip(sources, destinations, strict=True):
            if src in self.domains:
                self.domains[dst] = self.domains[src]
        self._move(sources, self.slots, destinations, self.slots)

    def _swap_in(self, swaps: ops.BlockCopies) -> None:
        self.num_swapped_in += len(swaps.src)
        for block_id in swaps.dst.tolist():
            # Only the group that was swapped out has a way to it: whoever reads it first.
            self.domains.pop(block_id, None)
        self._move(swaps.src.tolist(), self.host_slots, swaps.dst.tolist(), self.slots)

    def _swap_out(self, swaps: ops.BlockCopies) -> None:
        self.num_swapped_out += len(swaps.src)
        self._move(swaps.src.tolist(), self.slots, swaps.dst.tolist(), self.host_slots)

    def _move(
        self, sources: list[int], tags: dict[int, int], destinations: list[int], to: dict[int, int]
    ) -> None:
        expect(
            len(set(destinations)) == len(destinations),
            "worker copies",
            f"two moves into one block: {destinations}",
        )
        for src, dst in zip(sources, destinations, strict=True):
            for offset in range(self.block_size):
                tag = tags.get(src * self.block_size + offset)
                if tag is None:
                    to.pop(dst * self.block_size + offset, None)
                else:
                    to[dst * self.block_size + offset] = tag

    def _update_tables(self, step: ops.Step) -> None:
        for sequence_id in step.dropped_sequence_ids.tolist():
            expect(sequence_id in self.known, "worker mirror", f"{sequence_id} dropped, not known")
            del self.known[sequence_id]
        for start in step.starts:
            self.known[start.sequence_id] = KnownSequence(
                list(start.block_ids),
                start.table_version,
                start.request_id,
                start.sample_index - start.params.first_sample_index,
                start.params.seed,
                start.sample_index,
            )
        deltas = step.deltas
        copied = {*step.copy_dst.tolist(), *step.swap_ins.dst.tolist()}
        changed: set[int] = set()
        for sequence_id, index, block_id, version in zip(
            deltas.sequence_ids.tolist(),
            deltas.table_indices.tolist(),
            deltas.block_ids.tolist(),
            deltas.table_versions.tolist(),
            strict=True,
        ):
            known = self.known.get(sequence_id)
            if known is None:
                raise Violation("worker mirror", f"a delta for {sequence_id}, which is not known")
            # One op raises the version by one, however many entries it changes.
            right = version == known.table_version + 1 or (
                sequence_id in changed and version == known.table_version
            )
            expect(
                right and index <= len(known.table),
                "worker mirror",
                f"sequence {sequence_id}: entry {index} at version {version}, after version"
                f" {known.table_version} with {len(known.table)} entries",
            )
            changed.add(sequence_id)
            known.table[index : index + 1] = [block_id]
            known.table_version = version
            if block_id not in copied:
                self.forget_block(block_id)

    def forget_host_block(self, block_id: int) -> None:
        """As `forget_block`, of the host tier."""
        for offset in range(self.block_size):
            self.host_slots.pop(block_id * self.block_size + offset, None)

    def _check_destinations(self, step: ops.Step) -> None:
        """A copy for nobody fills a block that may be given to somebody."""
        wanted = set(step.copy_dst.tolist())
        for known in self.known.values() if wanted else ():
            wanted.difference_update(known.table)
        expect(not wanted, "worker copies", f"copies into {sorted(wanted)}, which no table holds")

    def forget_block(self, block_id: int) -> None:
        """What was in a block that is given out anew must not be read by accident."""
        self.domains.pop(block_id, None)
        for offset in range(self.block_size):
            self.slots.pop(block_id * self.block_size + offset, None)

    def _rows(self, step: ops.Step) -> list[_Row]:
        rows, at = [], 0
        for sequence_id, version, count, computed, num_samples in zip(
            step.sequence_ids.tolist(),
            step.table_versions.tolist(),
            step.num_input_tokens.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_samples.tolist(),
            strict=True,
        ):
            known = self.known.get(sequence_id)
            if known is None:
                raise Violation("worker mirror", f"a row of {sequence_id}, which is not known")
            expect(
                known.table_version == version,
                "worker table version",
                f"sequence {sequence_id}: the step says {version}, the table is at"
                f" {known.table_version}",
            )
            expect(
                computed + count <= len(known.table) * self.block_size,
                "worker slots",
                f"sequence {sequence_id}: {computed + count} tokens in {len(known.table)} blocks",
            )
            tokens = tuple(step.input_token_ids[at : at + count].tolist())
            if tokens == (ops.DRAWN_LAST,):
                tokens = (self._drawn_last(sequence_id, known, computed),)
            at += count
            rows.append(_Row(sequence_id, known, computed, tokens, num_samples))
        self.max_tokens_in_step = max(self.max_tokens_in_step, at)
        return rows

    @staticmethod
    def _drawn_last(sequence_id: int, known: KnownSequence, position: int) -> int:
        expect(
            known.drawn is not None and known.drawn[0] == position,
            "worker draws",
            f"sequence {sequence_id} is to go on at {position} with what was drawn last:"
            f" {known.drawn}",
        )
        assert known.drawn is not None
        return known.drawn[1]

    # ---- slots ----

    def _slot(self, known: KnownSequence, position: int) -> int:
        block = known.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(self, rows: list[_Row]) -> list[int]:
        """Write all rows; the prefix each of them ends with."""
        for row in rows:
            if not row.num_computed:
                for block_id in row.known.table:
                    self.forget_block(block_id)
        written: set[int] = set()
        self.written_blocks = set()
        prefixes = [0] * len(rows)
        # A row may build on slots that a sibling's row writes in this very step, so prefixes
        # are resolved in the order in which they become known.
        for i in sorted(range(len(rows)), key=lambda i: rows[i].num_computed):
            row = rows[i]
            prefix = self._prefix_before(row)
            for position, token in enumerate(row.tokens, start=row.num_computed):
                prefix = self.tree.extend(prefix, token)
                slot = self._slot(row.known, position)
                expect(
                    slot not in written,
                    "worker slots",
                    f"two rows write slot {slot}, one of them of sequence {row.sequence_id}",
                )
                written.add(slot)
                self.slots[slot] = prefix
            prefixes[i] = prefix
            self._sign(row)
        return prefixes

    def _sign(self, row: _Row) -> None:
        """The blocks that a row has written to are its domain's."""
        end = row.num_computed + len(row.tokens)
        size = self.block_size
        blocks = row.known.table[row.num_computed // size : -(-end // size)]
        self.written_blocks.update(blocks)
        if self.witness is not None:
            domain = self.witness.domain(row.known.request_id)
            self.domains.update(dict.fromkeys(blocks, domain))

    def _prefix_before(self, row: _Row) -> int:
        if not row.num_computed:
            return 0
        position = row.num_computed - 1
        prefix = self.slots.get(self._slot(row.known, position))
        if prefix is None or self.tree.lengths[prefix] != row.num_computed:
            self._wrong_kv(row, position, prefix)
        assert prefix is not None
        return prefix

    def _read_back(self, rows: list[_Row], prefixes: list[int]) -> None:
        """Read every slot of every row through its table, as a layer does after its writes."""
        for row, end in zip(rows, prefixes, strict=True):
            self._check_with_witness(row, end)
            prefix = end
            for position in range(self.tree.lengths[end] - 1, -1, -1):
                tag = self.slots.get(self._slot(row.known, position))
                if tag != prefix:
                    self._wrong_kv(row, position, tag)
                prefix = self.tree.parents[prefix]

    def _check_with_witness(self, row: _Row, end: int) -> None:
        """Everything a row reads is of its own tokens, and was computed for its own domain, or is
        public."""
        witness, known = self.witness, row.known
        if witness is None:
            return
        length = row.num_computed + len(row.tokens)
        path = witness.path(known.request_id, known.candidate)
        if length >= len(path) or path[length] != end:
            self._wrong_kv(row, length - 1, end)
        domain = witness.domain(known.request_id)
        for block_id in known.table[: -(-length // self.block_size)]:
            others = self.domains.setdefault(block_id, domain)
            expect(
                others == domain or witness.may_read(known.request_id, block_id),
                "worker KV domains",
                f"sequence {row.sequence_id} of {known.request_id}, {domain}, reads block"
                f" {block_id}, computed for {others}",
            )

    def _wrong_kv(self, row: _Row, position: int, tag: int | None) -> None:
        found = "nothing" if tag is None else f"the KV of {self.tree.tokens(tag)}"
        block = row.known.table[position // self.block_size]
        raise Violation(
            "worker KV tags",
            f"sequence {row.sequence_id} reads position {position} in block {block} and finds"
            f" {found}",
        )
