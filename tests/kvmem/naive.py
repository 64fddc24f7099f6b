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
        self.table, self.issued = [], []
        self.num_computed = self.num_writable = 0


@dataclass
class NaiveRequest:
    num_candidates: int
    # candidate -> sequence id; and of those finished, with the reason.
    finished: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Work:
    """A step handed to the worker: copies first, then writes; then every row is read."""

    step_id: int
    copies: list[tuple[int, int]]
    writes: list[tuple[int, int, Content]]  # block, offset, content
    reads: list[tuple[list[int], list[Content]]]  # table, what its first slots have

    def touched(self) -> set[int]:
        blocks = {block for block, _, _ in self.writes}
        return blocks | {block for pair in self.copies for block in pair}


class NaiveWorker:
    """The slots' contents. What stands in slot p of a sequence is its tokens up to p."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.in_flight: list[Work] = []
        self.slots: dict[tuple[int, int], Content | None] = {}
        self.last_executed_step = 0

    def copy(self, copies: list[tuple[int, int]]) -> None:
        before = dict(self.slots)
        for src, dst in copies:  # all at once: every source as it was
            for offset in range(self.block_size):
                self.slots[dst, offset] = before.get((src, offset))

    def finish_oldest(self) -> int:
        work = self.in_flight.pop(0)
        self.last_executed_step = work.step_id
        self.copy(work.copies)
        for block, offset, content in work.writes:
            self.slots[block, offset] = content
        for table, contents in work.reads:
            self.read(f"step {work.step_id}", table, contents)
        return work.step_id

    def read(self, who: str, table: list[int], contents: list[Content]) -> None:
        for position, content in enumerate(contents):
            slot = table[position // self.block_size], position % self.block_size
            assert self.slots.get(slot) == content, (
                f"{who} reads position {position} of {contents[-1]} in slot {slot}"
                f" and finds {self.slots.get(slot)}"
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
        is_published: Callable[[int], bool],
    ) -> None:
        self.is_published = is_published
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_model_len, self.max_sequences = max_model_len, rows
        self.sequences: dict[int, NaiveSequence] = {}
        self.requests: dict[str, NaiveRequest] = {}
        # Block -> the step it waits for: until that is acknowledged it is held.
        self.quarantine: dict[int, int] = {}
        self.step_id, self.acknowledged = 1, 0
        self.step_copies: list[tuple[int, int]] = []

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

    def release(self) -> None:
        """The memory service was told of all that is acknowledged."""
        held = self.held()
        self.quarantine = {x: step for x, step in self.quarantine.items() if x in held}

    def retire(self, blocks: Sequence[int | None], release_step: int | None = None) -> None:
        """Called after the blocks left a table: those nobody holds wait for their step."""
        for block in blocks:
            if block is not None and self.ref_count(block) == 0:
                copied = any(block in pair for pair in self.step_copies)
                step = self.step_id if copied else self.step_id - 1
                self.quarantine[block] = step if release_step is None else release_step

    def take_over(
        self, step_id: int, acknowledged: int, lost_copies: list[list[tuple[int, int]]]
    ) -> list[tuple[int, int]]:
        """The next holder prepares `step_id`; of the copies that steps which will never be
        executed were to make, oldest step first, it makes those that somebody needs."""
        pending: dict[int, int] = {}
        for copies in lost_copies:
            pending |= {dst: pending.get(src, src) for src, dst in copies}
        self.step_copies = [(src, dst) for dst, src in pending.items() if dst in self.in_use()]
        for block in {block for pair in self.step_copies for block in pair}:
            if block in self.quarantine:
                self.quarantine[block] = max(self.quarantine[block], step_id)
        self.step_id, self.acknowledged = step_id, acknowledged
        return self.step_copies

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

    def free_candidates(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        live = {s.candidate for s in self.of_request(request_id)}
        kept = {c for c, (_, reason) in request.finished.items() if reason}
        return [c for c in range(request.num_candidates) if c not in live | kept]

    def of_request(self, request_id: str) -> list[NaiveSequence]:
        return [s for s in self.sequences.values() if s.request_id == request_id]

    def finished_ids(self) -> list[int]:
        return [i for r in self.requests.values() for i, _ in r.finished.values()]

    def running(self) -> list[NaiveSequence]:
        return [s for s in self.sequences.values() if s.is_running]

    def expected_levels(self) -> b.PoolLevels:
        return b.PoolLevels(
            num_free_blocks=len(self.free()),
            num_in_use_blocks=len(self.in_use()),
            num_quarantined_blocks=len(self.held()),
            num_free_sequences=self.max_sequences - len(self.sequences),
        )


def expect(result: b.OpResult, status: OpStatus) -> b.OpResult:
    assert result.status == status, f"{result.status.name} {result.message}, not {status.name}"
    assert bool(result.message) == (status != OpStatus.OK)
    return result
