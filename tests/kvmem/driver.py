"""Drives a memory core in tests: fences, numbers and statuses looked after."""

from __future__ import annotations

import numpy as np

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.leases import LeaseTimes
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import GrantSession, Mutation, PoolConfirmed, Reply
from kvmem_svc.core.views import SequenceView, sequence_view

TIMES = LeaseTimes(
    lease_ttl_ms=1_000,
    resume_grace_ms=200,
    recovery_grace_ms=700,
    orphan_ttl_ms=5_000,
    result_ttl_ms=9_000,
)


def u64(*values: int) -> b.Column:
    return np.array(values, np.uint64)


def i32(*values: int) -> b.Column:
    return np.array(values, np.int32)


class Driver:
    """One session with one pool. `step_id` and `acknowledged` are the caller's to move.

    `mutations` is the log of what changed the state, with the replies.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        block_size: int = 4,
        max_model_len: int = 32,
        rows: int = 8,
        num_host_blocks: int = 6,
    ) -> None:
        self.memory = KvMemory("boot", max_sequences=rows)
        self.geometry = b.PoolGeometry(
            num_blocks, block_size, max_model_len, num_host_blocks=num_host_blocks
        )
        self.mutations: list[tuple[Mutation, Reply]] = []
        self.gatekeeper = Gatekeeper(
            self.memory, TIMES, lambda mutation, reply: self.mutations.append((mutation, reply))
        )
        self.step_id, self.acknowledged = 1, 0
        self.gatekeeper.open_session("test", 0, "here:1")
        self.confirm()

    @property
    def manager(self) -> BlockManager:
        assert self.memory.manager is not None
        return self.memory.manager

    def batch(self, *ops: b.Op, batch_seq: int | None = None) -> b.Batch:
        ledger = self.memory.ledger
        seq = ledger.next_batch_seq if batch_seq is None else batch_seq
        digest = repr((ops, self.step_id, self.acknowledged)).encode()
        return b.Batch(ledger.fence(), seq, self.step_id, self.acknowledged, ops, digest)

    def confirm(self, last_executed_step: int = 0, worker: str = "worker") -> PoolConfirmed:
        """The open session confirms a pool, and goes on with the step it is told."""
        confirmed = self.gatekeeper.attach_pool(
            self.memory.ledger.fence(), worker, self.geometry, 0, last_executed_step
        )
        check_integrity(self.manager)
        self.step_id = self.memory.last_step_id
        self.acknowledged = max(self.acknowledged, self.memory.acknowledged_step)
        return confirmed

    def take_over(self, last_executed_step: int = 0, worker: str = "worker") -> PoolConfirmed:
        """The holder dies; another one opens a session, and confirms the pool."""
        self.memory.commit(GrantSession("other"))
        return self.confirm(last_executed_step, worker)

    def send(self, *ops: b.Op) -> b.BatchResult:
        result = self.gatekeeper.apply(self.batch(*ops), 0)
        check_integrity(self.manager)
        return result

    def do(self, *ops: b.Op) -> b.BatchResult:
        """As `send`, and every op must succeed."""
        result = self.send(*ops)
        assert [one.message for one in result.results] == [""] * len(ops)
        return result

    def fails(self, op: b.Op) -> b.OpResult:
        """`op` alone must fail and change nothing."""
        before = self.state()
        result = self.send(op)
        assert result.results[0].status != OpStatus.OK
        assert not result.deltas.sequence_ids.size
        assert not result.copies.src_block_ids.size
        assert not result.swap_ins.src_block_ids.size
        assert not result.swap_outs.src_block_ids.size
        assert self.state() == before
        return result.results[0]

    def state(self) -> object:
        """All there is to see, comparable."""
        table = self.manager.sequences
        views = [self.view(int(i)) for i in table.live_ids if i]
        return (
            self.memory.levels(),
            [
                (v.sequence_id, v.status, v.num_computed_tokens, v.table_version, v.candidate)
                for v in views
            ],
            [(v.block_ids.tolist(), v.ref_counts.tolist()) for v in views],
            [self.tokens(v.sequence_id) for v in views],
            [table.scheduler_state(table.row_of(v.sequence_id)) for v in views],
            [(row, one.host_blocks.tolist()) for row, one in sorted(table.swap_maps.items())],
            sorted(table.finished),
            sorted(self.manager.requests),
        )

    def arrive(
        self, name: str, num_tokens: int, candidates: int = 4, tenant: str = "", salt: str = ""
    ) -> int:
        prompt = np.arange(num_tokens, dtype=np.int32)
        op = b.Arrive(name, prompt, candidates, tenant, cache_salt=salt)
        value = self.do(op).results[0].value
        assert isinstance(value, b.Arrived)
        return value.sequence_id

    def run(self, name: str, num_tokens: int, num_slots: int = 0) -> int:
        """A running sequence; its slots are those of its prompt unless said otherwise."""
        sequence_id = self.arrive(name, num_tokens)
        self.do(b.Admit([b.AdmitMember(sequence_id, num_slots or num_tokens)]))
        return sequence_id

    def fork(self, parent: int, num_children: int = 1, *tokens: int) -> list[int]:
        value = self.do(b.Fork(parent, num_children, i32(*tokens))).results[0].value
        assert isinstance(value, b.Forked)
        return list(value.child_sequence_ids)

    def computed(self, sequence_id: int, num_computed: int, *tokens: int) -> None:
        self.do(b.Commit(u64(sequence_id), i32(*tokens), i32(num_computed), i32(len(tokens))))

    def view(self, sequence_id: int) -> SequenceView:
        return sequence_view(self.manager, sequence_id)

    def table(self, sequence_id: int) -> list[int]:
        return self.view(sequence_id).block_ids.tolist()

    def tokens(self, sequence_id: int) -> list[int]:
        table = self.manager.sequences
        row = table.row_of(sequence_id)
        return table.tokens[row, : table.length[row]].tolist()

    def scheduler_state(self, sequence_id: int) -> bytes:
        table = self.manager.sequences
        return table.scheduler_state(table.row_of(sequence_id))


def pairs(copies: b.BlockCopies) -> list[tuple[int, int]]:
    return list(zip(copies.src_block_ids.tolist(), copies.dst_block_ids.tolist(), strict=True))
