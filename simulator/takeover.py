"""Taking over, as `scheduler_svc.takeover` does, one callback after another."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.kvmem_adapter import adopted_of, pending_copies_of, pending_swaps_of
from scheduler_svc.core import events
from simulator.kvmem_link import KvmemLink, OnFailed
from simulator.messages import Adopted, Installed, PoolAttached, SessionOpened, WorkerInfo
from simulator.records import adopted_request
from simulator.worker_link import WorkerLink


class TakeOver:
    """In the one order that leaves no moment with two writers."""

    _described: WorkerInfo
    _opened: SessionOpened
    _installed: Installed
    _attached: PoolAttached

    def __init__(
        self,
        kvmem: KvmemLink,
        worker: WorkerLink,
        num_sequences_needed: int,
        on_opened: Callable[[], None],
        on_connected: Callable[[WorkerInfo, events.Connected], None],
        on_failed: OnFailed,
    ) -> None:
        """`on_opened`: the session is there, and must be kept alive from here on."""
        self._kvmem, self._worker = kvmem, worker
        self._num_sequences_needed = num_sequences_needed
        self._on_opened, self._on_connected = on_opened, on_connected
        self._on_failed = on_failed

    def begin(self) -> None:
        self._worker.describe(self._open, self._on_failed)

    def _open(self, described: WorkerInfo) -> None:
        self._described = described
        self._kvmem.open(described, self._install, self._on_failed)

    def _install(self, opened: SessionOpened) -> None:
        self._opened = opened
        self._on_opened()
        self._worker.install(self._kvmem.fence, self._attach, self._on_failed)

    def _attach(self, installed: Installed) -> None:
        self._installed = installed
        self._kvmem.attach(self._described, installed.last_step_id, self._adopt, self._on_failed)

    def _adopt(self, attached: PoolAttached) -> None:
        self._attached = attached
        self._kvmem.adopt(self._connect, self._on_failed)

    def _connect(self, adopted: Adopted) -> None:
        worker, opened, installed = self._described, self._opened, self._installed
        attached = self._attached
        num_sequences = attached.levels.num_free_sequences + sum(
            len(record.sequences) for record in adopted.records
        )
        if num_sequences < self._num_sequences_needed:
            self._on_failed("INTERNAL")
            return
        swap_ins, swap_outs = pending_swaps_of(attached.confirmed)
        connected = events.Connected(
            next_batch_seq=opened.next_batch_seq,
            # What a former session was preparing, and has not begun, begins now.
            last_step_id=max(opened.last_step_id - 1, installed.last_step_id, 0),
            num_blocks=worker.geometry.num_blocks,
            block_size=worker.geometry.block_size,
            levels=attached.levels,
            adopted=tuple(
                adopted_of(record, adopted_request(record)) for record in adopted.records
            ),
            pending_copies=pending_copies_of(attached.confirmed),
            retained=installed.retained,
            max_inflight_steps=worker.max_inflight_steps,
            pending_swap_ins=swap_ins,
            pending_swap_outs=swap_outs,
            rates=worker.rates,
        )
        self._on_connected(worker, connected)
