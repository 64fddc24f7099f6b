"""When a call fails: whether, where and when it is tried again. No clock, no network.

A request is kept by the servers while its stream is broken (`Attachment` in the protocol), and
the client comes back to it; which of several servers answers for it may have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from octavo.errors import DeadlineExceededError, OctavoError, UnavailableError
from octavo.service.server import AddressError, check_address

FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
# Addresses that servers may tell of, beside those the client was made with.
MAX_HINTED_ADDRESSES: Final = 16
# Refusals that are final for a new request, and temporary for one accepted before: it waits for
# its turn to be entered again.
OVERLOAD_REASONS: Final = frozenset({"QUEUE_FULL", "TENANT_QUOTA"})
REPLACED_REASON: Final = "ATTACH_REPLACED"

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Failure:
    """How a call ended that did not end well.

    told: a server gave the reason; otherwise it is the transport's status.
    cut_short: the stream ended without an error, and before every candidate had.
    holder_address: where NOT_LEADER says that the requests are; empty when it does not know.
    """

    error: OctavoError
    told: bool = False
    cut_short: bool = False
    holder_address: str = ""
    cause: BaseException | None = None

    def is_retried(self, *, accepted: bool) -> bool:
        """Whether trying again may help a request, which a server `accepted` before or not."""
        if self.cut_short or isinstance(self.error, UnavailableError):
            return True
        return accepted and self.error.reason in OVERLOAD_REASONS


class Addresses:
    """The servers of one client, which are one system; shared by its calls, on all threads."""

    def __init__(self, configured: Sequence[str]) -> None:
        self.configured: Final = tuple(configured)
        # The one that accepted a request last: the next call begins there.
        self.preferred = self.configured[0]
        self._hinted: set[str] = set()

    def follows(self, address: str) -> bool:
        """Whether to go where a server says; not when it is no address, or one too many."""
        if address in self.configured or address in self._hinted:
            return True
        try:
            check_address(address)
        except AddressError:
            return False
        if len(self._hinted) >= MAX_HINTED_ADDRESSES:
            return False
        self._hinted.add(address)
        return True

    def after(self, address: str) -> str:
        """The next one in turn."""
        if address not in self.configured:
            return self.configured[0]
        place = self.configured.index(address)
        return self.configured[(place + 1) % len(self.configured)]

    def in_turn(self) -> list[str]:
        """Each once, the preferred one first."""
        first = self.preferred
        return [first, *(address for address in self.configured if address != first)]


@dataclass(frozen=True)
class Patience:
    """timeout_s: of a whole call. connect_timeout_s: the part of it within which a server must
    have accepted the request."""

    timeout_s: float
    connect_timeout_s: float


class Reconnect:
    """The attempts of one request: `address` is the one to try now.

    now_s: of a clock that never goes back. draw: uniform in [0, 1), spreads the callers of a
    server that died over time.
    """

    def __init__(
        self, addresses: Addresses, patience: Patience, now_s: float, draw: Callable[[], float]
    ) -> None:
        self.address = addresses.preferred
        self.num_reconnects = 0
        self._addresses = addresses
        self._deadline_s = now_s + patience.timeout_s
        self._connect_deadline_s = now_s + min(patience.timeout_s, patience.connect_timeout_s)
        self._draw = draw
        # The last attempt was not made because its time would have come too late.
        self.out_of_time = False
        self._num_failures = 0  # since the last progress
        self._followed = False
        self._unanswered: Failure | None = None  # the newest since the last reply
        self._replied = False  # a server, to the attempt under way
        # Attempts that broke without a word from a server: each may yet reach one, once, and
        # take the request from a later attempt.
        self._num_lost = 0

    def time_left_s(self, now_s: float) -> float:
        """Until the call's deadline."""
        return self._deadline_s - now_s

    def answered(self, *, progress: bool) -> None:
        """The server at `address` replied, with something new or not."""
        self._addresses.preferred = self.address
        self._unanswered = None
        self._replied = True
        if progress:
            self._num_failures = 0
            self._followed = False

    def after(self, failure: Failure, *, accepted: bool, now_s: float) -> float | None:
        """Seconds to wait before the next attempt, at what `address` is then; None: no more."""
        if not (self._replied or failure.told or failure.cut_short):
            self._num_lost += 1
        self._replied = False
        if not (failure.is_retried(accepted=accepted) or self._was_lost_attempt(failure)):
            return None
        self._unanswered = failure
        delay_s = self._move_on(failure)
        give_up_s = self._deadline_s if accepted else self._connect_deadline_s
        if now_s + delay_s >= give_up_s:
            self.out_of_time = True
            return None
        self.num_reconnects += 1
        return delay_s

    def told_of(self, last: Failure) -> Failure:
        """What to say of attempts that ended with `last`: when time ran out in one that nobody
        answered, what went wrong before it."""
        if isinstance(last.error, DeadlineExceededError) and self._unanswered is not None:
            return self._unanswered
        return last

    def _was_lost_attempt(self, failure: Failure) -> bool:
        """Whether one of this call's own attempts, given up before, may be what took the request.

        Nobody else knows its secret, unless the caller was copied, as by a fork. Since each lost
        attempt excuses one replacement, two copies take the request from each other no more often
        than they lost attempts, and then the last one has it.
        """
        if failure.error.reason != REPLACED_REASON or not self._num_lost:
            return False
        self._num_lost -= 1
        return True

    def _move_on(self, failure: Failure) -> float:
        if failure.error.reason == REPLACED_REASON:
            return self._backoff_s(failure.error)  # the request is at this server
        hint = failure.holder_address
        if hint and hint != self.address and self._addresses.follows(hint):
            self.address = hint
            # At once, but not from one to the other and back for ever.
            if not self._followed:
                self._followed = True
                return 0.0
        else:
            self.address = self._addresses.after(self.address)
        return self._backoff_s(failure.error)

    def _backoff_s(self, error: OctavoError) -> float:
        num_rounds = self._num_failures // len(self._addresses.configured)
        self._num_failures += 1
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_rounds, 16))
        delay_s = backoff_s * (0.5 + 0.5 * self._draw())
        if error.reason in OVERLOAD_REASONS:
            return max(delay_s, (error.retry_after_ms or 0) / 1000)
        return delay_s


