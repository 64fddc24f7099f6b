"""The scheduler's machine against the real memory core and a worker that checks every slot.

The worker tags each slot it is told to write with the tokens before it, and checks the tag of
every slot it reads through the tables it was given: a double allocation, a stale table or a
missed copy-on-write is an error at the step where it happens. Its next token is a hash of the
prefix, so every stream must equal its solo run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from benchmarks.inprocess import apply_batch, levels_of
from kvmem_svc.core import batch as kv
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.memory import KvMemory
from scheduler_svc.core import events, ops
from scheduler_svc.core.machine import Machine, SchedulerConfig
from scheduler_svc.core.params import SamplingParams
from scheduler_svc.core.sequence import Request

VOCAB = 50
EOS = 0


def next_token(prefix: tuple[int, ...], seed: int, sample_index: int) -> int:
    """Depends on everything a real draw depends on; about one in VOCAB is the eos."""
    key = repr((prefix, seed, sample_index)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") % VOCAB


def solo_run(request: Request, candidate: int) -> tuple[int, ...]:
    """What a candidate of the request must be, whatever happens around it."""
    params = request.params
    output: list[int] = []
    while len(output) < params.max_tokens:
        prefix = (*request.prompt_token_ids, *output)
        output.append(next_token(prefix, params.seed, params.first_sample_index + candidate))
        if output[-1] == EOS:
            break
    return tuple(output)


class Letters:
    """Text streams: token 7 is the letter of code 7 + 64, at once."""

    def push(self, token_id: int) -> str:
        return chr(64 + token_id)

    def flush(self) -> str:
        return ""


@dataclass
class KnownSequence:
    table: list[int]
    table_version: int
    seed: int
    sample_index: int


@dataclass
class TagWorker:
    """KV slots hold the token prefix they were computed from."""

    block_size: int
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    known: dict[int, KnownSequence] = field(default_factory=dict)
    last_step_id: int = 0
    num_copies: int = 0
    max_tokens_in_step: int = 0

    def execute(self, step: ops.Step) -> ops.StepResult:
        assert step.step_id > self.last_step_id
        self.last_step_id = step.step_id
        self._copy(step)
        self._update_tables(step)
        rows = self._write(step)
        sampled = [
            next_token(prefix, known.seed, known.sample_index + j)
            for known, prefix, num_samples in rows
            for j in range(num_samples)
        ]
        return ops.StepResult(
            step.step_id, np.array(sampled, np.int32), np.zeros(len(sampled), np.float32)
        )

    def _copy(self, step: ops.Step) -> None:
        assert len(set(step.copy_dst.tolist())) == len(step.copy_dst)
        before = dict(self.slots)
        for src, dst in zip(step.copy_src.tolist(), step.copy_dst.tolist(), strict=True):
            self.num_copies += 1
            for slot in range(self.block_size):
                self.slots.pop(dst * self.block_size + slot, None)
                if (tag := before.get(src * self.block_size + slot)) is not None:
                    self.slots[dst * self.block_size + slot] = tag

    def _update_tables(self, step: ops.Step) -> None:
        for sequence_id in step.dropped_sequence_ids.tolist():
            del self.known[sequence_id]
        for start in step.starts:
            self.known[start.sequence_id] = KnownSequence(
                list(start.block_ids), start.table_version, start.params.seed, start.sample_index
            )
        for sequence_id, index, block_id, version in zip(
            step.deltas.sequence_ids.tolist(),
            step.deltas.table_indices.tolist(),
            step.deltas.block_ids.tolist(),
            step.deltas.table_versions.tolist(),
            strict=True,
        ):
            known = self.known[sequence_id]
            known.table[index : index + 1] = [block_id]
            known.table_version = version

    def _slot(self, known: KnownSequence, position: int) -> int:
        block = known.table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(self, step: ops.Step) -> list[tuple[KnownSequence, tuple[int, ...], int]]:
        """Write all rows, then read them all back through their tables, as a layer does."""
        rows, written, at = [], set(), 0
        prefixes: dict[int, tuple[int, ...]] = {}
        columns = zip(
            step.sequence_ids.tolist(),
            step.table_versions.tolist(),
            step.num_input_tokens.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_samples.tolist(),
            strict=True,
        )
        pending = []
        for sequence_id, version, count, computed, num_samples in columns:
            known = self.known[sequence_id]
            assert known.table_version == version, "table version"
            tokens = tuple(step.input_token_ids[at : at + count].tolist())
            at += count
            pending.append((sequence_id, known, computed, tokens, num_samples))
        self.max_tokens_in_step = max(self.max_tokens_in_step, at)
        # A row may build on slots that a sibling's row writes in this very step, so prefixes
        # are resolved in the order in which they become known.
        for sequence_id, known, computed, tokens, _ in sorted(pending, key=lambda row: row[2]):
            before: tuple[int, ...] = ()
            if computed:
                before = self.slots[self._slot(known, computed - 1)]
                assert len(before) == computed, "KV of another position"
            prefix = before
            for offset, token in enumerate(tokens):
                prefix = (*prefix, token)
                slot = self._slot(known, computed + offset)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = prefix
            prefixes[sequence_id] = prefix
        for sequence_id, known, _, _, num_samples in pending:
            prefix = prefixes[sequence_id]
            for position in range(len(prefix)):
                tag = self.slots[self._slot(known, position)]
                assert tag == prefix[: position + 1], "KV of another sequence"
            rows.append((known, prefix, num_samples))
        return rows


@dataclass
class Caller:
    """What one caller has received."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, object] = field(default_factory=dict)
    accepted: bool = False
    done: bool = False
    aborted: bool = False
    rejected: str = ""


