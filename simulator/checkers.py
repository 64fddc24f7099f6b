"""What must hold, each check under its own name. All of them see everything."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvmem_svc.core import batch as kv
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import ApplyBatch, Mutation, Reply
from kvmem_svc.core.sequences import ROW_MASK
from kvmem_svc.core.tenants import Quota
from scheduler_svc.core import events, ops
from scheduler_svc.core.sequence import Request, SequenceGroup
from scheduler_svc.core.stopping import FinishReason
from simulator.kv_witness import KvWitness
from simulator.marks import Marks
from simulator.prefix_tree import PrefixTree
from simulator.solo_runs import SoloRuns
from simulator.worker import EOS, expect, letter_of, logprob_of

# Of one life of the memory service's state: request id and arrival number.
RecordKey = tuple[str, str, int]


class CommitLedger:
    """What the memory service has recorded: nothing may be shown before it is here."""

    def __init__(self) -> None:
        # Output tokens by candidate.
        self._recorded: dict[RecordKey, dict[int, list[int]]] = {}

    def on_recorded(self, memory: KvMemory, mutation: Mutation, reply: Reply) -> None:
        """A mutation was carried out and journalled, and its answer is not under way yet."""
        manager = memory.manager
        if not (isinstance(mutation, ApplyBatch) and isinstance(reply, kv.BatchResult)):
            return
        assert manager is not None
        life = memory.ledger.kvmem_boot_id
        for op, op_result in zip(mutation.batch.ops, reply.results, strict=True):
            if op_result.status is not kv.OpStatus.OK:
                continue
            match op, op_result.value:
                case kv.Arrive(request_id), kv.Arrived(_, arrival_number):
                    self._recorded[life, request_id, arrival_number] = {
                        one.candidate: one.output_token_ids.tolist() for one in op.candidates
                    }
                case kv.Commit(sequence_ids), _:
                    self._read(life, manager, sequence_ids.tolist())
                case kv.Fork(sequence_id), kv.Forked(child_ids):
                    self._read(life, manager, [sequence_id, *child_ids])

    def _read(self, life: str, manager: BlockManager, sequence_ids: Iterable[int]) -> None:
        table = manager.sequences
        for sequence_id in sequence_ids:
            finished = table.finished.get(sequence_id)
            if finished is not None:
                tokens = finished.token_ids[finished.num_prompt_tokens :]
                request_id, candidate = finished.request_id, finished.candidate
            elif table.is_live(sequence_id):
                row = sequence_id & ROW_MASK
                tokens = table.tokens[row, table.num_prompt_tokens[row] : table.length[row]]
                request_id = table.record_of(row).request_id
                candidate = int(table.candidate[row])
            else:  # aborted and confirmed in the same batch
                continue
            arrival_number = manager.requests[request_id].arrival_number
            self._recorded[life, request_id, arrival_number][candidate] = tokens.tolist()

    def check_accepted(self, key: RecordKey) -> None:
        expect(key in self._recorded, "accepted once safe", f"kvmem has no record of {key}")

    def check_emitted(self, key: RecordKey, candidate: int, emitted: list[int]) -> None:
        """`emitted`: all output tokens of the candidate shown so far."""
        recorded = self._recorded.get(key, {}).get(candidate, [])
        expect(
            recorded[: len(emitted)] == emitted,
            "committed before emitted",
            f"candidate {candidate} of {key}: {emitted} were shown, kvmem has {recorded}",
        )


class Checks:
    """What the checks of one world remember."""

    def __init__(self, marks: Marks) -> None:
        self.tree = PrefixTree()
        self.solo_runs = SoloRuns(self.tree)
        self.commits = CommitLedger()
        self.kv = KvWitness(self.tree, self.solo_runs, marks)

    def check_capacity_ends(
        self,
        batch: ops.Batch,
        groups: Iterable[SequenceGroup],
        geometry: kv.PoolGeometry,
        quota: Quota,
    ) -> int:
        """Only a request that cannot be served alone may end for want of blocks; how many do."""
        ended: set[int] = set()
        for op in batch.ops:
            if isinstance(op, ops.Free) and op.finish_reason is FinishReason.KV_CAPACITY:
                ended.update(op.sequence_ids)
        if not ended:
            return 0
        for group in groups:
            if any(sequence.sequence_id in ended for sequence in group.sequences):
                request = group.request
                needed = self.solo_runs.num_blocks_needed(request, geometry.block_size)
                num_blocks = min(geometry.num_blocks, quota.max_blocks or geometry.num_blocks)
                num_blocks -= self.kv.most_pinned_blocks
                expect(
                    needed > num_blocks,
                    "capacity ends are true",
                    f"{request.request_id} ended for want of blocks; alone it needs at most"
                    f" {needed} of {num_blocks}, and {self.kv.most_pinned_blocks} were pinned",
                )
        return len(ended)


def check_memory(memory: KvMemory) -> None:
    """After every mutation: the books balance, and every group is in one state."""
    manager = memory.manager
    if manager is None:
        return
    check_integrity(manager)
    table = manager.sequences
    for record in manager.requests.values():
        states = {int(table.status[sequence_id & ROW_MASK]) for sequence_id in record.live.values()}
        expect(
            len(states) <= 1,
            "groups stay together",
            f"{record.request_id} has candidates in the states {sorted(states)}",
        )


def check_blocks_are_held(
    memory: KvMemory, fence: kv.Fence, step: ops.Step, tables: Iterable[list[int]]
) -> None:
    """While a step runs, no block it may touch is free for others: not for its own session, and
    for no later one before that has taken the worker over."""
    ledger, manager = memory.ledger, memory.manager
    if manager is None or not _is_of_now(memory, fence):
        return
    if ledger.mutations_open and fence.epoch != ledger.epoch:
        return
    blocks = np.unique(
        np.concatenate(
            [np.array(table, np.int32) for table in tables]
            + [step.copy_src, step.swap_ins.dst, step.swap_outs.src]
        )
    )
    pool = manager.pool
    loose = blocks[pool.ref_counts[blocks] == 0]
    free = np.setdiff1d(loose, pool.quarantined_blocks())
    expect(
        not free.size,
        "no free block in a step",
        f"step {step.step_id} uses {free.tolist()}, which kvmem would hand out again",
    )
    host_blocks = np.concatenate([step.swap_ins.src, step.swap_outs.dst])
    free = np.intersect1d(host_blocks, manager.host.free_blocks())
    expect(
        not free.size,
        "no free block in a step",
        f"step {step.step_id} uses host blocks {free.tolist()}, which kvmem would hand out again",
    )


def check_published_blocks_stay(
    memory: KvMemory, fence: kv.Fence, step_id: int, written: Iterable[int]
) -> None:
    """Whoever has the same prefix may come to hold a published block at any moment: nobody writes
    to it, not even its only holder."""
    manager = memory.manager
    if manager is not None and _is_of_now(memory, fence):
        blocks = np.array(sorted(written), np.int32)
        published = blocks[manager.pool.cache.is_published(blocks)]
        expect(
            not published.size,
            "published blocks stay",
            f"step {step_id} writes to {published.tolist()}, which are published",
        )


def check_not_taken_over(memory: KvMemory, fence: kv.Fence) -> None:
    """No step runs once a later session may change what it reads and writes."""
    ledger = memory.ledger
    expect(
        not (_is_of_now(memory, fence) and ledger.mutations_open and fence.epoch < ledger.epoch),
        "nobody runs after a takeover",
        f"a step of epoch {fence.epoch} runs, and epoch {ledger.epoch} has confirmed the pool",
    )


def _is_of_now(memory: KvMemory, fence: kv.Fence) -> bool:
    """Whether memory service and worker are those that the fence names."""
    ledger = memory.ledger
    return (fence.kvmem_boot_id, fence.worker_boot_id) == (
        ledger.kvmem_boot_id,
        ledger.worker_boot_id,
    )


def check_victims(batch: ops.Batch) -> None:
    """Nobody gives way for want of blocks in the very batch in which an abort gives some back."""
    kinds = [(type(op), getattr(op, "finish_reason", None)) for op in batch.ops]
    victims = (
        bool({(ops.Preempt, None), (ops.SwapOut, None)} & set(kinds))
        or (ops.Free, FinishReason.KV_CAPACITY) in kinds
    )
    expect(
        not (victims and (ops.Free, FinishReason.ABORT) in kinds),
        "aborts come before victims",
        f"batch {batch.batch_seq} preempts or ends one, and frees what another had",
    )


def check_computed_once(step: ops.Step, groups: Iterable[SequenceGroup], block_size: int) -> None:
    """No two prompts that begin alike are begun in one step: the later one waits, and finds what
    the first has computed."""
    rows = zip(step.sequence_ids.tolist(), step.num_computed_tokens.tolist(), strict=True)
    begun = {sequence_id for sequence_id, num_computed in rows if not num_computed}
    leaders: dict[tuple[str, str, tuple[int, ...]], str] = {}
    for group in groups if len(begun) > 1 else ():
        request = group.request
        beginning = request.prompt_token_ids[:block_size]
        mine = not begun.isdisjoint(sequence.sequence_id for sequence in group.live)
        if mine and len(beginning) == block_size:
            key = request.tenant, request.cache_salt, beginning
            leader = leaders.setdefault(key, request.request_id)
            expect(
                leader == request.request_id,
                "one prompt is computed once",
                f"step {step.step_id} begins both {leader} and {request.request_id}",
            )


class CopyCheck:
    """Over all batches that prepare one step, its copies may be made in any order, and nobody
    is given a block which one of them, or a swap, reads or fills."""

    def __init__(self) -> None:
        self._step_id = 0
        self._sources: set[int] = set()
        self._destinations: set[int] = set()
        self._host_sources: set[int] = set()

    def on_applied(self, batch: kv.Batch, result: kv.BatchResult) -> None:
        if batch.step_id != self._step_id or batch.acknowledged_step >= batch.step_id:
            self._step_id = batch.step_id
            self._sources, self._destinations, self._host_sources = set(), set(), set()
        given = set(result.deltas.block_ids.tolist())
        for one in result.results:
            if isinstance(one.value, kv.Admitted | kv.SwappedIn):
                given.update(block for t in one.value.tables for block in t.block_ids.tolist())
        copies = result.copies
        sources, destinations = copies.src_block_ids.tolist(), copies.dst_block_ids.tolist()
        twice = given & (self._sources | self._destinations)
        crossing = set(sources) & (self._destinations | set(destinations))
        expect(
            not twice and not crossing and len(set(destinations)) == len(destinations),
            "copies of a step",
            f"step {batch.step_id}: {sources} -> {destinations}, given {sorted(given)}, after"
            f" copies from {sorted(self._sources)} to {sorted(self._destinations)}",
        )
        self._sources.update(sources, result.swap_outs.src_block_ids.tolist())
        self._destinations.update(destinations, result.swap_ins.dst_block_ids.tolist())
        self._check_host_blocks(batch.step_id, result)

    def _check_host_blocks(self, step_id: int, result: kv.BatchResult) -> None:
        given = result.swap_outs.dst_block_ids.tolist()
        self._host_sources.update(result.swap_ins.src_block_ids.tolist())
        expect(
            not self._host_sources & set(given) and len(set(given)) == len(given),
            "copies of a step",
            f"step {step_id}: host blocks {given} are given, after swap-ins from"
            f" {sorted(self._host_sources)}",
        )


class StreamCheck:
    """One caller's request, over all its streams: in order, exactly once, and nothing but its
    solo run."""

    def __init__(self, request: Request, solo_runs: SoloRuns, name: str) -> None:
        self.request = request
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        # On the stream of now, and on any.
        self.accepted = self.ever_accepted = False
        self._logprobs: dict[int, float] = {}
        self._solo_runs = solo_runs
        self._name = name

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def received(self) -> dict[int, events.Received]:
        """What the caller says it has."""
        return {
            index: events.Received(
                tuple(self.tokens[index]), self.finish.get(index), self._logprobs[index]
            )
            for index in self.tokens
        }

    def on_stream(self) -> None:
        """Another stream begins."""
        self.accepted = False

    def on_accepted(self) -> None:
        self._expect(not self.accepted, "accepted twice")
        self.accepted = self.ever_accepted = True

    def on_delta(self, delta: events.CandidateDelta) -> None:
        self._expect(self.accepted, "output before the request was accepted")
        self._expect(
            delta.candidate not in self.finish, f"output of {delta.candidate} after its end"
        )
        got = self.tokens.setdefault(delta.candidate, [])
        self._expect(
            delta.token_offset == len(got),
            f"candidate {delta.candidate} has {len(got)} tokens, goes on at {delta.token_offset}",
        )
        got.extend(delta.token_ids)
        solo = self._solo_runs.of(self.request, delta.candidate)
        self._expect(
            tuple(got) == solo[: len(got)],
            f"candidate {delta.candidate} is {got}, its solo run {list(solo)}",
        )
        self._check_rest(delta)
        if delta.finish_reason is not None:
            self.finish[delta.candidate] = delta.finish_reason
            self._check_finish(delta, solo)

    def _check_rest(self, delta: events.CandidateDelta) -> None:
        """What does not follow from the token ids, or is made of them anew after a death."""
        self._logprobs[delta.candidate] = delta.cumulative_logprob
        logprob = sum(map(logprob_of, self.tokens[delta.candidate]))
        self._expect(
            delta.cumulative_logprob == logprob,
            f"candidate {delta.candidate} has the log-probability {delta.cumulative_logprob}, not"
            f" {logprob}",
        )
        ends = () if self.request.params.ignore_eos else (EOS,)
        text = "".join(letter_of(token) for token in delta.token_ids if token not in ends)
        self._expect(delta.text == text, f"candidate {delta.candidate} reads {delta.text!r}")

    def _check_finish(self, delta: events.CandidateDelta, solo: tuple[int, ...]) -> None:
        got, reason = self.tokens[delta.candidate], delta.finish_reason
        if reason is FinishReason.KV_CAPACITY:  # whether it was right to, is checked where it ends
            return
        stopped = solo[-1] == EOS and not self.request.params.ignore_eos
        right = FinishReason.STOP if stopped else FinishReason.LENGTH
        self._expect(
            len(got) == len(solo) and reason is right,
            f"candidate {delta.candidate} ended with {reason!r} after {len(got)} of {len(solo)}",
        )

    def on_last(self) -> None:
        n = self.request.params.n
        self._expect(len(self.finish) == n, f"{len(self.finish)} of {n} candidates have an end")

    def _expect(self, condition: object, message: str) -> None:
        expect(condition, "streams are solo runs", f"{self._name}: {message}")


def check_empty(memory: KvMemory, num_blocks: int) -> None:
    """Everybody is gone: nothing of anybody is left."""
    stats = memory.stats()
    levels = stats.levels
    num_available = levels.num_free_blocks + levels.num_cached_blocks
    num_host_blocks = stats.geometry.num_host_blocks if stats.geometry is not None else 0
    expect(
        (stats.num_requests, stats.num_sequences, num_available) == (0, 0, num_blocks)
        and levels.num_free_host_blocks == num_host_blocks,
        "nothing left behind",
        f"{stats.num_requests} requests, {stats.num_sequences} sequences,"
        f" {num_available} of {num_blocks} blocks free or cached,"
        f" {levels.num_free_host_blocks} of {num_host_blocks} host blocks free",
    )