class Round(Generic[Reply]):
    """One unary call, asked of one server after the other until a reply settles it.

    for address in round:
        ... round.answered(reply) or round.failed(failure)
    return round.result()
    """

    def __init__(
        self, addresses: Addresses, settles: Callable[[Reply], bool], deadline_s: float
    ) -> None:
        self._addresses = addresses
        self._settles = settles
        self._deadline_s = deadline_s
        self._to_ask = addresses.in_turn()
        self._asked: set[str] = set()
        self._reply: Reply | None = None
        self._failure: Failure | None = None
        self._settled = False

    def __iter__(self) -> Iterator[str]:
        while self._to_ask and not self._settled:
            address = self._to_ask.pop(0)
            self._asked.add(address)
            yield address

    def timeout_s(self, now_s: float) -> float:
        """Of the attempt that begins now: one that hangs leaves half the time to the others."""
        left_s = self._deadline_s - now_s
        return left_s / 2 if self._to_ask else left_s

    def answered(self, reply: Reply) -> None:
        """Take a reply. One that settles nothing is returned if there comes no better one."""
        self._settled = self._settles(reply)
        if self._settled or self._reply is None:
            self._reply = reply

    def failed(self, failure: Failure) -> None:
        """Note a failure; the next server is asked if it may know better."""
        # What a server said counts for more than that another one is not there.
        if self._failure is None or failure.told:
            self._failure = failure
        if not isinstance(failure.error, UnavailableError | DeadlineExceededError):
            self._settled = True
        hint = failure.holder_address
        if hint and hint not in self._asked and self._addresses.follows(hint):
            self._to_ask = [hint, *(address for address in self._to_ask if address != hint)]

    def result(self) -> Reply:
        """The reply, or the failure raised."""
        if self._reply is not None:
            return self._reply
        assert self._failure is not None
        raise self._failure.error from self._failure.cause
