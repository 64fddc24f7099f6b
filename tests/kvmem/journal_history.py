"""Histories of mutations, drawn from numbers and carried out on a real core.

A command is a kind and a few numbers, which choose among what is there at that moment; so any list
of commands is a history, and a shorter list is a shorter one. Batches are made of wire messages,
as the servicer gets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvmem_svc import convert
from kvmem_svc.core import batch as b
from kvmem_svc.core import mutations as m
from kvmem_svc.core.errors import NoFreeBlocks, TenantQuota
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.prefix_cache import Domain
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.tenants import Quota
from kvmem_svc.core.views import SequenceView, sequence_views
from octavo.service.columns import I32, U64, pack
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import types_pb2

BLOCK_SIZE, MAX_MODEL_LEN, MAX_SEQUENCES = 3, 17, 7
GEOMETRY = b.PoolGeometry(14, BLOCK_SIZE, MAX_MODEL_LEN, 4096, "bfloat16", 9)

OnMutation = Callable[[m.Mutation, m.Reply], None]
Command = tuple[str, int, int, int]

# What a history is made of, the common things several times.
KINDS = (
    *("arrive", "arrive", "arrive_again", "admit", "admit", "admit", "share"),
    *("commit", "decode", "decode", "decode", "decode", "fork", "fork", "append", "preempt"),
    *("family", "family", "family", "family", "free", "confirm", "several", "acknowledge"),
    *("pin", "unpin", "configure", "swap_out", "swap_out", "swap_in", "swap_in"),
    *("takeover", "takeover", "new_worker", "expire", "close", "send_again", "mistake"),
)
numbers = st.integers(0, 40)
commands = st.tuples(st.sampled_from(KINDS), numbers, numbers, numbers)
# Long enough to reach what takes several steps: a lag, a fork, a copy that was never made.
histories = st.lists(commands, min_size=25, max_size=80)


@dataclass
class Sent:
    """A batch and what was replied to it."""

    batch: b.Batch
    result: b.BatchResult


class History:
    """Carries out commands. `on_mutation` is called with each mutation that was carried out."""

    def __init__(self, memory: KvMemory, on_mutation: OnMutation) -> None:
        self.memory = memory
        self.on_mutation = on_mutation
        self.num_workers = 0
        self.num_requests = 0
        self.sent: list[Sent] = []

    def run(self, drawn: Sequence[Command]) -> None:
        if self.memory.manager is None:
            self.new_worker(0, 0, 0)
        for kind, *arguments in drawn:
            getattr(self, kind)(*arguments)

    # --- mutations ---------------------------------------------------------------------

    def commit_mutation(self, mutation: m.Mutation) -> m.Reply:
        reply = self.memory.commit(mutation)
        self.on_mutation(mutation, reply)
        return reply

    def ready(self) -> None:
        """A session whose mutations are open."""
        if self.memory.ledger.session is None or not self.memory.ledger.mutations_open:
            self.takeover(0, 0, 0)

    def send(self, *ops: pb.Op, steps: int = 0, acknowledge: int = 0) -> b.BatchResult:
        self.ready()
        memory = self.memory
        step_id = max(memory.last_step_id, 1) + steps
        acknowledged = min(memory.acknowledged_step + acknowledge, step_id)
        message = pb.Batch(
            fence=convert.fence_to_pb(memory.ledger.fence()),
            batch_seq=memory.ledger.next_batch_seq,
            step=pb.StepOps(step_id=step_id, acknowledged_step=acknowledged, ops=ops),
        )
        batch = convert.batch_from_pb(message)
        result = self.commit_mutation(m.ApplyBatch(batch))
        assert isinstance(result, b.BatchResult)
        self.sent.append(Sent(batch, result))
        return result

    def takeover(self, executed: int, other: int, _: int) -> None:
        """A new session, and the worker as it was: it has executed some of what was prepared."""
        memory = self.memory
        self.sent = []
        self.commit_mutation(m.GrantSession(f"holder {other}", f"host:{other}" if other else ""))
        low, high = memory.acknowledged_step, max(memory.last_step_id, memory.acknowledged_step)
        last = low + executed % (high - low + 2)
        assert memory.manager is not None
        geometry = memory.manager.geometry
        self.commit_mutation(m.ConfirmPool(f"worker {self.num_workers}", geometry, last))

    def new_worker(self, larger: int, _a: int, _b: int) -> None:
        if self.memory.ledger.session is None:
            self.commit_mutation(m.GrantSession("holder"))
        self.num_workers += 1
        self.sent = []
        geometry = dataclasses.replace(
            GEOMETRY, num_blocks=14 + larger % 3, block_size=BLOCK_SIZE + larger % 2
        )
        self.commit_mutation(m.ConfirmPool(f"worker {self.num_workers}", geometry))

    def close(self, *_: int) -> None:
        self.commit_mutation(m.CloseSession())

    def expire(self, which: int, count: int, _: int) -> None:
        self.close()
        manager = self.memory.manager
        assert manager is not None
        names = [*list(manager.requests)[which % 4 :][: count % 3], "nobody"]
        self.commit_mutation(m.Expire(tuple(names)))

    def pin(self, length: int, domain: int, public: int) -> None:
        self.ready()
        tokens = np.arange(1 + length % 9, dtype=np.int32)
        who = Domain("t" * (domain % 2), "s" * (domain // 2 % 2))
        with contextlib.suppress(NoFreeBlocks, TenantQuota):
            self.commit_mutation(m.Pin(who, tokens, domain, public % 2 == 0))

    def unpin(self, which: int, *_: int) -> None:
        manager = self.memory.manager
        assert manager is not None
        pins = [*manager.pins, 77]
        self.commit_mutation(m.Unpin(pins[which % len(pins)]))

    def configure(self, enabled: int, blocks: int, sequences: int) -> None:
        quota = Quota(*((0, 0) if blocks % 2 else (1 + blocks % 9, 1 + sequences % 6)))
        self.commit_mutation(m.Configure(enabled % 8 > 0, quota))

    # --- ops ---------------------------------------------------------------------------

    def views(self, *statuses: Status) -> list[SequenceView]:
        assert self.memory.manager is not None
        views, _ = sequence_views(self.memory.manager, [], "", 1000)
        return [view for view in views if view.status in statuses]

    def pick(self, which: int, *statuses: Status) -> SequenceView | None:
        views = self.views(*statuses)
        return views[which % len(views)] if views else None

    def arrive(self, length: int, candidates: int, tenant: int) -> None:
        self.send(pb.Op(arrive=self._arrival(length, candidates, tenant)))

    def _arrival(self, length: int, candidates: int, tenant: int) -> pb.Arrive:
        self.num_requests += 1
        return pb.Arrive(
            request_id=f"request {self.num_requests}",
            prompt_token_ids=range(1 + length % 8),
            num_candidates=1 + candidates % 4,
            tenant="t" * (tenant % 2),
            request_spec=bytes([tenant]) * (tenant % 5),
            request_digest=b"d" * (tenant % 3),
            cache_salt="s" * (tenant // 2 % 2),
        )

    def arrive_again(self, length: int, output: int, which: int) -> None:
        """A request of another life, some of whose candidates have ended."""
        arrival = self._arrival(length, 3, which)
        for candidate in range(1 + which % 3):
            reason = (which >> candidate) % 3
            arrival.candidates.add(
                candidate=candidate,
                output_token_ids=pack(list(range(output % 5 + candidate)), I32),
                finish_reason=types_pb2.FinishReason.Name(reason),
                scheduler_state=b"s" * (output % 20),
            )
        self.send(pb.Op(arrive=arrival))

    def admit(self, which: int, more: int, steps: int) -> None:
        view = self.pick(which, Status.WAITING)
        if view is not None:
            slots = min(view.num_tokens + more % 4, MAX_MODEL_LEN)
            member = pb.AdmitMember(
                sequence_id=view.sequence_id, num_slots=slots, use_prefix_cache=more % 5 > 0
            )
            self.send(pb.Op(admit=pb.Admit(members=[member])), steps=steps % 2)

    def share(self, which: int, source: int, blocks: int) -> None:
        view, holder = self.pick(which, Status.WAITING), self.pick(source, Status.RUNNING)
        if view is not None and holder is not None:
            member = pb.AdmitMember(
                sequence_id=view.sequence_id,
                num_slots=min(view.num_tokens, MAX_MODEL_LEN),
                share_from=holder.sequence_id,
                num_shared_blocks=1 + blocks % 2,
                use_prefix_cache=blocks % 3 > 0,
            )
            self.send(pb.Op(admit=pb.Admit(members=[member])))

    def commit(self, which: int, count: int, state: int) -> None:
        view = self.pick(which, Status.RUNNING, Status.WAITING)
        if view is None:
            return
        count = min(count % 3, MAX_MODEL_LEN + 1 - view.num_tokens)
        op = pb.Commit(
            sequence_ids=pack([view.sequence_id], U64),
            num_tokens=pack([count], I32),
            token_ids=pack([state] * count, I32),
            num_computed_tokens=pack([view.num_computed_tokens], I32),
        )
        if state % 3 == 0:
            op.state_words = pack([state * 2**40 + 1], U64)
        if state % 4 == 0:
            op.states.add(sequence_id=view.sequence_id, scheduler_state=b"x" * (state % 7))
        self.send(pb.Op(commit=op))

    def decode(self, token: int, ahead: int, lag: int) -> None:
        """A step of all that run: one token and one slot more each."""
        views = [v for v in self.views(Status.RUNNING) if v.num_tokens < MAX_MODEL_LEN]
        ids = pack([v.sequence_id for v in views], U64)
        slots = [min(v.num_tokens + 1 + ahead % 2, MAX_MODEL_LEN) for v in views]
        capacity = self._block_size()
        computed = [min(v.num_tokens, v.block_ids.size * capacity) for v in views]
        commit = pb.Commit(
            sequence_ids=ids,
            token_ids=pack([token] * len(views), I32),
            num_computed_tokens=pack(computed, I32),
            state_words=pack([token] * len(views), U64) if lag % 2 else b"",
        )
        reserve = pb.Reserve(sequence_ids=ids, num_slots=pack(slots, I32))
        if ahead % 3 == 0 and len(views) > 1:
            reserve.group_sizes = pack([2, *[1] * (len(views) - 2)], I32)
        self.send(pb.Op(commit=commit), pb.Op(reserve=reserve), steps=1, acknowledge=lag % 3)

    def _block_size(self) -> int:
        assert self.memory.manager is not None
        return self.memory.manager.geometry.block_size

    def fork(self, which: int, children: int, tokens: int) -> None:
        view = self.pick(which, Status.RUNNING)
        if view is not None:
            count = 1 + children % 2
            op = pb.Fork(sequence_id=view.sequence_id, num_children=count)
            op.token_ids.extend([tokens] * ((1 + count) * (tokens % 2)))
            if tokens % 3 == 0:
                op.state_words = pack(list(range(1 + count)), U64)
            self.send(pb.Op(fork=op))

    def family(self, length: int, lag: int, more: int) -> None:
        """A request with two candidates, of which one must copy the block both write to."""
        self.send(pb.Op(arrive=self._arrival(length, 1 + more % 3, 0)))
        self.admit(-1, 1, 0)
        self.fork(-1, 0, 1)
        self.decode(more, more, lag)

    def append(self, which: int, count: int, steps: int) -> None:
        view = self.pick(which, Status.RUNNING)
        if view is not None:
            op = pb.Append(sequence_id=view.sequence_id, token_ids=[7] * (count % 4))
            self.send(pb.Op(append=op), steps=steps % 2)

    def preempt(self, which: int, *_: int) -> None:
        view = self.pick(which, Status.RUNNING, Status.SWAPPED)
        if view is not None:
            self.send(pb.Op(preempt=pb.Preempt(sequence_ids=[view.sequence_id])))

    def swap_out(self, which: int, alone: int, steps: int) -> None:
        """All of a group that run, or one."""
        view = self.pick(which, Status.RUNNING)
        if view is not None:
            group = [v for v in self.views(Status.RUNNING) if v.request_id == view.request_id]
            ids = [v.sequence_id for v in (group if alone % 3 else [view])]
            self.send(pb.Op(swap_out=pb.SwapOut(sequence_ids=ids)), steps=steps % 2)

    def swap_in(self, which: int, more: int, steps: int) -> None:
        view = self.pick(which, Status.SWAPPED)
        if view is not None:
            group = [v for v in self.views(Status.SWAPPED) if v.request_id == view.request_id]
            members = [
                pb.SwapInMember(
                    sequence_id=v.sequence_id,
                    num_slots=min(v.num_tokens + more % 3, MAX_MODEL_LEN),
                )
                for v in (group if more % 4 else [view])
            ]
            self.send(pb.Op(swap_in=pb.SwapIn(members=members)), steps=steps % 2)

    def free(self, which: int, reason: int, _: int) -> None:
        view = self.pick(which, Status.RUNNING, Status.WAITING, Status.SWAPPED)
        if view is not None:
            name = types_pb2.FinishReason.Name(reason % 5)
            op = pb.Free(sequence_ids=[view.sequence_id], finish_reason=name)
            self.send(pb.Op(free=op))

    def confirm(self, which: int, *_: int) -> None:
        view = self.pick(which, Status.FINISHED)
        if view is not None:
            self.send(pb.Op(confirm=pb.Confirm(request_id=view.request_id)))

    def several(self, first: int, second: int, third: int) -> None:
        """One batch of several ops."""
        ops = [pb.Op(arrive=self._arrival(first, second, third))]
        for view in self.views(Status.WAITING)[: second % 3]:
            member = pb.AdmitMember(sequence_id=view.sequence_id, num_slots=view.num_tokens)
            ops.append(pb.Op(admit=pb.Admit(members=[member])))
        ops.extend(
            pb.Op(
                free=pb.Free(
                    sequence_ids=[view.sequence_id], finish_reason=types_pb2.FINISH_REASON_STOP
                )
            )
            for view in self.views(Status.RUNNING)[: third % 2]
        )
        self.send(*ops, steps=first % 2, acknowledge=second % 2)

    def acknowledge(self, steps: int, count: int, _: int) -> None:
        self.send(steps=steps % 2, acknowledge=count % 4)

    def mistake(self, which: int, *_: int) -> None:
        self.send(
            pb.Op(preempt=pb.Preempt(sequence_ids=[which << 32])),
            pb.Op(confirm=pb.Confirm(request_id="nobody")),
            pb.Op(admit=pb.Admit(members=[pb.AdmitMember(sequence_id=which)] * 2)),
        )

    def send_again(self, which: int, *_: int) -> None:
        """No mutation: the same result, and nothing for the journal."""
        kept = self.memory.ledger.replies
        if kept and self.memory.ledger.mutations_open:
            batch_seq = list(kept)[which % len(kept)]
            sent = next(one for one in self.sent if one.batch.batch_seq == batch_seq)
            assert self.memory.commit(m.ApplyBatch(sent.batch)) is kept[batch_seq][1]


def result_bytes(result: m.Reply) -> bytes:
    """A batch's result as it goes over the wire."""
    assert isinstance(result, b.BatchResult)
    return convert.result_to_pb(result).SerializeToString(deterministic=True)
