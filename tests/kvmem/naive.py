"""A naive memory service and worker: plain dicts and lists, slow and obviously right.

The model predicts what each op must do. The worker plays the part of a GPU that runs steps late:
it holds the contents of every slot, carries out copies and writes when a step is finished, and
checks that whatever attention would read then is what it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus

# KV depends on all tokens so far. The domain stands for what must never be shared.
Content = tuple[tuple[str, str], tuple[int, ...]]
# (block, offset) -> what is there.
Slots = dict[tuple[int, int], Content | None]


@dataclass
class NaiveSequence:
    """Blocks of `table` that an op is about to be given are None until its result is read."""

    sequence_id: int
    request_id: str
    candidate: int
    tokens: list[int]
    num_computed: int = 0
    is_running: bool = False
    table: list[int | None] = field(default_factory=list)
    # Of one that is swapped: the host block for each entry its table had.
    host: list[int] = field(default_factory=list)
    # Slots that may be written, and (step_id, end of the slots filled by it) of what was handed
    # to the worker, of shared blocks too.
    num_writable: int = 0
    issued: list[tuple[int, int]] = field(default_factory=list)
    scheduler_state: bytes = b""
    # Who may share what it has computed: tenant and cache_salt.
    domain: tuple[str, str] = ("", "")

    def content(self, position: int) -> Content:
        """What is in its slot there."""
        return (self.domain, tuple(self.tokens[: position + 1]))

    @property
    def is_swapped(self) -> bool:
        return bool(self.host)

    @property
    def issued_end(self) -> int:
        return max((end for _, end in self.issued), default=0)

    def executed_end(self, last_executed_step: int) -> int:
        """Slots that are filled, when no later step was executed."""
        return max((end for step, end in self.issued if step <= last_executed_step), default=0)

    def issued_up_to(self, end: int) -> list[tuple[int, int]]:
        """What fills the slots up to `end`, for a sequence that shares them."""
        return [(step, min(filled, end)) for step, filled in self.issued]

    def forget_blocks(self) -> None:
        self.is_running = False
        self.table, self.host, self.issued = [], [], []
        self.num_computed = self.num_writable = 0


@dataclass
class NaiveRequest:
    num_candidates: int
    # candidate -> sequence id; and of those finished, with the reason.
    finished: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Moves:
    """Pairs of source and destination. Swap-ins come first, then copies, then swap-outs."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)

    def touched(self) -> set[int]:
        of_copies = {block for pair in self.copies for block in pair}
        return of_copies | {dst for _, dst in self.swap_ins} | {src for src, _ in self.swap_outs}

    def touched_hosts(self) -> set[int]:
        return {src for src, _ in self.swap_ins} | {dst for _, dst in self.swap_outs}

    def after(self, earlier: Moves) -> Moves:
        """What is left to do when neither the steps before nor this one will ever be executed. A
        block or host block that one of them was to fill is read where that one would have read."""
        copies = {dst: src for src, dst in earlier.copies}
        host = {dst: src for src, dst in earlier.swap_outs}
        swap_ins = list(earlier.swap_ins)
        for src, dst in self.swap_ins:
            if src in host:
                copies[dst] = host[src]
            else:
                swap_ins.append((src, dst))
        copies |= {dst: copies.get(src, src) for src, dst in self.copies}
        host |= {dst: copies.get(src, src) for src, dst in self.swap_outs}
        pairs = [(src, dst) for dst, src in copies.items()]
        return Moves(pairs, swap_ins, [(src, dst) for dst, src in host.items()])


@dataclass
class Work:
    """A step handed to the worker: moves first, then writes; then every row is read."""

    step_id: int
    moves: Moves
    writes: list[tuple[int, int, Content]]  # block, offset, content
    reads: list[tuple[list[int], list[Content]]]  # table, what its first slots have

    def touched(self) -> set[int]:
        return {block for block, _, _ in self.writes} | self.moves.touched()