class World:
    """One machine, one memory core, one worker; batches and steps complete when told."""

    def __init__(
        self, *, num_blocks: int, block_size: int = 4, config: SchedulerConfig | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.memory = KvMemory("kvmem-boot", max_sequences=512)
        session = self.memory.open_session("test", 0, held_by_stream=True)
        bare = kv.Fence(session.session_id, session.epoch, "kvmem-boot")
        geometry = kv.PoolGeometry(num_blocks, block_size, max_model_len=4096)
        self.memory.attach_pool(bare, "worker-boot", geometry, 0)
        self.fence = kv.Fence(session.session_id, session.epoch, "kvmem-boot", "worker-boot")
        self.worker = TagWorker(block_size)
        self.machine = Machine(config or SchedulerConfig(max_waiting=100), (EOS,), Letters)
        self.callers: dict[str, Caller] = {}
        self.batch: ops.Batch | None = None
        self.step: ops.Step | None = None
        self.num_batches = 0
        self.preemptions = 0
        self.now_s = 0.0
        self._handle(
            events.Connected(1, 0, num_blocks, block_size, levels_of(self.memory.levels()))
        )

    def arrive(self, request_id: str, prompt: list[int], **params: object) -> Caller:
        request = Request(request_id, tuple(prompt), SamplingParams(**params))  # type: ignore[arg-type]
        caller = self.callers[request_id] = Caller(request)
        self._handle(events.RequestArrived(request))
        return caller

    def abort(self, request_id: str) -> None:
        self.callers[request_id].aborted = True
        self._handle(events.AbortRequested(request_id))

    def deliver(self, request_id: str) -> None:
        self._handle(events.Delivered(request_id))

    def finish_batch(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self.num_batches += 1
        self.preemptions += sum(isinstance(op, ops.Preempt) for op in batch.ops)
        result = apply_batch(self.memory, batch, self.fence, 0)
        assert self.memory.manager is not None
        check_integrity(self.memory.manager)
        self._handle(events.BatchApplied(result))

    def finish_step(self) -> None:
        assert self.step is not None
        step, self.step = self.step, None
        self._handle(events.StepExecuted(self.worker.execute(step)))

    def run(self, limit: int = 20_000) -> None:
        """Let everything finish, every caller taking what it gets."""
        for _ in range(limit):
            if self.batch is not None:
                self.finish_batch()
            elif self.step is not None:
                self.finish_step()
            else:
                return
        raise AssertionError(f"not at rest after {limit} events")

    def assert_empty(self) -> None:
        stats = self.memory.stats()
        assert self.machine.idle
        assert stats.num_requests == 0
        assert stats.num_sequences == 0
        assert stats.levels.num_free_blocks == self.num_blocks
        # The worker hears with the next step of what it may forget.
        self.arrive("last", [1], max_tokens=1)
        self.run()
        assert len(self.worker.known) == 1
        del self.callers["last"]

    def assert_right(self, caller: Caller) -> None:
        """Every candidate is what it would be alone, token for token."""
        assert caller.done, caller
        for candidate in range(caller.request.params.n):
            assert tuple(caller.tokens[candidate]) == solo_run(caller.request, candidate)

    def _handle(self, event: events.Event) -> None:
        self.now_s += 1.0
        delivered = []
        for command in self.machine.handle(event, self.now_s):
            match command:
                case events.ApplyBatch(batch):
                    assert self.batch is None, "two batches in flight"
                    self.batch = batch
                case events.ExecuteStep(step):
                    assert self.step is None, "two steps in flight"
                    self.step = step
                case events.Accepted(request_id):
                    self.callers[request_id].accepted = True
                case events.Emit(request_id, deltas, times):
                    self._receive(self.callers[request_id], deltas, last=times is not None)
                    if times is not None:
                        delivered.append(request_id)
                case events.Reject(request_id, reason):
                    self.callers[request_id].rejected = reason
        for request_id in delivered:
            self.deliver(request_id)

    def _receive(
        self, caller: Caller, deltas: tuple[events.CandidateDelta, ...], *, last: bool
    ) -> None:
        assert caller.accepted
        assert not caller.done
        assert not caller.aborted, "output after an abort"
        for delta in deltas:
            assert delta.index not in caller.finish, "output after the finish reason"
            caller.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                caller.finish[delta.index] = delta.finish_reason
        caller.done = last
        if last:
            assert len(caller.finish) == caller.request.params.n
