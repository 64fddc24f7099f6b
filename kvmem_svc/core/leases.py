"""Leases: for how long the open session holds. Pure, but not part of the state.

Nothing here is journalled: it lives beside the state and starts over with the process. Time is an
argument, in milliseconds of a clock that never goes back; what counts is the time the memory
service was there to be spoken to, so no observation adds more than MAX_CLOCK_STEP_MS. When the
service itself was paused or down, every lease is extended by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmem_svc.core.errors import LeaseExpired, SessionHeld
from kvmem_svc.core.limits import MAX_CLOCK_STEP_MS
from kvmem_svc.core.mutations import Session


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """lease_ttl_ms: silence after which a session may be taken over. resume_grace_ms, and after
    a recovery recovery_grace_ms: how long a session without a stream waits for its holder alone.
    orphan_ttl_ms, result_ttl_ms: how long live sequences and ended, unconfirmed requests are
    kept while no session is alive.
    """

    lease_ttl_ms: int = 3_000
    resume_grace_ms: int = 500
    recovery_grace_ms: int = 1_000
    orphan_ttl_ms: int = 60_000
    result_ttl_ms: int = 300_000


class Leases:
    """The lease of the open session, if there is one."""

    def __init__(self, times: LeaseTimes) -> None:
        self.times = times
        self._time_ms = 0
        self._last_observed_ms: int | None = None
        # When the lease ends; of a session that is over, when it was.
        self._expires_ms = 0
        # Only the holder's resuming makes it longer: its stream is gone.
        self._awaits_holder = False

    def observe(self, now_ms: int) -> None:
        """Let time go on to `now_ms`; every other method is of the time observed last."""
        if self._last_observed_ms is not None:
            elapsed_ms = now_ms - self._last_observed_ms
            self._time_ms += max(0, min(elapsed_ms, MAX_CLOCK_STEP_MS))
        self._last_observed_ms = now_ms

    # --- the life of a session ---------------------------------------------------------

    def begin(self) -> None:
        """A session was granted, or resumed by its holder."""
        self._awaits_holder = False
        self._expires_ms = self._time_ms + self.times.lease_ttl_ms

    def renew(self) -> None:
        """The holder spoke."""
        if not self._awaits_holder:
            self._expires_ms = self._time_ms + self.times.lease_ttl_ms

    def release(self) -> None:
        """The session's stream broke: its holder alone may resume it for the grace. A lease that
        had ended stays so."""
        if self.remaining_ms > 0:
            self._await_holder(self.times.resume_grace_ms)

    def recover(self) -> None:
        """The session comes from a journal: its holder alone may resume it for the grace."""
        self._await_holder(self.times.recovery_grace_ms)

    def end(self) -> None:
        """The session is over."""
        self._await_holder(0)

    def _await_holder(self, grace_ms: int) -> None:
        self._awaits_holder = True
        self._expires_ms = self._time_ms + grace_ms

    @property
    def time_ms(self) -> int:
        """For how long the memory service was there."""
        return self._time_ms

    # --- asking ------------------------------------------------------------------------

    @property
    def remaining_ms(self) -> int:
        """Until the session may be taken over; 0 or less: it may be."""
        return self._expires_ms - self._time_ms

    def check_alive(self, session: Session) -> None:
        """Raises LeaseExpired once the session may be taken over."""
        if self.remaining_ms <= 0:
            raise LeaseExpired(
                f"the lease of session {session.session_id} ended {-self.remaining_ms} ms ago"
            )

    def check_takeover(self, session: Session) -> None:
        """Raises SessionHeld as long as the session may not be taken over."""
        if self.remaining_ms > 0:
            raise SessionHeld(
                f"session {session.session_id} is held by {session.holder!r}",
                retry_after_ms=min(self.remaining_ms, max(self.times.resume_grace_ms, 1)),
                metadata={"holder": session.holder, "holder_address": session.holder_address},
            )

    @property
    def orphaned_ms(self) -> int:
        """For how long no session has been alive; 0 while one is."""
        return max(0, -self.remaining_ms)
