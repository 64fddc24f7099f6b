"""The callers: each sends its request, reads its stream, and may leave early or come back.

Most of them keep a secret, as the client SDK does: however often its stream breaks, such a caller
goes on with what it has, and whatever dies, its request ends complete. Those without one have a
stream that may break, and nothing to come back to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from simulator.checkers import StreamCheck
from simulator.clock import MS, SECOND
from simulator.messages import Abort, Accepted, Attachment, Output
from simulator.network import UNAVAILABLE, Call, End, Reason
from simulator.process import Process, Surroundings
from simulator.scheduler_shell import SchedulerShell
from simulator.worker import Violation, expect
from simulator.workload import Script

# These say that somebody died, or that a connection broke.
DEATHS = frozenset(("WORKER_LOST", "KVMEM_LOST", UNAVAILABLE))
# The request was not entered, and may be elsewhere or later.
CLOSED_DOORS = frozenset(("NOT_READY", "NOT_LEADER"))
# Its own former stream came late and took the request: nobody else knows the secret.
REPLACED = "ATTACH_REPLACED"
# Refusals that are final for a new request, and temporary for one that was accepted before.
OVERLOAD = frozenset(("QUEUE_FULL", "TENANT_QUOTA"))
# These say that the request is wrong; the shell checks before it asks.
MISTAKES = frozenset(("PROMPT_EXCEEDS_POOL", "PROMPT_TOO_LONG", "INVALID_PARAMETER"))

ABORT_DEADLINE_US = 5 * SECOND
# As in `octavo._reconnect`.
FIRST_BACKOFF_US = 50 * MS
MAX_BACKOFF_US = SECOND


@dataclass(eq=False)
class Asking:
    """One request of one caller, over all its streams. `end`: "", while it goes on; "complete",
    "left", or the reason it was refused for."""

    check: StreamCheck
    secret: bytes
    stream: End | None = None
    num_streams: int = 0
    num_messages: int = 0
    # Of the stream under way.
    has_reply: bool = False
    # Streams given up without a reply: each may come late and take the request, once.
    num_lost: int = 0
    # Since the last progress.
    num_failures: int = 0
    followed: bool = False
    aborted: bool = False
    end: str = ""


class Caller:
    """Plays one script. At most one request, and one stream of it, is under way."""

    def __init__(self, script: Script, callers: Callers, number: int) -> None:
        self.script = script
        self.askings: list[Asking] = []
        self.done = False
        self._callers = callers
        self._number = number
        self._num_left = 0

    @property
    def name(self) -> str:
        return self.script.message.request_id

    # ---- asking ----

    def begin(self) -> None:
        """Ask, under the same id as before but as somebody else."""
        script, callers = self.script, self._callers
        if self.askings:
            callers.world.marks.hit("same id again")
        secret = f"{self._number}.{len(self.askings)}".encode() if script.attaches else b""
        check = StreamCheck(script.request(), callers.world.checks.solo_runs, self.name)
        asking = Asking(check, secret)
        self.askings.append(asking)
        self._open_stream(asking)
        if self._may_leave() and script.leaves_after_us is not None:
            callers.after(script.leaves_after_us, partial(self._leave, asking))

    def _open_stream(self, asking: Asking, address: str = "") -> None:
        if asking.end:
            return
        script, callers = self.script, self._callers
        scheduler = callers.choose_scheduler(address)
        stream = asking.stream = callers.network.open_stream(callers, scheduler, "Generate")
        asking.num_streams += 1
        asking.has_reply = False
        asking.check.on_stream()
        stream.on_message = partial(self._on_message, asking, stream)
        stream.on_end = partial(self._on_end, asking, stream)
        message = script.message
        if asking.secret:
            attachment = Attachment(asking.secret, script.detach_ttl_ms, asking.check.received())
            message = replace(message, attachment=attachment)
        params = message.params
        callers.note(
            f"{self.name} asks {scheduler.name}: {len(message.prompt_token_ids)} tokens,"
            f" n {params.n}, max_tokens {params.max_tokens}; has {asking.check.num_tokens}"
        )
        stream.send(message)
        if self._may_leave() and script.leaves_after_messages == asking.num_messages == 0:
            self._leave(asking)

    # ---- hearing ----

    def _on_message(self, asking: Asking, stream: End, message: Accepted | Output) -> None:
        if asking.end or asking.stream is not stream:
            return
        asking.num_messages += 1
        asking.has_reply = True
        if isinstance(message, Accepted):
            asking.check.on_accepted()
        else:
            asking.num_failures, asking.followed = 0, False
            for delta in message.deltas:
                asking.check.on_delta(delta)
            if message.last:
                asking.check.on_last()
                self._callers.world.marks.hit("completed over a death", asking.num_streams > 1)
                self._finish(asking, "complete")
                return
        if self._may_leave() and asking.num_messages == self.script.leaves_after_messages:
            self._leave(asking)

    def _on_end(self, asking: Asking, stream: End, reason: str) -> None:
        if asking.end or asking.stream is not stream:
            return
        asking.stream = None
        asking.num_lost += reason == UNAVAILABLE and not asking.has_reply
        self._check_reason(asking, reason)
        if asking.aborted:
            self._finish(asking, "left")
        elif self._is_passing(asking, reason):
            self._try_again(asking, reason)
        else:
            self._finish(asking, str(reason))

    @staticmethod
    def _is_passing(asking: Asking, reason: str) -> bool:
        """Whether the SDK tries again; and those who knock at a door that is still closed."""
        if reason in CLOSED_DOORS:
            return bool(asking.secret) or not asking.check.ever_accepted
        if not asking.secret:
            return False
        accepted = asking.check.ever_accepted
        return reason in DEATHS or reason == REPLACED or (accepted and reason in OVERLOAD)

    def _try_again(self, asking: Asking, reason: str) -> None:
        address = reason.holder_address if isinstance(reason, Reason) else ""
        callers, draw = self._callers, self._callers.world.draw
        if address and not asking.followed:
            asking.followed = True
            callers.world.marks.hit("followed to the leader")
            callers.after(0, partial(self._open_stream, asking, address))
            return
        backoff_us = min(MAX_BACKOFF_US, FIRST_BACKOFF_US * 2 ** min(asking.num_failures, 8))
        asking.num_failures += 1
        callers.after(
            draw.randint(backoff_us // 2, backoff_us), partial(self._open_stream, asking, address)
        )

    def _check_reason(self, asking: Asking, reason: str) -> None:
        marks = self._callers.world.marks
        accepted = asking.check.ever_accepted
        if reason in DEATHS:
            expect(not self._callers.calm, "errors are true", f"{self.name}: {reason}, nobody died")
            marks.hit("stream broke under its caller", asking.check.accepted)
            marks.hit("request lost with its stream", accepted and not asking.secret)
        elif reason == "UNKNOWN_REQUEST":
            # Without a secret, the abort of a predecessor may come late and hit this one, and
            # that of its twin, too.
            others = len(self.askings) > 1 or self.script.has_twin
            aborted = asking.aborted or (not asking.secret and others)
            expect(aborted, "errors are true", f"{self.name}: {reason}, nobody aborted it")
        elif reason in MISTAKES:
            fits = len(self.script.message.prompt_token_ids) <= self._callers.pool_tokens()
            too_late = accepted and (fits or reason != "PROMPT_EXCEEDS_POOL")
            expect(not too_late, "errors are true", f"{self.name}: {reason} too late")
            marks.hit("prompt exceeds pool", reason == "PROMPT_EXCEEDS_POOL")
        elif reason == "REQUEST_EXISTS":
            known = not asking.secret or self.script.has_twin or len(self.askings) > 1
            expect(known, "errors are true", f"{self.name}: {reason}, it is its own")
        elif reason in OVERLOAD:
            marks.hit("queue full" if reason == "QUEUE_FULL" else "tenant quota refused")
        elif reason == REPLACED:
            # As `octavo._reconnect` counts: its own stream that came late, and nobody else's.
            expect(asking.num_lost > 0, "errors are true", f"{self.name}: {reason}, by nobody")
            asking.num_lost -= 1
        elif reason not in CLOSED_DOORS:
            raise Violation("errors are true", f"{self.name} ended with {reason}")

    # ---- leaving ----

    def _may_leave(self) -> bool:
        return bool(self.script.leaves) and self._num_left < self.script.num_leaves

    def _leave(self, asking: Asking) -> None:
        if asking.end or asking.aborted or asking.stream is None:
            return
        callers, how = self._callers, self.script.leaves
        callers.note(f"{self.name} gives up ({how}) after {asking.num_messages} messages")
        self._num_left += 1
        if how == "abort":
            # The stream then ends with UNKNOWN_REQUEST; where the calls are lost, it goes on.
            asking.aborted = True
            callers.abort_everywhere(Abort(self.name, asking.secret))
            return
        stream, asking.stream = asking.stream, None
        asking.num_lost += not asking.has_reply
        if how == "vanish":
            callers.world.marks.hit("caller vanished")
            stream.vanish()
        else:
            stream.close("CANCELLED")
        if how == "cancel" and asking.secret:
            callers.abort_everywhere(Abort(self.name, asking.secret))
        if asking.secret and how in ("vanish", "detach") and self.script.comes_back:
            delay_us = callers.world.draw.randint(0, self.script.returns_within_us)
            callers.after(delay_us, partial(self._open_stream, asking))
        else:
            self._finish(asking, "left")

    def _finish(self, asking: Asking, end: str) -> None:
        asking.end = end
        asking.stream = None
        callers, script = self._callers, self.script
        callers.note(f"{self.name} ends: {end}, {asking.check.num_tokens} tokens")
        callers.num_requests += asking.check.ever_accepted
        again = end != "complete" and end not in MISTAKES
        if again and script.comes_back and len(self.askings) < script.max_attempts:
            most_us = script.returns_within_us
            draw = callers.world.draw
            callers.after(draw.choice([0, min(MS, most_us), draw.randint(0, most_us)]), self.begin)
        else:
            self.done = True
            callers.on_done(self.name)


def _ignore(_: object) -> None:
    """Whether an abort found its request makes no difference to its caller."""


class Callers(Process):
    """All callers, behind one network interface. They are never killed."""

    def __init__(
        self, world: Surroundings, schedulers: list[SchedulerShell], *, calm: bool
    ) -> None:
        """`calm`: nothing will go wrong that could excuse an error."""
        super().__init__("callers", world)
        self.calm = calm
        self.callers: list[Caller] = []
        self.num_requests = 0
        self._schedulers = schedulers
        # By the name of whom they wait for.
        self._followers: dict[str, list[Caller]] = {}

    def choose_scheduler(self, address: str = "") -> SchedulerShell:
        """The one at the address; else mostly one that serves: a load balancer with stale
        knowledge."""
        draw = self.world.draw
        for scheduler in self._schedulers:
            if scheduler.name == address:
                return scheduler
        serving = [scheduler for scheduler in self._schedulers if scheduler.serving]
        if serving and draw.random() < 0.8:
            return draw.choice(serving)
        return draw.choice(self._schedulers)

    def abort_everywhere(self, message: Abort) -> None:
        """Whoever has the request is among them."""
        for scheduler in self._schedulers:
            call = Call(self, scheduler, "Abort", message, _ignore, _ignore)
            self.network.call(call, ABORT_DEADLINE_US)

    def pool_tokens(self) -> int:
        """Of the smallest pool that somebody serves with."""
        infos = [s.worker_info for s in self._schedulers if s.worker_info is not None]
        sizes = [i.geometry.num_blocks * i.geometry.block_size for i in infos]
        return min(sizes, default=0)

    def add(self, script: Script) -> Caller:
        caller = Caller(script, self, len(self.callers))
        self.callers.append(caller)
        self.world.checks.kv.enter(script.request(), script.num_asked_tokens)
        if script.follows:
            self._followers.setdefault(script.follows, []).append(caller)
        else:
            self.clock.at(script.at_us, caller.begin)
        return caller

    def on_done(self, name: str) -> None:
        """A caller is done, whatever came of it: the conversation goes on."""
        for caller in self._followers.pop(name, ()):
            self.after(caller.script.at_us, caller.begin)

    def probe(self, name: str, script: Script) -> Caller:
        """A caller of now, who only wants to be served."""
        message = replace(script.message, request_id=name)
        return self.add(Script(message, self.clock.now_us, comes_back=True, max_attempts=1000))

    @property
    def all_done(self) -> bool:
        return all(caller.done for caller in self.callers)
