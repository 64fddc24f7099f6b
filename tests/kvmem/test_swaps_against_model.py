"""The memory core against the naive model, with a host tier that is used."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvmem_svc.core import batch as b
from kvmem_svc.core.batch import OpStatus
from tests.kvmem.driver import pairs
from tests.kvmem.naive import NaiveSequence, expect
from tests.kvmem.test_core_against_model import (
    MAX_IN_FLIGHT,
    MAX_MODEL_LEN,
    MemoryMachine,
)


class SwappingMachine(MemoryMachine):
    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), alone=st.sampled_from([False, False, True]))
    def swap_out(self, data: st.DataObject, alone: bool) -> None:
        victim = self.pick(data, self.model.running())
        group = [s for s in self.model.of_request(victim.request_id) if s.is_running]
        self.swap_out_some([victim] if alone else group)

    def swap_out_some(self, members: list[NaiveSequence]) -> bool:
        """Whether there was room. Members are of one request."""
        self.model.release()
        blocks = {block for member in members for block in member.table if block is not None}
        fits = len(blocks) <= len(self.model.free_hosts())
        result = self.send(b.SwapOut([member.sequence_id for member in members]))
        if not fits:
            expect(result.results[0], OpStatus.NO_FREE_HOST_BLOCKS)
            return False
        expect(result.results[0], OpStatus.OK)
        made = pairs(result.swap_outs)
        hosts = [host for _, host in made]
        assert len(hosts) == len(set(hosts)) == len(blocks)
        self.receive_hosts(hosts)
        self.model.moves.swap_outs += made
        host_of: dict[int | None, int] = {}
        for member in members:
            row = self.manager.sequences.row_of(member.sequence_id)
            member.host = self.manager.sequences.swap_maps[row].host_blocks.tolist()
            # A block has one host block, whoever of them holds it.
            for block, host in zip(member.table, member.host, strict=True):
                assert host_of.setdefault(block, host) == host
        assert sorted(host_of.values()) == sorted(hosts)
        for member in members:
            member.is_running, table, member.table = False, member.table, []
            member.num_writable = 0
            self.model.retire(table)
        return True

    def receive_hosts(self, hosts: list[int]) -> None:
        assert set(hosts) <= self.free_hosts_before, f"{hosts}: {self.free_hosts_before} were free"
        for work in self.worker.in_flight:
            assert not set(hosts) & work.moves.touched_hosts(), f"step {work.step_id} is in flight"

    @precondition(lambda self: self.model.swapped())
    @rule(data=st.data(), alone=st.sampled_from([False, False, True]))
    def swap_in(self, data: st.DataObject, alone: bool) -> None:
        first = self.pick(data, self.model.swapped())
        group = [s for s in self.model.of_request(first.request_id) if s.is_swapped]
        self.swap_in_some(data, [first] if alone else group)

    def swap_in_some(self, data: st.DataObject, sequences: list[NaiveSequence]) -> None:
        members = [
            (one, data.draw(st.integers(1, min(len(one.tokens) + 2, MAX_MODEL_LEN))))
            for one in sequences
        ]
        self.model.release()
        planned = self.model.plan_swap_in(members)
        num_new = len({number for table in planned for number in table})
        fits = num_new <= self.model.num_free()
        op = b.SwapIn([b.SwapInMember(one.sequence_id, slots) for one, slots in members])
        result = self.send(op)
        if not fits:
            expect(result.results[0], OpStatus.NO_FREE_BLOCKS)
            return
        swapped = expect(result.results[0], OpStatus.OK).value
        assert isinstance(swapped, b.SwappedIn)
        block_of: dict[int, int] = {}
        source_of = {dst: src for src, dst in pairs(result.swap_ins)}
        filled = set(source_of) | {dst for _, dst in pairs(result.copies)}
        for (one, num_slots), numbers, table in zip(members, planned, swapped.tables, strict=True):
            assert (table.sequence_id, table.num_computed_tokens) == (
                one.sequence_id,
                one.num_computed,
            )
            blocks = table.block_ids.tolist()
            assert len(blocks) == len(numbers)
            for number, block in zip(numbers, blocks, strict=True):
                assert block_of.setdefault(number, block) == block, "shared otherwise"
            for block, host in zip(blocks, one.host, strict=False):
                assert block in filled
                assert source_of.get(block, host) == host
            one.is_running, one.table = True, blocks
            one.num_writable = num_slots if num_slots > one.num_computed else 0
        self.receive_blocks(list(block_of.values()))
        assert len(block_of) == num_new
        self.model.moves.swap_ins += pairs(result.swap_ins)
        self.receive_copies(pairs(result.copies), set())
        read_first = {src for src, _ in pairs(result.swap_ins)}
        assert not read_first & {dst for _, dst in self.model.moves.swap_outs}, (
            "a swap-in of what the same step swaps out"
        )
        freed = [host for one in sequences for host in one.host]
        for one in sequences:
            one.host = []
        self.model.retire_hosts(freed)

    @precondition(lambda self: self.model.running() and self.worker.in_flight)
    @rule(data=st.data(), issue=st.booleans())
    def results_come_late(self, data: st.DataObject, issue: bool) -> None:
        """Swapped out while a step runs, whose results come afterwards."""
        victim = self.pick(data, self.model.running())
        group = [s for s in self.model.of_request(victim.request_id) if s.is_running]
        if self.swap_out_some(group) and issue and len(self.worker.in_flight) < MAX_IN_FLIGHT:
            self.issue_step()
        self.finish_step(True)

    @precondition(lambda self: self.model.running())
    @rule(data=st.data(), last=st.sampled_from(["", "in", "end", "out", "copy"]))
    def swap_over_a_takeover(self, data: st.DataObject, last: str) -> None:
        """The holder dies with swaps of several steps under way."""
        victim = self.pick(data, self.model.running())
        if last == "copy":
            self.part_from(data, victim, False)
        group = [s for s in self.model.of_request(victim.request_id) if s.is_running]
        if not group or not self.swap_out_some(group):
            return
        if data.draw(st.booleans()) and len(self.worker.in_flight) < MAX_IN_FLIGHT:
            self.issue_step()
        if last in ("in", "out"):
            self.swap_in_some(data, group)
            if data.draw(st.booleans()) and len(self.worker.in_flight) < MAX_IN_FLIGHT:
                self.issue_step()
        if last == "out" and all(s.is_running for s in group):
            self.swap_out_some(group)
        if last == "end":
            self.expect_ok(b.Free([victim.sequence_id], b.FinishReason.STOP))
            self.end(victim, b.FinishReason.STOP)
        executed = data.draw(st.sampled_from([0, 0, 1, 2]))
        self.take_over(data, "", executed, data.draw(st.sampled_from([0, 1, 1, 1])), 1, 0)


TestSwapsAgainstModel = SwappingMachine.TestCase
TestSwapsAgainstModel.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
