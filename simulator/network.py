"""Streams and unary calls between processes, and everything that can happen to them.

See the package's docstring for what is possible and what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from simulator.clock import MS, Action, Clock
from simulator.history import History
from simulator.marks import Marks

if TYPE_CHECKING:
    from simulator.process import Process

UNAVAILABLE = "UNAVAILABLE"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"

Pair = tuple[str, str]


def _ignore(_: Any) -> None:
    """Nobody listens."""


class Reason(str):
    """Why a call was refused or a stream ended: a key of the error table, and what came with it:
    who has what was asked for, and where to find it."""

    __slots__ = ("holder", "holder_address")

    def __new__(cls, reason: str, *, holder: str = "", holder_address: str = "") -> Reason:
        made = super().__new__(cls, reason)
        made.holder, made.holder_address = holder, holder_address
        return made


class Refused(Exception):
    """A call or stream is refused; `reason` is a key of the error table."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Later:
    """An answer to a call that is yet to come."""

    def __init__(self) -> None:
        self._replies: list[object] = []
        self._on_answer: Callable[[object], None] | None = None

    def answer(self, reply: object) -> None:
        self._replies.append(reply)
        self._pass_on()

    def then(self, on_answer: Callable[[object], None]) -> None:
        self._on_answer = on_answer
        self._pass_on()

    def _pass_on(self) -> None:
        if self._replies and self._on_answer is not None:
            self._on_answer(self._replies.pop())


@dataclass(frozen=True)
class NetworkFaults:
    """Probabilities, each per message or call."""

    break_connection: float = 0.0
    delay_much: float = 0.0
    lose_request: float = 0.0
    lose_reply: float = 0.0
    call_twice: float = 0.0


NO_FAULTS = NetworkFaults()


class End:
    """One end of a stream, in the hands of the process that owns it."""

    def __init__(
        self, network: Network, process: Process, peer: Process, *, is_client: bool
    ) -> None:
        self.process = process
        self.is_client = is_client
        self.pair = pair_of(process, peer)
        self.life = process.life
        self.open = True
        self.on_message: Callable[[Any], None] = _ignore
        # Called once, with the reason, when the other side or the connection ends the stream.
        self.on_end: Callable[[str], None] = _ignore
        self.peer: End
        # When the newest message to this end arrives, and after which moment nothing does.
        self.newest_arrival_us = 0
        self.cutoff_us: int | None = None
        self._network = network

    def send(self, message: object) -> None:
        """Nothing happens on a stream that has ended: its end was or will be told."""
        if self.open:
            self._network.send(self, message)

    def close(self, reason: str) -> None:
        """End the stream from this side."""
        if self.open:
            self._network.close(self, reason)

    def vanish(self) -> None:
        """Be gone without a word: the other side finds out by itself."""
        self.open = False
        self._network.end_later(self.peer, self._network.keepalive_us, UNAVAILABLE)


def pair_of(a: Process, b: Process) -> Pair:
    return (a.name, b.name) if a.name < b.name else (b.name, a.name)


@dataclass(eq=False)
class Call:
    """A unary call: whoever answers first has answered."""

    client: Process
    server: Process
    method: str
    request: object
    on_reply: Callable[[Any], None]
    on_error: Callable[[str], None]

    def __post_init__(self) -> None:
        self.pair = pair_of(self.client, self.server)
        self.answered = False
        # The connection broke before the request arrived.
        self.lost = False
        self._life = self.client.life

    def succeed(self, reply: object) -> None:
        if self._take():
            self.on_reply(reply)

    def fail(self, reason: str) -> None:
        if self._take():
            self.on_error(reason)

    def _take(self) -> bool:
        first = not self.answered and self._life == self.client.life
        self.answered = True
        return first


