"""What a step does before it writes anything: swap-ins, then copies, then swap-outs.

The worker carries these out in a step of its own, so what they read and write is held until that
step is acknowledged. A step that was never executed leaves them to the next one.

A source that the same step is to fill by a copy is replaced by where that copy reads, which has
all that was ever computed of it; so is a host block that the same step is to fill, and what would
be a swap-in from it is a copy. Hence each of the three may be carried out in any order, and a copy
nobody else needs is not needed for a swap-out either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvmem_svc.core.batch import NO_COPIES, NO_INT32, BlockCopies, Column


@dataclass(slots=True)
class Moves:
    """Of one step. copies: block -> the block it is copied from; swap_ins: block -> host block;
    swap_outs: host block -> block. Always the destination first: none has two."""

    copies: dict[int, int] = field(default_factory=dict)
    swap_ins: dict[int, int] = field(default_factory=dict)
    swap_outs: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.copies or self.swap_ins or self.swap_outs)

    def copy(self) -> Moves:
        return Moves(dict(self.copies), dict(self.swap_ins), dict(self.swap_outs))

    def blocks(self) -> Column:
        """Of the pool: all that are read or written, int32."""
        touched = [*self.copies, *self.copies.values(), *self.swap_ins, *self.swap_outs.values()]
        return np.array(touched, np.int32)

    def host_blocks(self) -> Column:
        """Of the host tier: all that are read or written, int32."""
        return np.array([*self.swap_outs, *self.swap_ins.values()], np.int32)

    def _origins(self, blocks: Column) -> list[int]:
        """Where what `blocks` are to hold is to be read."""
        named: list[int] = blocks.tolist()
        return [self.copies.get(block, block) for block in named]

    def add_copies(self, sources: Column, destinations: Column) -> Column:
        """Returns the blocks to read from, int32."""
        origins = self._origins(sources)
        self.copies.update(zip(destinations.tolist(), origins, strict=True))
        return np.array(origins, np.int32)

    def add_swap_outs(self, blocks: Column, host_blocks: Column) -> Column:
        """Returns the blocks to read from, int32."""
        origins = self._origins(blocks)
        self.swap_outs.update(zip(host_blocks.tolist(), origins, strict=True))
        return np.array(origins, np.int32)

    def add_swap_ins(self, host_blocks: Column, blocks: Column) -> tuple[BlockCopies, BlockCopies]:
        """Returns the swap-ins, and the copies in place of those from what this step fills."""
        filled_here = np.array([one in self.swap_outs for one in host_blocks.tolist()], np.bool_)
        from_host, to = host_blocks[~filled_here], blocks[~filled_here]
        self.swap_ins.update(zip(to.tolist(), from_host.tolist(), strict=True))
        if not filled_here.any():
            return BlockCopies(from_host, to), NO_COPIES
        origins = [self.swap_outs[one] for one in host_blocks[filled_here].tolist()]
        copied = blocks[filled_here]
        self.copies.update(zip(copied.tolist(), origins, strict=True))
        return BlockCopies(from_host, to), BlockCopies(np.array(origins, np.int32), copied)

    def add_all(self, later: Moves) -> None:
        """What a later step was to do is to be done along with this."""
        if later.swap_ins:
            self.add_swap_ins(_column(later.swap_ins.values()), _column(later.swap_ins))
        if later.copies:
            self.add_copies(_column(later.copies.values()), _column(later.copies))
        if later.swap_outs:
            self.add_swap_outs(_column(later.swap_outs.values()), _column(later.swap_outs))


def _column(blocks: Iterable[int]) -> Column:
    return np.array([*blocks], np.int32)


class StepMoves:
    """The moves of every step that is not acknowledged, and which step is being prepared."""

    def __init__(self) -> None:
        self.step_id = 0
        self.acknowledged_step = 0
        self.by_step: dict[int, Moves] = {}
        # Of those of `pending_step`, until it is acknowledged: what a former epoch never did.
        self.pending = Moves()
        self.pending_step = 0

    @property
    def newest_issued_step(self) -> int:
        return self.step_id - 1

    @property
    def nothing_in_flight(self) -> bool:
        """Every step that was issued is acknowledged."""
        return self.newest_issued_step <= self.acknowledged_step

    def begin_step(self, step_id: int, acknowledged_step: int) -> None:
        """Step `step_id` is being prepared; those up to `acknowledged_step` are over."""
        self.step_id = step_id
        self.acknowledged_step = acknowledged_step
        if self.by_step:
            for due in [step for step in self.by_step if step <= acknowledged_step]:
                del self.by_step[due]
            if self.pending_step <= acknowledged_step:
                self.pending = Moves()

    def of_step(self) -> Moves:
        """Those of the step being prepared, to be added to."""
        return self.by_step.setdefault(self.step_id, Moves())

    def touched_blocks(self) -> Column:
        """Blocks of the pool that the step being prepared reads or writes with them, int32."""
        moves = self.by_step.get(self.step_id)
        return NO_INT32 if moves is None else moves.blocks()

    def touched_host_blocks(self) -> Column:
        """Blocks of the host tier, likewise."""
        moves = self.by_step.get(self.step_id)
        return NO_INT32 if moves is None else moves.host_blocks()

    def destinations(self) -> Column:
        """Blocks of the pool that steps not acknowledged yet copy or swap something to, int32."""
        if not self.by_step:
            return NO_INT32
        every = self.by_step.values()
        return np.array(
            [block for one in every for block in (*one.copies, *one.swap_ins)], np.int32
        )

    def take_over(self, step_id: int, last_executed_step: int, ref_counts: Column) -> Moves:
        """A new epoch prepares `step_id`, which is to do what steps after `last_executed_step` were
        to do: none of those will ever be executed. Of the copies those are left out whose
        destination nobody holds by `ref_counts`, int32[num_blocks]."""
        pending = Moves()
        for step in sorted(self.by_step):
            moves = self.by_step.pop(step)
            if step > last_executed_step:
                pending.add_all(moves)
        pending.copies = {dst: src for dst, src in pending.copies.items() if ref_counts[dst]}
        self.pending, self.pending_step = pending, step_id
        if pending:
            self.by_step[step_id] = pending.copy()
        return pending
