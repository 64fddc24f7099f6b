"""The callers: each sends its request, reads its stream, and may leave early or come back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from scheduler_svc.core.sequence import Request
from simulator.checkers import StreamCheck
from simulator.clock import MS, SECOND
from simulator.messages import Accepted, Output
from simulator.network import UNAVAILABLE, Call, End
from simulator.process import Process, Surroundings
from simulator.scheduler_shell import SchedulerShell
from simulator.worker import Violation, expect
from simulator.workload import Script

# A caller may end with these, and may try again.
TRANSIENT = frozenset(
    ("NOT_READY", "QUEUE_FULL", "REQUEST_EXISTS", "WORKER_LOST", "KVMEM_LOST", UNAVAILABLE)
)
# These say that somebody died, or that a connection broke.
DEATHS = frozenset(("WORKER_LOST", "KVMEM_LOST", UNAVAILABLE))
# These say that the request is wrong; the shell checks before it asks.
MISTAKES = frozenset(("PROMPT_EXCEEDS_POOL", "PROMPT_TOO_LONG", "INVALID_PARAMETER"))

ABORT_DEADLINE_US = 5 * SECOND


@dataclass(eq=False)
class Attempt:
    """One stream of one caller. `end`: "", while it runs; "complete", "left", or a reason."""

    check: StreamCheck
    stream: End
    num_messages: int = 0
    end: str = ""


class Caller:
    """Plays one script. At most one attempt is under way."""

    def __init__(self, script: Script, callers: Callers) -> None:
        self.script = script
        self.attempts: list[Attempt] = []
        self.done = False
        self._callers = callers

    @property
    def name(self) -> str:
        return self.script.message.request_id

    def begin(self) -> None:
        """Send the request to one of the schedulers."""
        script, callers = self.script, self._callers
        message = script.message
        scheduler = callers.choose_scheduler()
        if self._num_heard():
            callers.world.marks.hit("same id again")
        request = Request(message.request_id, message.prompt_token_ids, message.params)
        stream = callers.network.open_stream(callers, scheduler, "Generate")
        check = StreamCheck(request, callers.world.checks.solo_runs, self.name)
        attempt = Attempt(check, stream)
        self.attempts.append(attempt)
        stream.on_message = partial(self._on_message, attempt)
        stream.on_end = partial(self._on_end, attempt)
        params = message.params
        callers.note(
            f"{self.name} asks {scheduler.name}: {len(message.prompt_token_ids)} tokens,"
            f" n {params.n}, max_tokens {params.max_tokens}"
        )
        stream.send(message)
        if script.leaves and self._num_heard() < script.num_leaves:
            if script.leaves_after_messages == 0:
                self._leave(attempt, scheduler)
            elif script.leaves_after_us is not None:
                callers.after(script.leaves_after_us, partial(self._leave, attempt, scheduler))

    def _num_heard(self) -> int:
        """Attempts that ended and were more than a knock at a closed door."""
        return sum(attempt.end not in ("", "NOT_READY") for attempt in self.attempts)

    def _on_message(self, attempt: Attempt, message: Accepted | Output) -> None:
        attempt.num_messages += 1
        if isinstance(message, Accepted):
            attempt.check.on_accepted()
        else:
            for delta in message.deltas:
                attempt.check.on_delta(delta)
            if message.last:
                attempt.check.on_last()
                self._finish(attempt, "complete")
                return
        script = self.script
        enough = attempt.num_messages == script.leaves_after_messages
        if enough and self._num_heard() < script.num_leaves:
            self._leave(attempt, None)

    def _leave(self, attempt: Attempt, scheduler: SchedulerShell | None) -> None:
        if attempt.end:
            return
        callers, how = self._callers, self.script.leaves
        callers.note(f"{self.name} gives up ({how}) after {attempt.num_messages} messages")
        if how == "abort" and scheduler is not None:
            # The stream then ends with UNKNOWN_REQUEST; where the call is lost, it goes on.
            call = Call(callers, scheduler, "Abort", self.name, _ignore, _ignore)
            callers.network.call(call, ABORT_DEADLINE_US)
            return
        if how == "vanish":
            callers.world.marks.hit("caller vanished")
            attempt.stream.vanish()
        else:
            attempt.stream.close("CANCELLED")
        self._finish(attempt, "left")

    def _on_end(self, attempt: Attempt, reason: str) -> None:
        if not attempt.end:
            self._check_reason(attempt, reason)
            self._finish(attempt, reason)

    def _check_reason(self, attempt: Attempt, reason: str) -> None:
        marks = self._callers.world.marks
        if reason in DEATHS:
            expect(not self._callers.calm, "errors are true", f"{self.name}: {reason}, nobody died")
        if reason == "UNKNOWN_REQUEST":
            aborted = self.script.leaves == "abort"
            expect(aborted, "errors are true", f"{self.name}: {reason}, nobody aborted it")
        elif reason in MISTAKES:
            expect(not attempt.check.accepted, "errors are true", f"{self.name}: {reason} too late")
            if reason == "PROMPT_EXCEEDS_POOL":
                marks.hit("prompt exceeds pool")
        elif reason not in TRANSIENT:
            raise Violation("errors are true", f"{self.name} ended with {reason}")
        if reason == "QUEUE_FULL":
            marks.hit("queue full")
        elif reason in ("WORKER_LOST", "KVMEM_LOST"):
            marks.hit(f"request ended with {reason}")
        elif reason == UNAVAILABLE and attempt.check.accepted:
            marks.hit("request lost with its scheduler")

    def _finish(self, attempt: Attempt, end: str) -> None:
        attempt.end = end
        callers, script = self._callers, self.script
        callers.note(f"{self.name} ends: {end}, {attempt.check.num_tokens} tokens")
        draw = callers.world.draw
        if end == "NOT_READY":
            callers.after(draw.randint(10 * MS, 500 * MS), self.begin)
            return
        callers.num_requests += attempt.check.accepted
        again = end in TRANSIENT or end in ("left", "UNKNOWN_REQUEST")
        if again and script.comes_back and self._num_heard() < script.max_attempts:
            most_us = script.returns_within_us
            callers.after(draw.choice([0, min(MS, most_us), draw.randint(0, most_us)]), self.begin)
        else:
            self.done = True


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

    def choose_scheduler(self) -> SchedulerShell:
        """Mostly one that serves: a load balancer with stale knowledge."""
        draw = self.world.draw
        serving = [scheduler for scheduler in self._schedulers if scheduler.serving]
        if serving and draw.random() < 0.9:
            return draw.choice(serving)
        return draw.choice(self._schedulers)

    def add(self, script: Script) -> Caller:
        caller = Caller(script, self)
        self.callers.append(caller)
        self.clock.at(script.at_us, caller.begin)
        return caller

    def probe(self, name: str, script: Script) -> Caller:
        """A caller of now, who only wants to be served."""
        message = replace(script.message, request_id=name)
        return self.add(Script(message, self.clock.now_us, comes_back=True, max_attempts=1000))

    @property
    def all_done(self) -> bool:
        return all(caller.done for caller in self.callers)