class NaiveWorker:
    """The slots' contents. What stands in slot p of a sequence is its tokens up to p."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.in_flight: list[Work] = []
        self.slots: Slots = {}
        self.host_slots: Slots = {}
        self.last_executed_step = 0

    def imagine(self) -> NaiveWorker:
        """Another one with the same contents."""
        other = NaiveWorker(self.block_size)
        other.slots, other.host_slots = dict(self.slots), dict(self.host_slots)
        return other

    def move(self, moves: Moves) -> None:
        self._copy(self.host_slots, self.slots, moves.swap_ins)
        self._copy(self.slots, self.slots, moves.copies)
        self._copy(self.slots, self.host_slots, moves.swap_outs)

    def _copy(self, source: Slots, destination: Slots, pairs: list[tuple[int, int]]) -> None:
        before = dict(source)
        for src, dst in pairs:  # all at once: every source as it was
            for offset in range(self.block_size):
                destination[dst, offset] = before.get((src, offset))

    def finish_oldest(self) -> int:
        work = self.in_flight.pop(0)
        self.last_executed_step = work.step_id
        self.move(work.moves)
        for block, offset, content in work.writes:
            self.slots[block, offset] = content
        for table, contents in work.reads:
            self.read(f"step {work.step_id}", table, contents)
        return work.step_id

    def read(self, who: str, table: list[int], contents: list[Content]) -> None:
        self._read(who, self.slots, table, contents)

    def read_host(self, who: str, host: list[int], contents: list[Content]) -> None:
        self._read(who, self.host_slots, host, contents)

    def _read(self, who: str, slots: Slots, table: list[int], contents: list[Content]) -> None:
        for position, content in enumerate(contents):
            slot = table[position // self.block_size], position % self.block_size
            assert slots.get(slot) == content, (
                f"{who} reads position {position} of {contents[-1]} in slot {slot}"
                f" and finds {slots.get(slot)}"
            )


class NaiveMemory:
    """Predicts statuses, tables and levels. A block that is only cached is free here.

    is_published: whether others may come to hold a block, so that nobody writes to it in place.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        rows: int,
        num_host_blocks: int,
        is_published: Callable[[int], bool],
    ) -> None:
        self.is_published = is_published
        self.num_host_blocks = num_host_blocks
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_model_len, self.max_sequences = max_model_len, rows
        self.sequences: dict[int, NaiveSequence] = {}
        self.requests: dict[str, NaiveRequest] = {}
        # Block -> the step it waits for: until that is acknowledged it is held.
        self.quarantine: dict[int, int] = {}
        self.host_quarantine: dict[int, int] = {}
        self.step_id, self.acknowledged = 1, 0
        # Of the step being prepared.
        self.moves = Moves()

    # --- blocks ------------------------------------------------------------------------

    def ref_count(self, block: int) -> int:
        return sum(sequence.table.count(block) for sequence in self.sequences.values())

    def in_use(self) -> set[int]:
        return {x for s in self.sequences.values() for x in s.table if x is not None}

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - self.in_use() - self.held()

    def held(self) -> set[int]:
        return {block for block, step in self.quarantine.items() if step > self.acknowledged}

    def num_free(self) -> int:
        """Blocks still promised to unread results are not free."""
        promised = sum(sequence.table.count(None) for sequence in self.sequences.values())
        return len(self.free()) - promised

    def hosts_in_use(self) -> set[int]:
        return {host for sequence in self.sequences.values() for host in sequence.host}

    def held_hosts(self) -> set[int]:
        return {x for x, step in self.host_quarantine.items() if step > self.acknowledged}

    def free_hosts(self) -> set[int]:
        return set(range(self.num_host_blocks)) - self.hosts_in_use() - self.held_hosts()

    def release(self) -> None:
        """The memory service was told of all that is acknowledged."""
        held, hosts = self.held(), self.held_hosts()
        self.quarantine = {x: step for x, step in self.quarantine.items() if x in held}
        self.host_quarantine = {x: s for x, s in self.host_quarantine.items() if x in hosts}

    def retire(self, blocks: Sequence[int | None], release_step: int | None = None) -> None:
        """Called after the blocks left a table: those nobody holds wait for their step."""
        for block in blocks:
            if block is not None and self.ref_count(block) == 0:
                touched = block in self.moves.touched()
                step = self.step_id if touched else self.step_id - 1
                self.quarantine[block] = step if release_step is None else release_step

    def retire_hosts(self, hosts: Sequence[int], release_step: int | None = None) -> None:
        """As `retire`, of the host tier."""
        for host in hosts:
            if host not in self.hosts_in_use():
                touched = host in self.moves.touched_hosts()
                step = self.step_id if touched else self.step_id - 1
                self.host_quarantine[host] = step if release_step is None else release_step

    def take_over(self, step_id: int, acknowledged: int, lost: list[Moves]) -> Moves:
        """The next holder prepares `step_id`, which makes all swaps that steps which will never be
        executed were to make, oldest step first, and the copies that somebody needs."""
        pending = Moves()
        for moves in lost:
            pending = moves.after(pending)
        pending.copies = [(src, dst) for src, dst in pending.copies if dst in self.in_use()]
        for held, touched in (
            (self.quarantine, pending.touched()),
            (self.host_quarantine, pending.touched_hosts()),
        ):
            for block in touched & set(held):
                held[block] = max(held[block], step_id)
        self.step_id, self.acknowledged = step_id, acknowledged
        self.moves = pending
        return pending

    # --- ops ---------------------------------------------------------------------------

    def reserve(
        self, ids: list[int], num_slots: list[int], group_sizes: list[int]
    ) -> tuple[list[int], set[int]]:
        """Failed groups, and the blocks that copies are made from. New entries become None."""
        failed, sources, at = [], set(), 0
        for group, size in enumerate(group_sizes or [1] * len(ids)):
            members = list(zip(ids[at : at + size], num_slots[at : at + size], strict=True))
            at += size
            before = {i: list(self.sequences[i].table) for i, _ in members}
            copied = set()
            for sequence_id, slots in members:
                copied |= self._reserve_one(self.sequences[sequence_id], slots)
            if self.num_free() < 0:
                failed.append(group)
                for sequence_id, table in before.items():
                    self.sequences[sequence_id].table = table
                continue
            sources |= copied
            for sequence_id, slots in members:
                sequence = self.sequences[sequence_id]
                sequence.num_writable = max(sequence.num_writable, slots)
        return failed, sources

    def _reserve_one(self, sequence: NaiveSequence, num_slots: int) -> set[int]:
        copied: set[int] = set()
        for position in range(sequence.num_computed, num_slots):
            index = position // self.block_size
            if index < len(sequence.table):
                block = sequence.table[index]
                if block is not None and (self.ref_count(block) > 1 or self.is_published(block)):
                    copied.add(block)
                    sequence.table[index] = None
        while len(sequence.table) * self.block_size < num_slots:
            sequence.table.append(None)
        return copied

    def plan_swap_in(self, members: list[tuple[NaiveSequence, int]]) -> list[list[int]]:
        """The tables that members with so many slots get, of numbers that stand for new blocks:
        equal ones are shared. Of those who write to one that is shared all but the last get
        another."""
        numbers = sorted({host for sequence, _ in members for host in sequence.host})
        tables = [[numbers.index(host) for host in sequence.host] for sequence, _ in members]
        count = len(numbers)
        for (sequence, num_slots), table in zip(members, tables, strict=True):
            for position in range(sequence.num_computed, num_slots):
                index = position // self.block_size
                if index == len(table) or sum(t.count(table[index]) for t in tables) > 1:
                    table[index : index + 1] = [count]
                    count += 1
        for (_, num_slots), table in zip(members, tables, strict=True):
            while len(table) * self.block_size < num_slots:
                table.append(count)
                count += 1
        return tables

    def free_candidates(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        live = {s.candidate for s in self.of_request(request_id)}
        kept = {c for c, (_, reason) in request.finished.items() if reason}
        return [c for c in range(request.num_candidates) if c not in live | kept]

    def of_request(self, request_id: str) -> list[NaiveSequence]:
        return [s for s in self.sequences.values() if s.request_id == request_id]

    def finished_ids(self) -> list[int]:
        return [i for r in self.requests.values() for i, _ in r.finished.values()]

    def swapped(self) -> list[NaiveSequence]:
        return [s for s in self.sequences.values() if s.is_swapped]

    def running(self) -> list[NaiveSequence]:
        return [s for s in self.sequences.values() if s.is_running]

    def expected_levels(self) -> b.PoolLevels:
        return b.PoolLevels(
            num_free_blocks=len(self.free()),
            num_in_use_blocks=len(self.in_use()),
            num_quarantined_blocks=len(self.held()),
            num_free_sequences=self.max_sequences - len(self.sequences),
            num_free_host_blocks=len(self.free_hosts()),
        )


def expect(result: b.OpResult, status: OpStatus) -> b.OpResult:
    assert result.status == status, f"{result.status.name} {result.message}, not {status.name}"
    assert bool(result.message) == (status != OpStatus.OK)
    return result
