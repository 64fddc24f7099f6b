"""Admissions, looked at by the witness: what each found in the prefix cache is there, whole, and
may be read; what it was given anew is emptied, and so is what came back from the host tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmem_svc.core import batch as kv
from kvmem_svc.core.manager import BlockManager
from kvmem_svc.core.sequences import ROW_MASK
from simulator.worker import TagWorker, expect

if TYPE_CHECKING:
    from simulator.kv_witness import KvWitness


class Admissions:
    """Of one batch."""

    def __init__(
        self,
        witness: KvWitness,
        manager: BlockManager,
        worker: TagWorker,
        result: kv.BatchResult,
    ) -> None:
        self._witness, self._manager, self._worker = witness, manager, worker
        self._results = result.results
        copies = result.copies
        self._origins = dict(
            zip(copies.dst_block_ids.tolist(), copies.src_block_ids.tolist(), strict=True)
        )

    def check(self, batch: kv.Batch) -> None:
        for op, one in zip(batch.ops, self._results, strict=True):
            if isinstance(op, kv.Admit) and isinstance(one.value, kv.Admitted):
                self._check_group(op, one.value)
            elif isinstance(one.value, kv.SwappedIn):
                self._on_swapped_in(one.value)

    def _check_group(self, op: kv.Admit, admitted: kv.Admitted) -> None:
        table = self._manager.sequences
        pairs = [
            (member, given)
            for member, given in zip(op.members, admitted.tables, strict=True)
            if table.is_live(given.sequence_id)  # it may have ended in this very batch
        ]
        if not pairs:
            return
        request_id = table.record_of(pairs[0][0].sequence_id & ROW_MASK).request_id
        lent: set[int] = set()
        for member, given in pairs:
            if not member.share_from:
                lent |= self._check_found(request_id, given)
        self._witness.lend(request_id, lent)
        for member, given in pairs:
            length = int(table.length[member.sequence_id & ROW_MASK])
            found = given.num_computed_tokens
            expect(
                found < length,
                "one token is computed",
                f"{request_id} has {length} tokens, and {found} of them count as computed",
            )
            if found and not member.share_from:
                self._witness.count_hit(request_id, length, found)
            elif member.use_prefix_cache and not member.share_from:
                self._witness.count_miss(request_id, self._manager)
            self._forget_new(given)

    def _on_swapped_in(self, swapped: kv.SwappedIn) -> None:
        """All blocks are new, and the group's own: nobody else has ever had their content."""
        for given in swapped.tables:
            for block_id in given.block_ids.tolist():
                self._worker.forget_block(block_id)

    def _forget_new(self, given: kv.BlockTable) -> None:
        """No step touches what was in the blocks that are new."""
        size = self._worker.block_size
        for block_id in given.block_ids[given.num_computed_tokens // size :].tolist():
            self._worker.forget_block(block_id)

    def _check_found(self, request_id: str, given: kv.BlockTable) -> set[int]:
        """Of the blocks that were found those which were computed for others."""
        worker, witness, size = self._worker, self._witness, self._worker.block_size
        candidate = int(self._manager.sequences.candidate[given.sequence_id & ROW_MASK])
        path = witness.path(request_id, candidate)
        for position in range(given.num_computed_tokens):
            block = self._origin(given, position // size)
            tag = worker.slots.get(block * size + position % size)
            expect(
                tag == path[position + 1],
                "what is found is there",
                f"{request_id} is given block {block} for position {position}, which has"
                f" {'nothing' if tag is None else worker.tree.tokens(tag)}",
            )
        return self._lent_blocks(request_id, given)

    def _lent_blocks(self, request_id: str, given: kv.BlockTable) -> set[int]:
        size, domain = self._worker.block_size, self._witness.domain(request_id)
        lent: set[int] = set()
        candidate = int(self._manager.sequences.candidate[given.sequence_id & ROW_MASK])
        path = self._witness.path(request_id, candidate)
        for index in range(-(-given.num_computed_tokens // size)):
            block = self._origin(given, index)
            if self._worker.domains.get(block, domain) != domain:
                tokens = self._worker.tree.tokens(path[(index + 1) * size])
                expect(
                    self._witness.may_find(domain, tokens),
                    "tenants are apart",
                    f"{request_id} of {domain} is given block {block}, computed for"
                    f" {self._worker.domains[block]}",
                )
                lent |= {block, int(given.block_ids[index])}
        return lent

    def _origin(self, given: kv.BlockTable, index: int) -> int:
        """The block of a table, or the one that it is to be copied from."""
        block = int(given.block_ids[index])
        return self._origins.get(block, block)
