"""The gatekeeper: decides which calls become mutations.

It joins the state, `KvMemory`, with what is volatile: leases, graces, TTLs, and after a recovery
whether the worker's KV is known to be there. Nothing of the latter is journalled.
Time is an argument, in milliseconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kvmem_svc.core.batch import Batch, BatchResult, Fence, PoolGeometry
from kvmem_svc.core.errors import InvalidPin, NoPool, StaleEpoch
from kvmem_svc.core.leases import Leases, LeaseTimes
from kvmem_svc.core.limits import ARRIVE_RANGES, MAX_EXPIRED_REQUESTS, MAX_PIN_TTL_MS
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import (
    ApplyBatch,
    CloseSession,
    Configure,
    ConfirmPool,
    Expire,
    GrantSession,
    Mutation,
    Pin,
    Pinned,
    PoolConfirmed,
    Reply,
    Session,
    Unpin,
)
from kvmem_svc.core.views import AdoptedRequest, adopted_requests

OnMutation = Callable[[Mutation, Reply], None]


class Gatekeeper:
    """`on_mutation` is called with every mutation, once it was carried out, and its reply.

    recovered: the memory comes from a journal. Then the holder of its session alone may go on
    for a grace, and a worker's pool must be confirmed again before anything is changed.
    """

    def __init__(
        self,
        memory: KvMemory,
        times: LeaseTimes | None = None,
        on_mutation: OnMutation = lambda _mutation, _reply: None,
        *,
        recovered: bool = False,
    ) -> None:
        self.memory = memory
        self.leases = Leases(times or LeaseTimes())
        self.on_mutation = on_mutation
        self._is_pool_provisional = recovered
        # When pins end, in the leases' time. It starts over with the process.
        self._pin_ends_ms: dict[int, int] = {}
        if memory.manager is not None:
            for pin in memory.manager.pins.values():
                self._note_end(pin.pin_id, pin.ttl_ms)
        if recovered and memory.ledger.session is not None:
            self.leases.recover()

    @property
    def mutations_open(self) -> bool:
        """Whether the open session's batches are accepted."""
        return self.memory.ledger.mutations_open and not self._is_pool_provisional

    def _commit(self, mutation: Mutation) -> Reply:
        reply = self.memory.commit(mutation)
        self.on_mutation(mutation, reply)
        return reply

    def configure(self, configuration: Configure) -> None:
        """How this process was started; a mutation only where the state was made otherwise."""
        if configuration != self.memory.configuration:
            self._commit(configuration)

    # --- sessions ----------------------------------------------------------------------

    def open_session(self, holder: str, now_ms: int, holder_address: str = "") -> Session:
        """Begin a new epoch, mutations closed. Raises SessionHeld while another session is alive,
        or its holder may still resume it."""
        self.leases.observe(now_ms)
        current = self.memory.ledger.session
        if current is not None:
            self.leases.check_takeover(current)
        session = self._commit(GrantSession(holder, holder_address))
        assert isinstance(session, Session)
        self.leases.begin()
        return session

    def resume_session(self, fence: Fence, last_result_batch_seq: int, now_ms: int) -> Session:
        """Go on with the open session, after its stream broke or this service recovered.

        Raises StaleBootId, StaleEpoch, UnknownSession, LeaseExpired or SequenceGap.
        """
        self.leases.observe(now_ms)
        session = self.memory.ledger.check_resume(fence, last_result_batch_seq)
        self.leases.check_alive(session)
        self.leases.begin()
        return session

    def release_session(self, session: Session, now_ms: int) -> None:
        """The session's stream broke: its holder may resume it for the grace."""
        self.leases.observe(now_ms)
        if self.memory.ledger.session == session:
            self.leases.release()

    def abandon_session(self, session: Session) -> None:
        """The session was granted and its holder will not learn of it: anybody may take over."""
        if self.memory.ledger.session == session:
            self.leases.end()

    def close_session(self, fence: Fence, now_ms: int) -> None:
        """The holder is done. Raises StaleBootId, StaleEpoch, UnknownSession or LeaseExpired."""
        self._check_alive(fence, now_ms)
        self._commit(CloseSession())
        self.leases.end()

    def heartbeat(self, session: Session, now_ms: int) -> None:
        """The holder is there. Raises StaleEpoch or LeaseExpired."""
        self.leases.observe(now_ms)
        if self.memory.ledger.session != session:
            raise StaleEpoch(f"session {session.session_id} is not the newest one any more")
        self.leases.check_alive(session)
        self.leases.renew()

    def _check_alive(self, fence: Fence, now_ms: int) -> Session:
        self.leases.observe(now_ms)
        session = self.memory.ledger.check_session(fence)
        self.leases.check_alive(session)
        return session

    # --- what a session does -----------------------------------------------------------

    def attach_pool(
        self,
        fence: Fence,
        worker_boot_id: str,
        geometry: PoolGeometry,
        now_ms: int,
        last_executed_step: int = 0,
    ) -> PoolConfirmed:
        """Confirm the pool of a worker and open the session's mutations.

        Raises InvalidGeometry, and what a stale fence or an expired lease raises.
        """
        self._check_alive(fence, now_ms)
        self.leases.renew()
        confirmed = self._commit(ConfirmPool(worker_boot_id, geometry, last_executed_step))
        assert isinstance(confirmed, PoolConfirmed)
        self._is_pool_provisional = False
        return confirmed

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        """Carry out a batch, or give again the result of one that came before.

        Raises UnknownSession, StaleEpoch, StaleBootId, LeaseExpired, NoPool, SequenceGap,
        BatchConflict, InvalidBatch or StepOutOfOrder: then nothing was changed and batch_seq is
        not used up.
        """
        session = self._check_alive(batch.fence, now_ms)
        self.leases.renew()
        self._check_confirmed(session)
        memory, mutation = self.memory, ApplyBatch(batch)
        num_batches = memory.num_batches
        result = memory.commit(mutation)
        assert isinstance(result, BatchResult)
        if memory.num_batches != num_batches:
            self.on_mutation(mutation, result)
        return result

    def adopt(self, fence: Fence, now_ms: int) -> list[AdoptedRequest]:
        """Every request, in order of arrival, as of now. Raises what `apply` does of fences,
        leases and pools."""
        self._check_may_write(fence, now_ms)
        manager = self.memory.manager
        return adopted_requests(manager) if manager is not None else []

    # --- pins --------------------------------------------------------------------------

    def pin(self, fence: Fence, pin: Pin, now_ms: int) -> Pinned:
        """Hold what is cached of a prefix. Raises InvalidPin, NoFreeBlocks, TenantQuota, and what
        `apply` does of fences, leases and pools."""
        self._check_may_write(fence, now_ms)
        _check_pin(pin)
        pinned = self._commit(pin)
        assert isinstance(pinned, Pinned)
        self._note_end(pinned.pin_id, pin.ttl_ms)
        return pinned

    def unpin(self, fence: Fence, pin_id: int, now_ms: int) -> None:
        """Let go of a pin; of one that is gone already there is nothing to do. Raises what `apply`
        does of fences, leases and pools."""
        self._check_may_write(fence, now_ms)
        self._pin_ends_ms.pop(pin_id, None)
        self._commit(Unpin(pin_id))

    def _check_may_write(self, fence: Fence, now_ms: int) -> None:
        session = self._check_alive(fence, now_ms)
        self.leases.renew()
        self._check_confirmed(session)
        self.memory.ledger.check_mutation(fence)

    def _note_end(self, pin_id: int, ttl_ms: int) -> None:
        if pin_id and ttl_ms:
            self._pin_ends_ms[pin_id] = self.leases.time_ms + ttl_ms

    def _end_pins(self) -> None:
        now_ms = self.leases.time_ms
        for pin_id in [one for one, end_ms in self._pin_ends_ms.items() if end_ms <= now_ms]:
            del self._pin_ends_ms[pin_id]
            manager = self.memory.manager
            if manager is not None and pin_id in manager.pins:
                self._commit(Unpin(pin_id))

    def _check_confirmed(self, session: Session) -> None:
        if self._is_pool_provisional:
            raise NoPool(
                f"the memory service has recovered: session {session.session_id} must attach its"
                " worker's pool again"
            )

    # --- time --------------------------------------------------------------------------

    def tick(self, now_ms: int) -> list[str]:
        """Let time go on; ids of the requests that expired by it. Pins end, too. To be called
        often."""
        self.leases.observe(now_ms)
        self._end_pins()
        request_ids = list(islice(self._overdue_requests(), MAX_EXPIRED_REQUESTS))
        if request_ids:
            if self.memory.ledger.session is not None:
                self._commit(CloseSession())
            self._commit(Expire(tuple(request_ids)))
        return request_ids

    def _overdue_requests(self) -> Iterator[str]:
        manager, orphaned_ms = self.memory.manager, self.leases.orphaned_ms
        times = self.leases.times
        if manager is None or orphaned_ms < min(times.orphan_ttl_ms, times.result_ttl_ms):
            return
        for record in manager.requests.values():
            ttl_ms = times.orphan_ttl_ms if record.live else times.result_ttl_ms
            if orphaned_ms >= ttl_ms:
                yield record.request_id


def _check_pin(pin: Pin) -> None:
    sizes = {
        "tenant_bytes": len(pin.domain.tenant.encode()),
        "cache_salt_bytes": len(pin.domain.cache_salt.encode()),
    }
    for name, size in sizes.items():
        if size not in ARRIVE_RANGES[name]:
            raise InvalidPin(f"{name} is {size}, it must be {ARRIVE_RANGES[name]}")
    if not 0 <= pin.ttl_ms <= MAX_PIN_TTL_MS:
        raise InvalidPin(f"ttl_ms is {pin.ttl_ms}, it must be 0 .. {MAX_PIN_TTL_MS}")
