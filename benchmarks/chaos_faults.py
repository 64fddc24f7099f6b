"""What chaos does to a stack: every kind of death, pause and cut, as a table."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.chaos_stack import ChaosStack

# Beyond a scheduler's lease of 3 s, with time for the standby to take over.
LEASE_PAUSE_S = 4.0
SHORT_PAUSE_S = 1.0

Fault = Callable[[ChaosStack, str], Awaitable[None]]


@dataclass(frozen=True)
class Kind:
    """One kind of fault. weight: how often it is in a deck."""

    name: str
    weight: int
    # Called with the stack and the name of the scheduler that has the session.
    strike: Fault


def _named(stack: ChaosStack, owner: str, service: str) -> str:
    return {"owner": owner, "standby": stack.standby_of(owner)}.get(service, service)


def _kill(*services: str) -> Fault:
    async def strike(stack: ChaosStack, owner: str) -> None:
        stack.kill(*(_named(stack, owner, service) for service in services))

    return strike


async def _lose_journal(stack: ChaosStack, owner: str) -> None:
    del owner
    stack.lose_journal()


def _pause(service: str, pause_s: float) -> Fault:
    async def strike(stack: ChaosStack, owner: str) -> None:
        name = _named(stack, owner, service)
        stack.signal(name, signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        stack.signal(name, signal.SIGCONT)

    return strike


def _cut(link: str) -> Fault:
    async def strike(stack: ChaosStack, owner: str) -> None:
        stack.links[owner, link].cut()

    return strike


def _refuse(link: str) -> Fault:
    async def strike(stack: ChaosStack, owner: str) -> None:
        proxy = stack.links[owner, link]
        proxy.refuse()
        await asyncio.sleep(SHORT_PAUSE_S)
        proxy.heal()

    return strike


def _silence(link: str) -> Fault:
    async def strike(stack: ChaosStack, owner: str) -> None:
        proxy = stack.links[owner, link]
        proxy.silence()
        await asyncio.sleep(LEASE_PAUSE_S)
        proxy.heal()

    return strike


KINDS = (
    Kind("scheduler", 4, _kill("owner")),
    Kind("kvmem", 4, _kill("kvmem")),
    Kind("worker", 2, _kill("worker")),
    Kind("kvmem_and_journal", 2, _lose_journal),
    Kind("standby", 1, _kill("standby")),
    Kind("both_schedulers", 1, _kill("owner", "standby")),
    Kind("kvmem_and_worker", 1, _kill("kvmem", "worker")),
    Kind("scheduler_and_kvmem", 2, _kill("owner", "kvmem")),
    Kind("everything", 1, _kill("owner", "standby", "kvmem", "worker")),
    Kind("pause_scheduler", 1, _pause("owner", LEASE_PAUSE_S)),
    Kind("pause_kvmem", 1, _pause("kvmem", LEASE_PAUSE_S)),
    Kind("pause_worker", 1, _pause("worker", SHORT_PAUSE_S)),
    Kind("cut_client", 1, _cut("client")),
    Kind("cut_kvmem", 1, _cut("kvmem")),
    Kind("cut_worker", 1, _cut("worker")),
    Kind("refuse_client", 1, _refuse("client")),
    Kind("refuse_kvmem", 1, _refuse("kvmem")),
    Kind("refuse_worker", 1, _refuse("worker")),
    Kind("silence_kvmem", 1, _silence("kvmem")),
)


class Deck:
    """The kinds in random order, each as often as its weight says, over and over."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._left: list[Kind] = []

    def next(self) -> Kind:
        if not self._left:
            self._left = [kind for kind in KINDS for _ in range(kind.weight)]
            self._draw.shuffle(self._left)
        return self._left.pop()