class _Accept:
    """The first thing on a stream: whom it is for."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.accepted = False


class Network:
    """All streams and calls of one world."""

    def __init__(
        self, clock: Clock, draw: Random, keepalive_us: int, history: History, marks: Marks
    ) -> None:
        self.faults = NO_FAULTS
        self.keepalive_us = keepalive_us
        self.clock = clock
        self._draw = draw
        self._history = history
        self._marks = marks
        # Client ends of the streams that are open at either end, oldest first.
        self._streams: list[End] = []
        # Calls that are not answered yet, and a few more.
        self._calls: list[Call] = []
        self._opening: dict[End, _Accept] = {}
        self._num_cuts: dict[Pair, int] = {}
        # Things to happen right after the n-th message (or call) of a kind.
        self.triggers: dict[tuple[str, int], list[Action]] = {}
        self._num_sent: dict[str, int] = {}
        self._held: dict[Pair, list[Action]] = {}

    def delay_us(self) -> int:
        if self._draw.random() < self.faults.delay_much:
            return self._draw.randint(1 * MS, 60 * MS)
        return self._draw.randint(30, 300)

    def count(self, kind: str) -> None:
        """One more of these, which something may have waited for."""
        number = self._num_sent[kind] = self._num_sent.get(kind, 0) + 1
        for action in self.triggers.pop((kind, number), ()):
            self.clock.after(self._draw.randint(0, 300), action)

    # ---- streams ----

    def open_stream(self, client: Process, server: Process, service: str) -> End:
        """The client's end, at once; the server is asked to accept when the opening arrives."""
        near = End(self, client, server, is_client=True)
        far = End(self, server, client, is_client=False)
        near.peer, far.peer = far, near
        self._streams = [end for end in self._streams if end.open or end.peer.open]
        self._streams.append(near)
        self._opening[far] = _Accept(service)
        self.send(near, self._opening[far])
        return near

    def send(self, end: End, message: object) -> None:
        self.count(type(message).__name__)
        to = end.peer
        to.newest_arrival_us = max(to.newest_arrival_us + 1, self.clock.now_us + self.delay_us())
        self.clock.at(to.newest_arrival_us, partial(self._arrive, to, message))
        if self._draw.random() < self.faults.break_connection:
            moment_us = self._draw.randint(0, 2 * (to.newest_arrival_us - self.clock.now_us))
            self.clock.after(moment_us, partial(self.break_connection, end.pair))

    def _arrive(self, end: End, message: object) -> None:
        if self._hold(end.pair, partial(self._arrive, end, message)) or not end.open:
            return
        if end.cutoff_us is not None and self.clock.now_us > end.cutoff_us:
            self._marks.hit("message lost with its stream")
            return
        process = end.process
        if isinstance(message, _Accept):
            end.life = process.life
            if process.alive:
                process.deliver(partial(self._accept, end, message))
            else:
                self._end_now(end.peer, UNAVAILABLE)
        elif process.alive and end.life == process.life:
            process.deliver(partial(self._hand_over, end, message))
        else:
            self._end_now(end.peer, UNAVAILABLE)

    def _accept(self, end: End, opening: _Accept) -> None:
        self._opening.pop(end, None)
        if end.open:
            end.process.accept(opening.service, end)

    @staticmethod
    def _hand_over(end: End, message: object) -> None:
        if end.open:
            end.on_message(message)

    def close(self, end: End, reason: str) -> None:
        end.open = False
        to = end.peer
        if end.is_client and self._draw.random() < 0.5:
            # A cancellation may overtake what was sent before it.
            self._cut_off(to)
        self.end_later(to, max(0, to.newest_arrival_us - self.clock.now_us), reason)

    def end_later(self, end: End, delay_us: int, reason: str) -> None:
        self.clock.after(delay_us + self.delay_us(), partial(self._arrive_end, end, reason))

    def _arrive_end(self, end: End, reason: str) -> None:
        if not self._hold(end.pair, partial(self._arrive_end, end, reason)):
            self._end_now(end, reason)

    def _end_now(self, end: End, reason: str) -> None:
        """The process at `end` learns, as soon as it runs, that the stream has ended."""
        if end in self._opening:
            del self._opening[end]
            end.open = False
        elif end.open and end.life == end.process.life:
            end.process.deliver(partial(self._tell_end, end, reason))

    @staticmethod
    def _tell_end(end: End, reason: str) -> None:
        if end.open:
            end.open = False
            end.on_end(reason)

    def _cut_off(self, end: End) -> int:
        """Lose a suffix, of random length, of what is on its way to `end`; from when on."""
        latest_us = max(self.clock.now_us, end.newest_arrival_us)
        cutoff_us = self._draw.randint(self.clock.now_us, latest_us)
        end.cutoff_us = cutoff_us if end.cutoff_us is None else min(cutoff_us, end.cutoff_us)
        return cutoff_us

    # ---- what breaks ----

    def break_connection(self, pair: Pair) -> None:
        """Every stream of the two ends; each side learns it when it has read what arrived."""
        self._marks.hit("connection broken")
        self._history.note("network", f"the connection {pair[0]} - {pair[1]} breaks")
        for call in self._unanswered(pair):
            call.lost = self._draw.random() < 0.5
            self._answer(call, partial(call.fail, UNAVAILABLE))
        for near in self._streams:
            if near.pair == pair:
                for end in (near, near.peer):
                    self.clock.at(self._cut_off(end), partial(self._end_now, end, UNAVAILABLE))

    def drop_process(self, process: Process) -> None:
        """A process died: its system closes its connections."""
        for near in self._streams:
            for end in (near, near.peer):
                if end.process is process and end.open:
                    end.open = False
                    cutoff_us = self._cut_off(end.peer)
                    self.end_later(end.peer, cutoff_us - self.clock.now_us, UNAVAILABLE)
        for call in self._calls:
            if call.server is process:
                self._answer(call, partial(call.fail, UNAVAILABLE))

    def cut(self, pair: Pair) -> None:
        self._num_cuts[pair] = self._num_cuts.get(pair, 0) + 1
        self.clock.after(self.keepalive_us, partial(self._give_up_on_cut, pair))

    def heal(self, pair: Pair) -> None:
        self._num_cuts[pair] -= 1
        if self._num_cuts[pair]:
            return
        for action in self._held.pop(pair, []):
            self._marks.hit("message delivered late")
            action()

    def _hold(self, pair: Pair, action: Action) -> bool:
        """Whether `action` has to wait for a cut to heal."""
        if not self._num_cuts.get(pair):
            return False
        self._held.setdefault(pair, []).append(action)
        return True

    def _give_up_on_cut(self, pair: Pair) -> None:
        """Keepalive: both ends give the connection up, each by itself."""
        if not self._num_cuts.get(pair):
            return
        # Each end counts from when it last heard of the other.
        jitter_us = {name: self._draw.randint(0, self.keepalive_us * 2 // 3) for name in pair}
        for near in self._streams:
            if near.pair == pair:
                for end in (near, near.peer):
                    self.clock.after(
                        jitter_us[end.process.name], partial(self._end_now, end, UNAVAILABLE)
                    )
        for call in self._unanswered(pair):
            self.clock.after(
                jitter_us[call.client.name],
                partial(call.client.deliver, partial(call.fail, UNAVAILABLE)),
            )
        self.clock.after(self.keepalive_us, partial(self._give_up_on_cut, pair))

    def watch_silence(self, process: Process) -> None:
        """`process` is paused: its peers give it up when that lasts."""
        self.clock.after(self.keepalive_us, partial(self._give_up_on, process, process.life))

    def _give_up_on(self, process: Process, life: int) -> None:
        if not (process.paused and process.life == life):
            return
        jitter_us: dict[Pair, int] = {}
        for near in self._streams:
            for end in (near, near.peer):
                if end.process is process:
                    if end.pair not in jitter_us:
                        jitter_us[end.pair] = self._draw.randint(0, self.keepalive_us * 2 // 3)
                    self.clock.after(jitter_us[end.pair], partial(self._give_up_end, end, life))
        for call in self._calls:
            if call.server is process:
                self._answer(call, partial(call.fail, UNAVAILABLE))
        self.watch_silence(process)

    def _give_up_end(self, end: End, life: int) -> None:
        if end.process.paused and end.process.life == life:
            self._end_now(end.peer, UNAVAILABLE)
            self._end_now(end, UNAVAILABLE)

    # ---- unary calls ----

    def _unanswered(self, pair: Pair) -> list[Call]:
        return [call for call in self._calls if call.pair == pair and not call.answered]

    def call(self, call: Call, deadline_us: int) -> None:
        """Exactly one of its `on_reply` and `on_error` is called, at the deadline at the latest."""
        self.count(call.method)
        self._calls = [other for other in self._calls if not other.answered]
        self._calls.append(call)
        client, faults = call.client, self.faults
        client.after(deadline_us, partial(call.fail, DEADLINE_EXCEEDED))
        if self._draw.random() < faults.lose_request:
            self._marks.hit("unary request lost")
            self._lose(call)
            return
        self.clock.after(self.delay_us(), partial(self._arrive_call, call))
        if self._draw.random() < faults.call_twice:
            self._marks.hit("unary call carried out twice")
            self.clock.after(
                self.delay_us() + self._draw.randint(0, 50 * MS), partial(self._arrive_call, call)
            )

    def _lose(self, call: Call) -> None:
        """The client learns at once, or when keepalive finds the connection dead."""
        at_once = self._draw.random() < 0.7
        delay_us = self.delay_us() if at_once else self.keepalive_us
        call.client.after(delay_us, partial(call.fail, UNAVAILABLE))

    def _arrive_call(self, call: Call) -> None:
        if call.lost or self._hold(call.pair, partial(self._arrive_call, call)):
            return
        if call.server.alive:
            call.server.deliver(partial(self._carry_out, call))
        else:
            self._answer(call, partial(call.fail, UNAVAILABLE))

    def _carry_out(self, call: Call) -> None:
        try:
            reply = call.server.serve(call.method, call.request)
        except Refused as refused:
            self._answer(call, partial(call.fail, refused.reason))
            return
        if isinstance(reply, Later):
            reply.then(partial(self._reply, call))
        else:
            self._reply(call, reply)

    def _reply(self, call: Call, reply: object) -> None:
        if self._draw.random() < self.faults.lose_reply:
            self._marks.hit("unary reply lost")
            self._lose(call)
            return
        self._answer(call, partial(call.succeed, reply))

    def _answer(self, call: Call, action: Action) -> None:
        self.clock.after(self.delay_us(), partial(self._arrive_answer, call, action))

    def _arrive_answer(self, call: Call, action: Action) -> None:
        if not self._hold(call.pair, partial(self._arrive_answer, call, action)):
            call.client.deliver(action)
