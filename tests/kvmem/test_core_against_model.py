"""The memory core against the naive model, with a worker that runs steps behind."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus
from kvmem_svc.core.errors import BatchConflict
from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.invariants import check_integrity
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Expire, Mutation, PoolConfirmed, Reply, Session
from kvmem_svc.core.prefix_cache import Chain, Domain
from kvmem_svc.core.sequences import Status
from kvmem_svc.core.views import SequenceView, adopted_requests, sequence_views
from tests.kvmem.naive import (
    Content,
    Moves,
    NaiveMemory,
    NaiveRequest,
    NaiveSequence,
    NaiveWorker,
    Work,
    expect,
)

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, MAX_SEQUENCES = 14, 3, 17, 7
NUM_HOST_BLOCKS = 8
GEOMETRY = b.PoolGeometry(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, num_host_blocks=NUM_HOST_BLOCKS)
MAX_IN_FLIGHT = 3

token = st.integers(0, 1)
# Prompts with prefixes in common.
FAMILY = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0]
prompts = st.builds(
    lambda length, tail: FAMILY[:length] + tail,
    st.integers(1, 9),
    st.lists(token, max_size=2),
)
# Few, so that they meet; most requests have none.
domains = st.sampled_from([("", ""), ("", ""), ("", ""), ("t", ""), ("", "s"), ("t", "s")])
# Rules that end much are to come seldom: drawn uniformly, true for one value only.
seldom = st.integers(0, 7)


def u64(values: list[int]) -> b.Column:
    return np.array(values, np.uint64)


def i32(values: list[int]) -> b.Column:
    return np.array(values, np.int32)


def status_of(sequence: NaiveSequence) -> Status:
    if sequence.is_swapped:
        return Status.SWAPPED
    return Status.RUNNING if sequence.is_running else Status.WAITING


def assert_pending(confirmed: PoolConfirmed, expected: Moves) -> None:
    """What a new holder is told to make."""
    for told, pairs in (
        (confirmed.pending_copies, expected.copies),
        (confirmed.pending_swap_ins, expected.swap_ins),
        (confirmed.pending_swap_outs, expected.swap_outs),
    ):
        assert sorted((one.src_block_id, one.dst_block_id) for one in told) == sorted(pairs)


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory = KvMemory("boot", max_sequences=MAX_SEQUENCES)
        self.mutations: list[tuple[Mutation, Reply]] = []
        self.gatekeeper = self.new_gatekeeper(recovered=False)
        self.model = NaiveMemory(
            NUM_BLOCKS,
            BLOCK_SIZE,
            MAX_MODEL_LEN,
            MAX_SEQUENCES,
            NUM_HOST_BLOCKS,
            self.is_published,
        )
        self.num_workers = self.num_requests = 0
        self.sent: list[tuple[b.Batch, b.BatchResult]] = []
        self.past_ids: set[int] = set()
        self.gatekeeper.open_session("test", 0)
        self.attach_another_worker()

    def new_gatekeeper(self, *, recovered: bool) -> Gatekeeper:
        def log(mutation: Mutation, reply: Reply) -> None:
            self.mutations.append((mutation, reply))

        return Gatekeeper(self.memory, on_mutation=log, recovered=recovered)

    @property
    def manager(self) -> BlockManager:
        assert self.memory.manager is not None
        return self.memory.manager

    def is_published(self, block: int) -> bool:
        return bool(self.manager.pool.cache.is_published(i32([block]))[0])

    def teardown(self) -> None:
        """The log of the mutations leads to the same state, with the same replies."""
        replayed = KvMemory("boot", max_sequences=MAX_SEQUENCES)
        for mutation, reply in self.mutations:
            assert repr(replayed.commit(mutation)) == repr(reply)
        assert replayed.manager is not None
        assert self.memory.manager is not None
        same = repr(adopted_requests(self.memory.manager))
        assert repr(adopted_requests(replayed.manager)) == same
        assert replayed.stats() == self.memory.stats()

    # --- sending -----------------------------------------------------------------------

    def send(self, *ops: b.Op) -> b.BatchResult:
        """One batch. The model's newly given blocks are read from the result."""
        self.model.release()
        free_before, free_hosts = self.model.free(), self.model.free_hosts()
        batch = b.Batch(
            self.memory.ledger.fence(),
            self.memory.ledger.next_batch_seq,
            self.model.step_id,
            self.model.acknowledged,
            ops,
            repr(ops).encode(),
        )
        result = self.gatekeeper.apply(batch, 0)
        self.sent = [*self.sent[-7:], (batch, result)]
        self.free_before = free_before | self.model.free()
        self.free_hosts_before = free_hosts | self.model.free_hosts()
        return result

    def receive_blocks(self, blocks: list[int]) -> None:
        """Blocks handed out must have been free, and out of reach of every step in flight."""
        assert len(blocks) == len(set(blocks))
        assert set(blocks) <= self.free_before, f"{blocks} were not free: {self.free_before}"
        for work in self.worker.in_flight:
            assert not set(blocks) & work.touched(), f"{blocks}: step {work.step_id} is in flight"

    def receive_deltas(self, result: b.BatchResult, sources: set[int]) -> None:
        deltas, given = result.deltas, []
        for sequence_id, index, block, version in zip(
            deltas.sequence_ids.tolist(),
            deltas.table_indices.tolist(),
            deltas.block_ids.tolist(),
            deltas.table_versions.tolist(),
            strict=True,
        ):
            table = self.model.sequences[sequence_id].table
            assert table[index] is None, f"entry {index} of {sequence_id} was not to change"
            table[index] = block
            given.append(block)
            assert version == self.view(sequence_id).table_version
        self.receive_blocks(given)
        assert not any(None in s.table for s in self.model.sequences.values())
        copies = result.copies
        pairs = list(zip(copies.src_block_ids.tolist(), copies.dst_block_ids.tolist(), strict=True))
        assert len(pairs) >= len(sources)
        assert set(copies.dst_block_ids.tolist()) <= set(given)
        self.receive_copies(pairs, sources)

    def receive_copies(self, pairs: list[tuple[int, int]], sources: set[int]) -> None:
        """sources: the blocks that tables had before. The last holder of one may be gone."""
        moves = self.model.moves
        moves.copies += pairs
        self.model.retire(sorted(sources))
        all_dst = [dst for _, dst in (*moves.copies, *moves.swap_ins)]
        assert len(all_dst) == len(set(all_dst)), "two copies to one block"
        copied_to = {dst for _, dst in moves.copies}
        assert not copied_to & {src for src, _ in moves.copies}, "a chain of copies"
        assert not copied_to & {src for src, _ in moves.swap_outs}, "a swap-out needs a copy"

    def view(self, sequence_id: int) -> SequenceView:
        assert self.memory.manager is not None
        return sequence_views(self.memory.manager, [sequence_id], "", 1)[0][0]

    def pick(self, data: st.DataObject, sequences: list[NaiveSequence]) -> NaiveSequence:
        return data.draw(st.sampled_from(sorted(sequences, key=lambda s: s.sequence_id)))

    def pick_some(self, data: st.DataObject, sequences: list[NaiveSequence]) -> list[NaiveSequence]:
        ordered = sorted(sequences, key=lambda s: s.sequence_id)
        chosen = data.draw(
            st.lists(st.integers(0, len(ordered) - 1), min_size=1, max_size=4, unique=True)
        )
        return [ordered[i] for i in chosen]

    # --- requests ----------------------------------------------------------------------

    @initialize(data=st.data(), starts=st.lists(prompts, min_size=1, max_size=3))
    def begin_busy(self, data: st.DataObject, starts: list[list[int]]) -> None:
        for prompt in starts:
            self.arrive(prompt, 4, ("", ""))
            self.admit(data)

    @rule(prompt=prompts, num_candidates=st.integers(1, 4), domain=domains)
    def arrive(self, prompt: list[int], num_candidates: int, domain: tuple[str, str]) -> None:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        tenant, salt = domain
        arrive = b.Arrive(name, i32(prompt), num_candidates, tenant, cache_salt=salt)
        result = self.send(arrive).results[0]
        unconfirmed = len(self.model.requests)
        if len(self.model.sequences) == MAX_SEQUENCES or unconfirmed == 4 * MAX_SEQUENCES:
            expect(result, OpStatus.NO_FREE_SEQUENCES)
            return
        arrived = expect(result, OpStatus.OK).value
        assert isinstance(arrived, b.Arrived)
        assert arrived.sequence_id not in self.past_ids, "an id was given twice"
        self.past_ids.add(arrived.sequence_id)
        assert not arrived.candidate_sequence_ids
        self.model.requests[name] = NaiveRequest(num_candidates)
        self.model.sequences[arrived.sequence_id] = NaiveSequence(
            arrived.sequence_id, name, 0, prompt, domain=domain
        )

    @rule(data=st.data(), prompt=prompts, chance=seldom)
    def arrive_again(self, data: st.DataObject, prompt: list[int], chance: int) -> None:
        """A request of another life, with what its candidates had."""
        if chance > 2:
            return
        self.num_requests += 1
        name = f"r{self.num_requests}"
        numbers = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        outputs = [data.draw(st.lists(token, max_size=4)) for _ in numbers]
        reasons = [data.draw(st.sampled_from([0, 0, 1, 3])) for _ in numbers]
        states = [data.draw(st.sampled_from([b"", b"12345678", b"a long state"])) for _ in numbers]
        candidates = [
            b.ArrivingCandidate(number, i32(output), reason, state)
            for number, output, reason, state in zip(numbers, outputs, reasons, states, strict=True)
        ]
        result = self.send(b.Arrive(name, i32(prompt), 4, candidates=candidates)).results[0]
        no_room = len(self.model.sequences) + reasons.count(0) > MAX_SEQUENCES
        if no_room or len(self.model.requests) == 4 * MAX_SEQUENCES:
            expect(result, OpStatus.NO_FREE_SEQUENCES)
            return
        arrived = expect(result, OpStatus.OK).value
        assert isinstance(arrived, b.Arrived)
        ids = arrived.candidate_sequence_ids
        assert ids[0] == arrived.sequence_id
        assert not self.past_ids & set(ids)
        self.past_ids |= set(ids)
        request = self.model.requests[name] = NaiveRequest(4)
        for sequence_id, one, output in zip(ids, candidates, outputs, strict=True):
            if one.finish_reason:
                request.finished[one.candidate] = (sequence_id, one.finish_reason)
            else:
                self.model.sequences[sequence_id] = NaiveSequence(
                    sequence_id,
                    name,
                    one.candidate,
                    prompt + output,
                    scheduler_state=one.scheduler_state,
                )

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.admit_some(data, self.pick_some(data, self.waiting())[:2])

    def admit_some(self, data: st.DataObject, members: list[NaiveSequence]) -> bool:
        """Whether there was room."""
        ops, found = [], []
        for member in members:
            num_slots = data.draw(st.integers(1, min(len(member.tokens) + 2, MAX_MODEL_LEN)))
            source, num_shared = self.pick_shared(data, member, -(-num_slots // BLOCK_SIZE))
            cached = data.draw(st.sampled_from([True, True, False]))
            op = b.AdmitMember(member.sequence_id, num_slots, source, num_shared, cached)
            ops.append(op)
            found.append(self.find(member) if cached else [])
            if len(found[-1]) < num_shared:
                found[-1] = []
        self.model.release()
        fits = self.num_needed(members, ops, found) <= self.model.num_free()
        if not fits and any(map(self.is_full, members, found)):
            # Then the last block of what is found to the end is computed again.
            found = [
                blocks[:-1] if self.is_full(member, blocks) else blocks
                for member, blocks in zip(members, found, strict=True)
            ]
            found = [
                [] if len(blocks) < op.num_shared_blocks else blocks
                for op, blocks in zip(ops, found, strict=True)
            ]
            fits = self.num_needed(members, ops, found) <= self.model.num_free()
        result = self.send(b.Admit(ops))
        if not fits:
            expect(result.results[0], OpStatus.NO_FREE_BLOCKS)
            return False
        admitted = expect(result.results[0], OpStatus.OK).value
        assert isinstance(admitted, b.Admitted)
        given = []
        for member, op, blocks, table in zip(members, ops, found, admitted.tables, strict=True):
            assert table.sequence_id == member.sequence_id
            given += self.receive_table(member, op, blocks, table)
        assert not set(given) & {block for blocks in found for block in blocks}
        self.receive_blocks(given)
        copies = result.copies
        sources, made = copies.src_block_ids.tolist(), copies.dst_block_ids.tolist()
        assert set(made) <= set(given)
        expected = [
            blocks[-1] for m, blocks in zip(members, found, strict=True) if self.is_full(m, blocks)
        ]
        assert sources == expected
        self.receive_copies(list(zip(sources, made, strict=True)), set(sources))
        return True

    @rule(data=st.data(), prompt=prompts, domain=domains, ends=st.booleans(), twice=st.booleans())
    def serve(
        self,
        data: st.DataObject,
        prompt: list[int],
        domain: tuple[str, str],
        ends: bool,
        twice: bool,
    ) -> None:
        """A request from its arrival to its first tokens, and the same prompt once more: what the
        prefix cache is for."""
        for _ in range(1 + twice):
            before = set(self.model.sequences)
            self.arrive(prompt, 2, domain)
            new = [self.model.sequences[i] for i in self.model.sequences if i not in before]
            if not new or not self.admit_some(data, new):
                return
            self.compute()
            if new[0].is_running and ends:
                self.expect_ok(b.Free([new[0].sequence_id], b.FinishReason.STOP))
                self.end(new[0], b.FinishReason.STOP)

    def compute(self) -> None:
        """Everything in flight is done and told, and so is the next step."""
        for _ in range(2):
            while self.worker.in_flight:
                self.finish_step(True)
            self.issue_step()
        self.finish_step(True)

    def find(self, member: NaiveSequence) -> list[int]:
        """Published blocks that its table is to begin with. They have its content, now."""
        self.memory.settle()
        tokens = i32(member.tokens[:MAX_MODEL_LEN])
        found = self.manager.pool.cache.match(Chain.at_root(Domain(*member.domain)), tokens)
        contents = [member.content(p) for p in range(len(found) * BLOCK_SIZE)]
        self.worker.read(f"found for {member.sequence_id}", found, contents)
        return found

    def num_needed(
        self, members: list[NaiveSequence], ops: list[b.AdmitMember], found: list[list[int]]
    ) -> int:
        """Blocks that must be free: new ones, and found ones that are only cached."""
        new = sum(map(self.num_new_blocks, members, ops, found))
        return new + len({block for blocks in found for block in blocks} & self.model.free())

    def is_full(self, member: NaiveSequence, found: list[int]) -> bool:
        """All is found, and the last token is to be computed all the same."""
        return len(found) * BLOCK_SIZE == min(len(member.tokens), MAX_MODEL_LEN)

    def num_computed(self, member: NaiveSequence, op: b.AdmitMember, found: list[int]) -> int:
        if not found:
            return op.num_shared_blocks * BLOCK_SIZE
        return len(found) * BLOCK_SIZE - self.is_full(member, found)

    def num_new_blocks(self, member: NaiveSequence, op: b.AdmitMember, found: list[int]) -> int:
        if not found:
            return -(-op.num_slots // BLOCK_SIZE) - op.num_shared_blocks
        num_slots = max(op.num_slots, self.num_computed(member, op, found) + 1)
        return -(-num_slots // BLOCK_SIZE) - len(found) + self.is_full(member, found)

    def receive_table(
        self, member: NaiveSequence, op: b.AdmitMember, found: list[int], table: b.BlockTable
    ) -> list[int]:
        """The blocks that are new in it."""
        blocks, computed = table.block_ids.tolist(), self.num_computed(member, op, found)
        assert table.num_computed_tokens == computed
        taken: list[int | None] = [*found]
        member.num_writable = op.num_slots
        if found:
            # A step that is over has filled them, whichever it was.
            member.issued = [(0, computed)]
            member.num_writable = max(op.num_slots, computed + 1)
            taken = [*found[: len(found) - self.is_full(member, found)]]
        elif op.num_shared_blocks:
            source = self.model.sequences[op.share_from]
            taken = source.table[: op.num_shared_blocks]
            member.issued = source.issued_up_to(computed)
        assert blocks[: len(taken)] == taken
        assert len(blocks) == -(-member.num_writable // BLOCK_SIZE)
        for block in taken:
            if block is not None:
                self.model.quarantine.pop(block, None)
        member.is_running, member.table, member.num_computed = True, blocks, computed
        if self.is_full(member, found):
            self.model.quarantine.pop(found[-1], None)
        return blocks[len(taken) :]

    def pick_shared(
        self, data: st.DataObject, member: NaiveSequence, num_blocks: int
    ) -> tuple[int, int]:
        """A running sequence with the same first tokens, filled by steps already issued."""
        found = [(0, 0)]
        for source in self.model.running():
            if source.domain != member.domain:
                continue
            for k in range(1, min(num_blocks, source.issued_end // BLOCK_SIZE) + 1):
                end = k * BLOCK_SIZE
                if end <= len(member.tokens) and member.tokens[:end] == source.tokens[:end]:
                    found.append((source.sequence_id, k))
        return data.draw(st.sampled_from(found))

    def waiting(self) -> list[NaiveSequence]:
        sequences = self.model.sequences.values()
        return [s for s in sequences if not s.is_running and not s.is_swapped]

    @precondition(lambda self: self.model.running() or self.model.swapped())
    @rule(data=st.data(), chance=seldom)
    def preempt(self, data: st.DataObject, chance: int) -> None:
        if chance > 2:
            return
        victims = self.pick_some(data, [*self.model.running(), *self.model.swapped()])
        self.expect_ok(b.Preempt([s.sequence_id for s in victims]))
        self.take_blocks(victims)

    def take_blocks(self, victims: list[NaiveSequence]) -> None:
        for victim in victims:
            blocks, hosts = victim.table, victim.host
            victim.forget_blocks()
            self.model.retire(blocks)
            self.model.retire_hosts(hosts)

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data(), reason=st.sampled_from(b.FinishReason), chance=seldom)
    def free(self, data: st.DataObject, reason: b.FinishReason, chance: int) -> None:
        if chance > 2:
            return
        ended = self.pick_some(data, list(self.model.sequences.values()))
        self.expect_ok(b.Free([s.sequence_id for s in ended], reason))
        for sequence in ended:
            self.end(sequence, reason)

    def end(self, sequence: NaiveSequence, reason: b.FinishReason) -> None:
        del self.model.sequences[sequence.sequence_id]
        request = self.model.requests[sequence.request_id]
        request.finished[sequence.candidate] = (sequence.sequence_id, reason)
        self.model.retire(sequence.table)
        self.model.retire_hosts(sequence.host)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.requests)))
        if self.model.of_request(name):
            expect(self.send(b.Confirm(name)).results[0], OpStatus.INVALID_STATE)
            return
        self.expect_ok(b.Confirm(name))
        del self.model.requests[name]
        expect(self.send(b.Confirm(name)).results[0], OpStatus.UNKNOWN_REQUEST)

    def expect_ok(self, op: b.Op) -> b.OpResult:
        return expect(self.send(op).results[0], OpStatus.OK)

    # --- steps -------------------------------------------------------------------------

    @precondition(lambda self: self.model.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.expect_ok(self.draw_commit(data))

    def draw_commit(self, data: st.DataObject) -> b.Commit:
        """Tokens for some sequences, at once entered into the model."""
        chosen = self.pick_some(data, list(self.model.sequences.values()))
        new = []
        for sequence in chosen:
            room = MAX_MODEL_LEN + 1 - len(sequence.tokens)
            new.append(data.draw(st.lists(token, max_size=min(room, 4))))
            sequence.tokens = sequence.tokens + new[-1]
        words = u64(self.draw_words(data, chosen))
        return b.Commit(
            u64([s.sequence_id for s in chosen]),
            i32([t for tokens in new for t in tokens]),
            i32([s.num_computed for s in chosen]),
            i32([len(tokens) for tokens in new]),
            self.draw_states(data, chosen),  # after the words: these count
            words,
        )

    def draw_words(self, data: st.DataObject, chosen: list[NaiveSequence]) -> list[int]:
        """A scheduler_state of 8 bytes for all, or none."""
        words = data.draw(st.one_of(st.just([]), st.just([7 + i for i in range(len(chosen))])))
        for sequence, word in zip(chosen, words, strict=False):
            sequence.scheduler_state = word.to_bytes(8, "little")
        return words

    def draw_states(
        self, data: st.DataObject, chosen: list[NaiveSequence]
    ) -> list[tuple[int, bytes]]:
        """A scheduler_state of any length for one of them, or none."""
        state = data.draw(st.sampled_from([None, None, b"", b"long"]))
        if state is None:
            return []
        chosen[0].scheduler_state = state
        return [(chosen[0].sequence_id, state)]

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), with_commit=st.booleans(), grouped=st.booleans())
    def reserve(self, data: st.DataObject, with_commit: bool, grouped: bool) -> None:
        commit = [self.draw_commit(data)] if with_commit else []
        chosen = self.pick_some(data, self.model.running())
        ids = [s.sequence_id for s in chosen]
        slots = [min(len(s.tokens) + data.draw(st.integers(0, 2)), MAX_MODEL_LEN) for s in chosen]
        sizes = self.draw_group_sizes(data, len(ids)) if grouped else []
        failed, sources = self.model.reserve(ids, slots, sizes)
        result = self.send(*commit, b.Reserve(u64(ids), i32(slots), i32(sizes)))
        reserved = result.results[-1].value
        if failed:
            expect(result.results[-1], OpStatus.NO_FREE_BLOCKS)
            assert isinstance(reserved, b.Reserved)
            assert reserved.failed_groups.tolist() == failed
        else:
            expect(result.results[-1], OpStatus.OK)
        self.receive_deltas(result, sources)

    def draw_group_sizes(self, data: st.DataObject, total: int) -> list[int]:
        sizes = []
        while sum(sizes) < total:
            sizes.append(data.draw(st.integers(1, total - sum(sizes))))
        return sizes

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), tokens=st.lists(token, max_size=4))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """Only where nothing is in flight: it takes all earlier tokens for computed."""
        last = self.worker.last_executed_step
        ready = [s for s in self.model.running() if s.executed_end(last) == len(s.tokens)]
        ready = [s for s in ready if len(s.tokens) + len(tokens) <= MAX_MODEL_LEN]
        if not ready:
            return
        sequence = self.pick(data, ready)
        before = list(sequence.tokens), sequence.num_computed
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens = sequence.tokens + tokens
        failed, sources = self.model.reserve([sequence.sequence_id], [len(sequence.tokens)], [])
        if failed:
            sequence.tokens, sequence.num_computed = before
        result = self.send(b.Append(sequence.sequence_id, i32(tokens)))
        expect(result.results[0], OpStatus.NO_FREE_BLOCKS if failed else OpStatus.OK)
        self.receive_deltas(result, sources)

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), num_children=st.integers(1, 3), with_tokens=st.booleans())
    def fork(self, data: st.DataObject, num_children: int, with_tokens: bool) -> None:
        self.fork_from(data, self.pick(data, self.model.running()), num_children, with_tokens)

    def fork_from(
        self, data: st.DataObject, parent: NaiveSequence, num_children: int, with_tokens: bool
    ) -> NaiveSequence | None:
        """The last child; None when there is none."""
        numbers = self.model.free_candidates(parent.request_id)[:num_children]
        tokens = data.draw(st.lists(token, min_size=1 + num_children, max_size=1 + num_children))
        tokens = tokens if with_tokens else []
        words = [9 + i for i in range(1 + num_children)] if data.draw(st.booleans()) else []
        op = b.Fork(parent.sequence_id, num_children, i32(tokens), u64(words))
        result = self.send(op).results[0]
        if len(numbers) < num_children or (tokens and len(parent.tokens) > MAX_MODEL_LEN):
            expect(result, OpStatus.INVALID_ARGUMENT)
            return None
        if len(self.model.sequences) + num_children > MAX_SEQUENCES:
            expect(result, OpStatus.NO_FREE_SEQUENCES)
            return None
        child = None
        forked = expect(result, OpStatus.OK).value
        assert isinstance(forked, b.Forked)
        assert forked.block_ids.tolist() == parent.table
        # From here on neither may write what both hold, until it has reserved again.
        parent.num_writable = parent.issued_end
        for i, (child_id, number) in enumerate(
            zip(forked.child_sequence_ids, numbers, strict=True)
        ):
            assert child_id not in self.past_ids
            self.past_ids.add(child_id)
            self.model.requests[parent.request_id].finished.pop(number, None)
            child = dataclasses.replace(
                parent,
                sequence_id=child_id,
                candidate=number,
                tokens=parent.tokens + tokens[1 + i : 2 + i],
                table=list(parent.table),
                issued=list(parent.issued),
            )
            self.model.sequences[child_id] = child
            if words:
                child.scheduler_state = words[1 + i].to_bytes(8, "little")
        parent.tokens = parent.tokens + tokens[:1]
        if words:
            parent.scheduler_state = words[0].to_bytes(8, "little")
        return child

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), issue=st.booleans())
    def part(self, data: st.DataObject, issue: bool) -> None:
        """A child goes its own way."""
        self.part_from(data, self.pick(data, self.model.running()), issue)

    def part_from(self, data: st.DataObject, parent: NaiveSequence, issue: bool) -> NaiveSequence:
        """The child, or where none could be born the parent. It and all its siblings write, which
        makes copies."""
        child = self.fork_from(data, parent, 1, True)
        siblings = [s for s in self.model.of_request(parent.request_id) if s.is_running]
        ids = [s.sequence_id for s in siblings]
        slots = [min(len(s.tokens), MAX_MODEL_LEN) for s in siblings]
        failed, sources = self.model.reserve(ids, slots, [])
        result = self.send(b.Reserve(u64(ids), i32(slots)))
        expect(result.results[0], OpStatus.NO_FREE_BLOCKS if failed else OpStatus.OK)
        self.receive_deltas(result, sources)
        if issue and len(self.worker.in_flight) < MAX_IN_FLIGHT:
            self.issue_step()
        return child or parent

    @precondition(lambda self: len(self.worker.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def issue_step(self) -> None:
        """Hand the step to the worker: every running sequence fills the slots it may."""
        work = Work(self.model.step_id, self.model.moves, [], [])
        for sequence in self.model.running():
            start, end = sequence.issued_end, min(sequence.num_writable, len(sequence.tokens))
            if end <= start:
                continue
            table = [block for block in sequence.table if block is not None]
            for p in range(start, end):
                write = (table[p // BLOCK_SIZE], p % BLOCK_SIZE, sequence.content(p))
                work.writes.append(write)
            work.reads.append((table, self.contents(sequence, end)))
            sequence.issued.append((work.step_id, end))
        self.worker.in_flight.append(work)
        self.model.step_id += 1
        self.model.moves = Moves()

    def contents(self, sequence: NaiveSequence, end: int) -> list[Content]:
        return [sequence.content(p) for p in range(end)]

    @precondition(lambda self: self.worker.in_flight)
    @rule(told=st.booleans())
    def finish_step(self, told: bool) -> None:
        """The oldest step is done: acknowledged with the next batch, and its results committed."""
        self.model.acknowledged = self.worker.finish_oldest()
        if told:
            self.tell_what_is_computed()

    def tell_what_is_computed(self) -> None:
        done = []
        for sequence in (*self.model.running(), *self.model.swapped()):
            executed = sequence.executed_end(self.worker.last_executed_step)
            sequence.num_computed = max(sequence.num_computed, executed)
            done.append(sequence)
        ids, computed = [s.sequence_id for s in done], [s.num_computed for s in done]
        self.expect_ok(b.Commit(u64(ids), i32([]), i32(computed), i32([0] * len(ids))))

    @precondition(lambda self: self.model.running())
    @rule(data=st.data())
    def whole_step(self, data: st.DataObject) -> None:
        """As a scheduler does it: tokens and slots of all in one batch, then the step."""
        if len(self.worker.in_flight) == MAX_IN_FLIGHT:
            self.finish_step(True)
        chosen = [s for s in self.model.running() if len(s.tokens) < MAX_MODEL_LEN]
        ids = [s.sequence_id for s in chosen]
        new = data.draw(st.lists(token, min_size=len(ids), max_size=len(ids)))
        for sequence, one in zip(chosen, new, strict=True):
            sequence.tokens = [*sequence.tokens, one]
        slots = [len(s.tokens) for s in chosen]
        computed = [s.num_computed for s in chosen]
        failed, sources = self.model.reserve(ids, slots, [])
        result = self.send(
            b.Commit(u64(ids), i32(new), i32(computed)), b.Reserve(u64(ids), i32(slots))
        )
        expect(result.results[0], OpStatus.OK)
        expect(result.results[1], OpStatus.NO_FREE_BLOCKS if failed else OpStatus.OK)
        self.receive_deltas(result, sources)
        self.issue_step()

    # --- mistakes ----------------------------------------------------------------------

    @rule(data=st.data(), chance=seldom)
    def mistake(self, data: st.DataObject, chance: int) -> None:
        """Ids that are unknown, stale, finished or named twice change nothing."""
        if chance > 1:
            return
        finished = self.model.finished_ids()
        known = set(self.model.sequences) | set(finished)
        never = sorted((self.past_ids | {1, 7 << 32, (1 << 63) + 5}) - known)
        bad = data.draw(st.sampled_from(never + sorted(finished)))
        live = sorted(self.model.sequences)
        good = data.draw(st.lists(st.sampled_from(live), max_size=1)) if live else []
        expected = OpStatus.INVALID_STATE if bad in finished else OpStatus.UNKNOWN_SEQUENCE
        if good and data.draw(st.booleans()):
            bad, expected = good[0], OpStatus.INVALID_ARGUMENT  # the same twice
        ids = [*good, bad]
        computed = [0] * len(ids)
        ops: list[b.Op] = [
            b.Free(ids),
            b.Preempt(ids),
            b.Admit([b.AdmitMember(i, 1) for i in ids]),
            b.Commit(u64(ids), i32([0] * len(ids)), i32(computed)),
            b.Reserve(u64(ids), i32([1] * len(ids))),
            b.SwapOut(ids),
            b.SwapIn([b.SwapInMember(i, 1) for i in ids]),
        ]
        if bad not in live:
            ops += [b.Append(bad, i32([1])), b.Fork(bad, 1)]
        for result in self.send(*ops).results:
            # A good id in the wrong state for its op may be found out first.
            assert result.status in (expected, OpStatus.INVALID_STATE), result

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """The same batch: the same result. The same number with other ops: refused."""
        batch, result = data.draw(st.sampled_from(self.sent))
        assert self.gatekeeper.apply(batch, 0) is result
        try:
            self.gatekeeper.apply(dataclasses.replace(batch, digest=b"other"), 0)
        except BatchConflict:
            return
        raise AssertionError("other ops under a used number were accepted")

    # --- deaths ------------------------------------------------------------------------

    @rule(chance=seldom)
    def lose_worker(self, chance: int) -> None:
        if not chance:
            self.attach_another_worker()

    def attach_another_worker(self) -> None:
        self.num_workers += 1
        self.worker = NaiveWorker(BLOCK_SIZE)
        confirmed = self.confirm_pool()
        assert confirmed == PoolConfirmed(is_new_pool=True)
        # The step of the last takeover, and what it found to be made.
        self.taken_over = 0, Moves()
        self.sent = []
        self.model.quarantine, self.model.host_quarantine, self.model.moves = {}, {}, Moves()
        self.model.step_id = self.memory.last_step_id
        self.model.acknowledged = self.memory.acknowledged_step
        for sequence in self.model.sequences.values():
            sequence.forget_blocks()

    def confirm_pool(self) -> PoolConfirmed:
        return self.gatekeeper.attach_pool(
            self.memory.ledger.fence(),
            f"worker {self.num_workers}",
            GEOMETRY,
            0,
            self.worker.last_executed_step,
        )

    @rule(
        data=st.data(),
        last_words=st.sampled_from(["", "issue", "part", "part and end", "part twice"]),
        num_executed=st.sampled_from([0, 0, 0, *range(1, 1 + MAX_IN_FLIGHT)]),
        expire=seldom,
        worker_too=seldom,
        chance=seldom,
    )
    def take_over(
        self,
        data: st.DataObject,
        last_words: str,
        num_executed: int,
        expire: int,
        worker_too: int,
        chance: int,
    ) -> None:
        """The holder dies with steps in flight, of which the worker executes some; the next one
        goes on from what the memory service has."""
        if chance > 2:
            return
        self.speak(data, last_words)
        for _ in range(min(num_executed, len(self.worker.in_flight))):
            self.worker.finish_oldest()
        # What the dead holder knew, and did not tell, is gone with it.
        self.model.acknowledged = self.memory.acknowledged_step
        lost = [work.moves for work in self.worker.in_flight]
        self.worker.in_flight = []
        self.sent = []
        if not expire:
            self.expire(data)
        self.gatekeeper.abandon_session(self.open_session())
        self.gatekeeper.open_session("another", 0)
        if not worker_too:
            self.attach_another_worker()
            return
        last = self.worker.last_executed_step
        pending = self.model.take_over(
            max(self.memory.last_step_id, last + 1),
            max(self.memory.acknowledged_step, last),
            [*lost, self.model.moves],
        )
        self.go_on_from(self.confirm_pool(), pending)

    def speak(self, data: st.DataObject, last_words: str) -> None:
        """What the holder does last: copies in a step, and in the one after it something that
        touches their blocks."""
        running = self.model.running()
        if last_words.startswith("part") and running:
            parent = self.pick(data, running)
            child = self.part_from(data, parent, True)
            if last_words == "part twice":  # one of the two holds a block that is yet to be copied
                self.part_from(data, data.draw(st.sampled_from([parent, child])), False)
        if last_words == "part and end" and self.model.sequences:
            self.free(data, b.FinishReason.STOP, 0)
        elif last_words == "issue" and len(self.worker.in_flight) < MAX_IN_FLIGHT:
            self.issue_step()

    def open_session(self) -> Session:
        session = self.memory.ledger.session
        assert session is not None
        return session

    def go_on_from(self, confirmed: PoolConfirmed, pending: Moves) -> None:
        """Adopt everything; what is said to be computed must be there, once the pending copies
        and swaps are made."""
        self.taken_over = self.model.step_id, copy.deepcopy(pending)
        assert_pending(confirmed, pending)
        for one in confirmed.pending_copies:
            assert one.dst_block_id in self.model.sequences[one.sequence_id].table
        assert not confirmed.is_new_pool
        assert self.memory.last_step_id == self.model.step_id
        assert self.levels() == self.model.expected_levels()
        assert self.confirm_pool() == confirmed, "asked again, another answer"
        self.check_adopted()
        imagined = self.worker.imagine()
        imagined.move(pending)
        last, baseless = self.worker.last_executed_step, []
        for sequence in (*self.model.running(), *self.model.swapped()):
            sequence.issued = [(step, end) for step, end in sequence.issued if step <= last]
            sequence.num_writable = sequence.num_computed
            if sequence.num_computed > sequence.issued_end:
                # It shares blocks which a lost step was to fill for another one.
                baseless.append(sequence)
                continue
            who = f"adopted {sequence.sequence_id}"
            contents = self.contents(sequence, sequence.num_computed)
            if sequence.is_swapped:
                imagined.read_host(who, sequence.host, contents)
            else:
                table = [block for block in sequence.table if block is not None]
                imagined.read(who, table, contents)
        # Every step before the next one is over, or will never be.
        self.model.acknowledged = self.model.step_id - 1
        if baseless:
            self.expect_ok(b.Preempt([s.sequence_id for s in baseless]))
            self.take_blocks(baseless)

    def check_adopted(self) -> None:
        adopted = self.gatekeeper.adopt(self.memory.ledger.fence(), 0)
        assert [one.request_id for one in adopted] == list(self.model.requests)
        for request in adopted:
            model = self.model.requests[request.request_id]
            assert request.num_candidates == model.num_candidates
            ended = [one for one in request.sequences if one.status == Status.FINISHED]
            assert {
                one.candidate: (one.sequence_id, one.finish_reason) for one in ended
            } == model.finished
            live = {s.sequence_id: s for s in self.model.of_request(request.request_id)}
            assert len(live) + len(ended) == len(request.sequences)
            for one in request.sequences[: len(live)]:
                sequence = live[one.sequence_id]
                assert one.candidate == sequence.candidate
                assert one.status == status_of(sequence)
                tokens = [*request.prompt_token_ids.tolist(), *one.output_token_ids.tolist()]
                assert tokens == sequence.tokens
                assert one.num_computed_tokens == sequence.num_computed
                assert one.block_ids.tolist() == sequence.table
                assert one.scheduler_state == sequence.scheduler_state

    def expire(self, data: st.DataObject) -> None:
        """Some requests wait for too long in between."""
        self.gatekeeper.close_session(self.memory.ledger.fence(), 0)
        names = sorted(self.model.requests)
        ended = data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        mutation = Expire([*ended, "never heard of"])
        self.mutations.append((mutation, self.memory.commit(mutation)))
        for name in set(ended):
            sequences = self.model.of_request(name)
            for sequence in sequences:
                del self.model.sequences[sequence.sequence_id]
            del self.model.requests[name]
            for sequence in sequences:
                self.model.retire(sequence.table, self.memory.last_step_id)
                self.model.retire_hosts(sequence.host, self.memory.last_step_id)
        assert self.levels() == self.model.expected_levels()
        self.gatekeeper.open_session("in between", 0)

    @rule(recovered=st.booleans(), chance=seldom)
    def resume(self, recovered: bool, chance: int) -> None:
        """The stream broke, or the memory service recovered: the holder goes on with its view."""
        if chance > 2:
            return
        ledger = self.memory.ledger
        if recovered:
            self.gatekeeper = self.new_gatekeeper(recovered=True)
        else:
            self.gatekeeper.release_session(self.open_session(), 0)
        self.gatekeeper.resume_session(ledger.fence(), ledger.next_batch_seq - 1, 0)
        assert self.gatekeeper.mutations_open == (not recovered)
        if not recovered:
            return
        confirmed = self.confirm_pool()
        assert not confirmed.is_new_pool
        step, pending = self.taken_over
        if step <= self.memory.acknowledged_step:
            pending = Moves()
        used = self.model.in_use()
        copies = [(src, dst) for src, dst in pending.copies if dst in used]
        assert_pending(confirmed, dataclasses.replace(pending, copies=copies))

    # --- always ------------------------------------------------------------------------

    @invariant()
    def balances(self) -> None:
        manager = self.memory.manager
        assert manager is not None
        check_integrity(manager)
        if self.model.acknowledged == self.memory.acknowledged_step:
            assert self.levels() == self.model.expected_levels()

    def levels(self) -> b.PoolLevels:
        """With what is cached as free."""
        levels = self.memory.levels()
        available = levels.num_free_blocks + levels.num_cached_blocks
        return dataclasses.replace(levels, num_free_blocks=available, num_cached_blocks=0)

    @invariant()
    def published_blocks_hold_what_they_stand_for(self) -> None:
        """Whatever dies, and whoever reads them next."""
        cache = self.manager.pool.cache
        for block in cache.index.values():
            for offset, token in enumerate(cache.tokens[block].tolist()):
                content = self.worker.slots.get((block, offset))
                assert content is not None
                assert content[1][-1] == token
                assert len(content[1]) % BLOCK_SIZE == (offset + 1) % BLOCK_SIZE

    @invariant()
    def agrees_with_the_model(self) -> None:
        manager = self.memory.manager
        assert manager is not None
        views, truncated = sequence_views(manager, [], "", 10_000)
        assert not truncated
        live = {v.sequence_id: v for v in views if v.status != Status.FINISHED}
        assert set(live) == set(self.model.sequences)
        for sequence_id, sequence in self.model.sequences.items():
            view, row = live[sequence_id], manager.sequences.row_of(sequence_id)
            assert view.status == status_of(sequence)
            assert view.block_ids.tolist() == sequence.table
            assert view.num_computed_tokens == sequence.num_computed
            assert view.candidate == sequence.candidate
            assert manager.sequences.scheduler_state(row) == sequence.scheduler_state
            tokens = manager.sequences.tokens[row, : view.num_tokens].tolist()
            assert tokens == sequence.tokens
        assert {v.sequence_id for v in views} - set(live) == set(self.model.finished_ids())


TestMemoryAgainstModel = MemoryMachine.TestCase
TestMemoryAgainstModel.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
