"""What goes wrong, and when: a plan drawn before the world starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from simulator.clock import MS, SECOND
from simulator.knobs import Knobs
from simulator.kvmem_shell import KvmemShell
from simulator.network import NO_FAULTS, NetworkFaults, Pair, pair_of
from simulator.process import Process, Surroundings


@dataclass(frozen=True)
class Fault:
    """What happens to `targets`. `after`: not at a time, but right after the n-th message of a
    kind, in the middle of an exchange that is delicate. `kind`:

    kill     all of them die soon, and are started again after about the duration
    lose     the same, with the journal deleted
    tear     the memory service dies in the middle of its next record
    die      ... or right after it, before it answers
    pause    of one
    cut      of one from the other
    isolate  of one from memory service and worker
    break    the connection of the one with the other, once
    """

    kind: str
    targets: tuple[str, ...]
    at_us: int
    duration_us: int
    after: tuple[str, int] | None = None


@dataclass(frozen=True)
class FaultPlan:
    """`network` holds until the faults stop, at `stop_us`."""

    network: NetworkFaults = NO_FAULTS
    faults: tuple[Fault, ...] = ()
    stop_us: int = 0

    @property
    def calm(self) -> bool:
        """Nothing is lost and nobody dies; delays do not count."""
        return not self.faults and not any(
            (
                self.network.break_connection,
                self.network.lose_request,
                self.network.lose_reply,
            )
        )

    @staticmethod
    def draw(draw: Random, knobs: Knobs, busy_us: tuple[int, ...], horizon_us: int) -> FaultPlan:
        """Each kind of fault has a probability of its own.

        `busy_us`: when requests come; most faults happen soon after.
        """
        delay_much = 0.3 if knobs.theme.churn else draw.choice([0.0, 0.0, 0.02, 0.1])
        call_twice = draw.choice([0.0, 0.3])
        network = NetworkFaults(delay_much=delay_much, call_twice=call_twice)
        theme = knobs.theme
        if theme.loses_messages:
            network = replace(
                network,
                break_connection=draw.choice(theme.break_connection),
                lose_request=draw.choice([0.0, 0.2]),
                lose_reply=draw.choice([0.0, 0.2]),
            )
        faults: list[Fault] = []
        for recipe in theme.recipes:
            duration_us = recipe.draw_duration_us(draw, knobs.keepalive_us)
            moment = recipe.draw_moment(draw)
            faults.append(Fault(recipe.kind, recipe.targets, 0, duration_us, moment))
            horizon_us = max(horizon_us, duration_us + 500 * MS)
        for kind, targets in theme.faults:
            if draw.random() < theme.fault_probability:
                at_us = draw.choice(busy_us) + draw.randint(0, 80 * MS)
                for _ in range(draw.randint(1, 3)):
                    after = _draw_moment(draw) if draw.random() < 0.6 else None
                    duration_us = _draw_duration_us(draw, knobs, kind, after)
                    faults.append(Fault(kind, targets, at_us, duration_us, after))
                    soon_us = at_us + draw.randint(0, 120 * MS)
                    at_us = draw.choice([soon_us, draw.randint(0, horizon_us)])
        return FaultPlan(network, tuple(faults), horizon_us)


# What is said while a scheduler connects: at first by the one, then by the other.
CONNECTING = ("GetInfo", "OpenSession", "Install", "AttachPool", "AdoptSequences")


def _draw_moment(draw: Random) -> tuple[str, int]:
    """While connecting, between an admission and its first step, or anywhere in between."""
    return draw.choice(
        [
            (draw.choice(CONNECTING), draw.randint(1, 4)),
            ("ApplyBatch", draw.randint(1, 4)),
            (draw.choice(["ApplyBatch", "Execute"]), draw.randint(1, 80)),
        ]
    )


def _draw_duration_us(draw: Random, knobs: Knobs, kind: str, after: tuple[str, int] | None) -> int:
    short_us = draw.randint(1 * MS, 100 * MS)
    # So long that some have given up, and others have not.
    long_us = knobs.keepalive_us + draw.randint(0, knobs.keepalive_us)
    if kind in ("kill", "lose", "tear", "die"):
        if after is not None and after[0] in CONNECTING:
            # Back before anybody looks.
            return draw.choice([draw.randint(50, 500), draw.randint(50, 500), short_us])
        return draw.choice([1 * MS, short_us, draw.randint(0, 3 * SECOND)])
    if kind == "isolate":
        return long_us
    return draw.choice([short_us, knobs.keepalive_us // 2, long_us, long_us])


@dataclass
class FaultInjector:
    """Carries a plan out."""

    world: Surroundings
    plan: FaultPlan
    kvmem: KvmemShell
    # By what they are called in a plan.
    processes: dict[str, list[Process]]
    _cuts: list[Pair] = field(default_factory=list)
    _over: bool = False

    def schedule(self) -> None:
        clock = self.world.network.clock
        self.world.network.faults = self.plan.network
        for fault in self.plan.faults:
            action = partial(self._begin, fault)
            if fault.after is not None:
                self.world.network.triggers.setdefault(fault.after, []).append(action)
            else:
                clock.at(fault.at_us, action)
        clock.at(self.plan.stop_us, self._stop)

    def _begin(self, fault: Fault) -> None:
        if not self._over:
            chosen = [self._choose(target) for target in fault.targets]
            match fault.kind:
                case "kill" | "lose":
                    for process in chosen:
                        self._kill_soon(fault, process)
                case "tear" | "die":
                    self._kill_in_write(fault)
                case "pause":
                    self._pause(fault, chosen[0])
                case "cut":
                    self._cut(fault, chosen[0], chosen[1])
                case "break":
                    self.world.network.break_connection(pair_of(chosen[0], chosen[1]))
                case "isolate":
                    self._cut(fault, chosen[0], self.processes["kvmem"][0])
                    self._cut(fault, chosen[0], self.processes["worker"][0])

    def _choose(self, target: str) -> Process:
        """One that is of consequence, mostly."""
        processes = self.processes[target]
        busy = [process for process in processes if process.serving]
        draw = self.world.draw
        return draw.choice(busy if busy and draw.random() < 0.8 else processes)

    def _note(self, what: str) -> None:
        self.world.history.note("FAULT", what)

    def _kill_soon(self, fault: Fault, process: Process) -> None:
        """The one for which the fault is planned at once, others around the same time."""
        draw = self.world.draw
        delay_us = 0 if len(fault.targets) == 1 else draw.choice([0, 0, draw.randint(0, 60 * MS)])
        duration_us = fault.duration_us
        if len(fault.targets) > 1:
            duration_us = draw.choice([duration_us, draw.randint(1 * MS, 2 * duration_us + MS)])
        process.clock.after(delay_us, partial(self._kill, fault, process, duration_us))

    def _kill(self, fault: Fault, process: Process, duration_us: int) -> None:
        if process.alive and not self._over:
            self._note(f"{process.name} is killed")
            who = {"kvmem": "memory service"}.get(process.kind, process.kind)
            self.world.marks.hit(f"swap under way when the {who} died", self.kvmem.swap_under_way)
            process.kill()
            if fault.kind == "lose" and process is self.kvmem:
                self._note("its journal is deleted")
                self.kvmem.disk.delete()
            self._restart_after(duration_us, process)

    def _kill_in_write(self, fault: Fault) -> None:
        how = "torn" if fault.kind == "tear" else "written"
        self._note(f"kvmem will die with a record {how}")
        self.kvmem.die_in_write(how, partial(self._restart_after, fault.duration_us, self.kvmem))

    def _restart_after(self, duration_us: int, process: Process) -> None:
        process.clock.after(duration_us, partial(self._restart, process, process.life))

    def _restart(self, process: Process, life: int) -> None:
        if not process.alive and process.life == life:
            self.world.marks.hit(f"{process.kind} restarted")
            process.start()

    def _pause(self, fault: Fault, process: Process) -> None:
        if process.alive and not process.paused:
            self._note(f"{process.name} is paused for {fault.duration_us / MS:g} ms")
            self.world.marks.hit(f"{process.kind} paused")
            process.pause()
            process.clock.after(fault.duration_us, partial(self._resume, process, process.life))

    def _resume(self, process: Process, life: int) -> None:
        if process.paused and process.life == life:
            self._note(f"{process.name} goes on")
            process.resume()

    def _cut(self, fault: Fault, one: Process, other: Process) -> None:
        a, b = sorted((one.name, other.name))
        duration_ms = fault.duration_us / MS
        self._note(f"{a} and {b} are cut off from each other for {duration_ms:g} ms")
        if a == "callers":
            self.world.marks.hit("callers cut off")
        else:
            self.world.marks.hit(f"scheduler cut off from {other.name}")
        self.world.network.cut((a, b))
        self._cuts.append((a, b))
        self.world.network.clock.after(fault.duration_us, partial(self._heal, (a, b)))

    def _heal(self, pair: Pair) -> None:
        if pair in self._cuts:
            self._cuts.remove(pair)
            self._note(f"{pair[0]} and {pair[1]} reach each other again")
            self.world.network.heal(pair)

    def _stop(self) -> None:
        """From here on nothing goes wrong, and everything must come right."""
        self._over = True
        self._note("no more faults")
        self.world.network.faults = NO_FAULTS
        self.kvmem.live_on()
        for pair in list(self._cuts):
            self._heal(pair)
        for processes in self.processes.values():
            for process in processes:
                if process.paused:
                    self._resume(process, process.life)
                if not process.alive and process.life:
                    process.start()
