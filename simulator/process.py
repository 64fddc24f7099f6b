"""A process that can be killed, started again, paused and resumed."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from random import Random

from simulator.checkers import Checks
from simulator.clock import Action
from simulator.history import History
from simulator.knobs import Knobs
from simulator.marks import Marks
from simulator.network import End, Network


@dataclass(frozen=True)
class Surroundings:
    """What every process of one world shares. `draw` is its only source of chance."""

    knobs: Knobs
    draw: Random
    network: Network
    history: History
    marks: Marks
    checks: Checks


class Died(Exception):
    """The process was killed in the middle of what it was doing: no line of it runs on."""


class Process:
    """`life` counts its starts; what belongs to a former life never reaches it.

    Subclasses fill in `boot`, which must forget everything, and what they serve.
    """

    def __init__(self, name: str, world: Surroundings) -> None:
        self.name = name
        self.alive = False
        self.paused = False
        self.life = 0
        self.world = world
        self.network = world.network
        self.clock = world.network.clock
        self._held: deque[Action] = deque()

    # ---- for subclasses ----

    def boot(self) -> None:
        """Begin a life with nothing in memory."""

    def accept(self, service: str, end: End) -> None:
        """Somebody opened a stream: set what `end` is to call."""
        raise NotImplementedError(service)

    def serve(self, method: str, request: object) -> object:
        """Carry out a unary call. Raises `Refused`."""
        raise NotImplementedError(method)

    @property
    def kind(self) -> str:
        """Its name, less the number."""
        return self.name.split("-")[0]

    @property
    def serving(self) -> bool:
        """Whether its end would be noticed."""
        return self.alive

    # ---- what is done to it ----

    def start(self) -> None:
        assert not self.alive
        self.alive, self.life = True, self.life + 1
        self.boot()

    def kill(self) -> None:
        self.alive = self.paused = False
        self._held.clear()
        self.network.drop_process(self)

    def pause(self) -> None:
        self.paused = True
        self.network.watch_silence(self)

    def resume(self) -> None:
        self.paused = False
        while self._held and self.alive and not self.paused:
            self._run(self._held.popleft())

    # ---- what it does ----

    def note(self, what: str) -> None:
        self.world.history.note(self.name, what)

    def deliver(self, action: Action) -> None:
        """Run `action` in the process: at once, or when it is no longer paused."""
        if not self.alive:
            return
        if self.paused:
            self._held.append(action)
        else:
            self._run(action)

    @staticmethod
    def _run(action: Action) -> None:
        with contextlib.suppress(Died):
            action()

    def after(self, delay_us: int, action: Action) -> None:
        """A timer of this life."""
        self.clock.after(delay_us, partial(self._wake, self.life, action))

    def _wake(self, life: int, action: Action) -> None:
        if life == self.life:
            self.deliver(action)
