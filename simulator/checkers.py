"""What must hold, each check under its own name. All of them see everything."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvmem_svc.core import batch as kv
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.sequences import ROW_MASK
from scheduler_svc.core import events, ops
from scheduler_svc.core.sequence import Request
from scheduler_svc.core.stopping import FinishReason
from simulator.worker import EOS, PrefixTree, expect, solo_run

# Of one life of the memory service, one epoch, one request.
RecordKey = tuple[str, int, str]


class SoloRuns:
    """What every candidate must be, computed once."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._known: dict[tuple[Request, int], tuple[int, ...]] = {}

    def of(self, request: Request, candidate: int) -> tuple[int, ...]:
        key = (request, candidate)
        if key not in self._known:
            self._known[key] = solo_run(request, candidate, self._tree)
        return self._known[key]

    def num_blocks_needed(self, request: Request, block_size: int) -> int:
        """The most blocks the request can need at a time, alone in the pool.

        The last token drawn needs no slot; candidates share the prompt's full blocks.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        num_shared = num_prompt_tokens // block_size
        return num_shared + sum(
            -(-(num_prompt_tokens + len(self.of(request, i)) - 1) // block_size) - num_shared
            for i in range(request.params.n)
        )


class CommitLedger:
    """What the memory service has, batch by batch: nothing may be shown before it is here."""

    def __init__(self) -> None:
        # Output tokens by candidate.
        self._committed: dict[RecordKey, dict[int, list[int]]] = {}

    def on_applied(self, memory: KvMemory, batch: ops.Batch, result: ops.BatchResult) -> None:
        """A batch was carried out, and its answer is not under way yet."""
        manager = memory.manager
        assert manager is not None
        session = memory.ledger.session
        assert session is not None
        where = (memory.ledger.kvmem_boot_id, session.epoch)
        for op, op_result in zip(batch.ops, result.results, strict=True):
            if op_result.status is not ops.OpStatus.OK:
                continue
            match op:
                case ops.Arrive(request):
                    self._committed[*where, request.request_id] = {}
                case ops.Commit(sequence_ids):
                    self._read(where, manager, sequence_ids.tolist())
                case ops.Fork(sequence_id):
                    children = op_result.child_sequence_ids
                    self._read(where, manager, [sequence_id, *children])

    def _read(
        self, where: tuple[str, int], manager: BlockManager, sequence_ids: Iterable[int]
    ) -> None:
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
            self._committed[*where, request_id][candidate] = tokens.tolist()

    def check_accepted(self, key: RecordKey) -> None:
        expect(key in self._committed, "accepted once safe", f"kvmem has no record of {key}")

    def check_emitted(self, key: RecordKey, candidate: int, emitted: list[int]) -> None:
        """`emitted`: all output tokens of the candidate shown so far."""
        committed = self._committed.get(key, {}).get(candidate, [])
        expect(
            committed[: len(emitted)] == emitted,
            "committed before emitted",
            f"candidate {candidate} of {key}: {emitted} were shown, kvmem has {committed}",
        )


class Checks:
    """What the checks of one world remember."""

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.solo_runs = SoloRuns(self.tree)
        self.commits = CommitLedger()

    def check_capacity_end(self, request: Request, geometry: kv.PoolGeometry) -> None:
        """Only a request that cannot be served alone may end for want of blocks."""
        needed = self.solo_runs.num_blocks_needed(request, geometry.block_size)
        expect(
            needed > geometry.num_blocks,
            "capacity ends are true",
            f"{request.request_id} ended for want of blocks; alone it needs at most {needed} of"
            f" {geometry.num_blocks}",
        )


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
    """While a step of the newest session runs, no block it may touch is free for others."""
    ledger, manager = memory.ledger, memory.manager
    if manager is None or ledger.session is None or ledger.fence() != fence:
        return
    blocks = np.unique(
        np.concatenate([np.array(table, np.int32) for table in tables] + [step.copy_src])
    )
    pool = manager.pool
    loose = blocks[pool.ref_counts[blocks] == 0]
    free = np.setdiff1d(loose, pool.quarantined_blocks())
    expect(
        not free.size,
        "no free block in a step",
        f"step {step.step_id} uses {free.tolist()}, which kvmem would hand out again",
    )


def check_victims(batch: ops.Batch) -> None:
    """Nobody gives way for want of blocks in the very batch in which an abort gives some back."""
    kinds = [(type(op), getattr(op, "finish_reason", None)) for op in batch.ops]
    victims = (ops.Preempt, None) in kinds or (ops.Free, FinishReason.KV_CAPACITY) in kinds
    expect(
        not (victims and (ops.Free, FinishReason.ABORT) in kinds),
        "aborts come before victims",
        f"batch {batch.batch_seq} preempts or ends one, and frees what another had",
    )


class CopyCheck:
    """Over all batches that prepare one step, its copies may be made in any order, and nobody
    is given a block which one of them reads or fills."""

    def __init__(self) -> None:
        self._step_id = 0
        self._sources: set[int] = set()
        self._destinations: set[int] = set()

    def on_applied(self, batch: ops.Batch, result: ops.BatchResult) -> None:
        if batch.step_id != self._step_id or batch.acknowledged_step >= batch.step_id:
            self._step_id = batch.step_id
            self._sources, self._destinations = set(), set()
        given = set(result.deltas.block_ids.tolist())
        for one in result.results:
            if not one.child_sequence_ids:
                given.update(block for table in one.tables for block in table.block_ids)
        sources, destinations = result.copy_src.tolist(), result.copy_dst.tolist()
        twice = given & (self._sources | self._destinations)
        crossing = set(sources) & (self._destinations | set(destinations))
        expect(
            not twice and not crossing and len(set(destinations)) == len(destinations),
            "copies of a step",
            f"step {batch.step_id}: {sources} -> {destinations}, given {sorted(given)}, after"
            f" copies from {sorted(self._sources)} to {sorted(self._destinations)}",
        )
        self._sources.update(sources)
        self._destinations.update(destinations)


class StreamCheck:
    """One caller's stream: in order, exactly once, and nothing but its solo run."""

    def __init__(self, request: Request, solo_runs: SoloRuns, name: str) -> None:
        self.request = request
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.accepted = False
        self._solo_runs = solo_runs
        self._name = name

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def num_expected_tokens(self) -> int:
        params = self.request.params
        return sum(len(self._solo_runs.of(self.request, i)) for i in range(params.n))

    def on_accepted(self) -> None:
        self._expect(not self.accepted, "accepted twice")
        self.accepted = True

    def on_delta(self, delta: events.CandidateDelta) -> None:
        self._expect(self.accepted, "output before the request was accepted")
        self._expect(delta.index not in self.finish, f"output of {delta.index} after its end")
        got = self.tokens.setdefault(delta.index, [])
        got.extend(delta.token_ids)
        solo = self._solo_runs.of(self.request, delta.index)
        self._expect(
            tuple(got) == solo[: len(got)],
            f"candidate {delta.index} is {got}, its solo run {list(solo)}",
        )
        if delta.finish_reason is not None:
            self.finish[delta.index] = delta.finish_reason
            self._check_finish(delta, solo)

    def _check_finish(self, delta: events.CandidateDelta, solo: tuple[int, ...]) -> None:
        got, reason = self.tokens[delta.index], delta.finish_reason
        if reason is FinishReason.KV_CAPACITY:  # whether it was right to, is checked where it ends
            return
        stopped = solo[-1] == EOS and not self.request.params.ignore_eos
        right = FinishReason.STOP if stopped else FinishReason.LENGTH
        self._expect(
            len(got) == len(solo) and reason is right,
            f"candidate {delta.index} ended with {reason!r} after {len(got)} of {len(solo)} tokens",
        )

    def on_last(self) -> None:
        n = self.request.params.n
        self._expect(len(self.finish) == n, f"{len(self.finish)} of {n} candidates have an end")

    def _expect(self, condition: object, message: str) -> None:
        expect(condition, "streams are solo runs", f"{self._name}: {message}")


def check_empty(memory: KvMemory, num_blocks: int) -> None:
    """Everybody is gone: nothing of anybody is left."""
    stats = memory.stats()
    expect(
        (stats.num_requests, stats.num_sequences, stats.levels.num_free_blocks)
        == (0, 0, num_blocks),
        "nothing left behind",
        f"{stats.num_requests} requests, {stats.num_sequences} sequences,"
        f" {stats.levels.num_free_blocks} of {num_blocks} blocks free",
    )
