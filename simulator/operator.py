"""An operator, who pins cached prefixes in the memory service and lets some of them go again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from kvmem_svc.core import batch as kv
from kvmem_svc.core import mutations
from kvmem_svc.core.prefix_cache import Domain
from simulator.clock import MS, SECOND
from simulator.knobs import Knobs
from simulator.kvmem_shell import KvmemShell
from simulator.messages import Pin, Unpin
from simulator.network import Call
from simulator.process import Process, Surroundings
from simulator.workload import Workload

DEADLINE_US = SECOND
CLEANING_PAUSE_US = 50 * MS
MAX_ATTEMPTS = 6
ATTEMPTS_PAUSE_US = 15 * MS


@dataclass(frozen=True)
class Errand:
    """A prefix to be pinned. `let_go_us`: how long after it is let go; None: its time ends."""

    at_us: int
    domain: Domain
    token_ids: tuple[int, ...]
    ttl_ms: int
    is_public: bool
    let_go_us: int | None


def draw_errands(draw: Random, knobs: Knobs, workload: Workload) -> tuple[Errand, ...]:
    """None where nothing is cached."""
    if not knobs.use_prefix_cache or draw.random() < 0.2:
        return ()
    return tuple(_draw_errand(draw, workload) for _ in range(draw.randint(2, 8)))


def _draw_errand(draw: Random, workload: Workload) -> Errand:
    script = draw.choice(workload.scripts)
    message = script.message
    prompt = message.prompt_token_ids
    lets_go = draw.random() < 0.5
    return Errand(
        draw.choice(workload.busy_us) + draw.randint(5 * MS, 200 * MS),
        Domain(message.tenant, message.cache_salt),
        prompt[: draw.choice([len(prompt), draw.randint(1, len(prompt))])],
        draw.choice([0, 2_000]) if lets_go else draw.choice([50, 300, 2_000]),
        draw.random() < 0.5,
        draw.randint(0, 200 * MS) if lets_go else None,
    )


class Operator(Process):
    """Knows which session is open, and is never killed."""

    def __init__(self, world: Surroundings, kvmem: KvmemShell, errands: tuple[Errand, ...]) -> None:
        super().__init__("operator", world)
        self._kvmem, self._errands = kvmem, errands
        # Errands that are yet to be run, and calls that are yet to be answered.
        self._num_left = len(errands)

    def boot(self) -> None:
        for errand in self._errands:
            self.after(errand.at_us, partial(self._pin, errand, MAX_ATTEMPTS))

    def _fence(self) -> kv.Fence | None:
        """Of the session that is open, or was when the memory service died."""
        if not self._kvmem.life or self._kvmem.memory.ledger.session is None:
            return None
        return self._kvmem.memory.ledger.fence()

    def _call(self, request: Pin | Unpin, on_reply: Callable[..., None]) -> None:
        def replied(reply: object) -> None:
            self._num_left -= 1
            on_reply(reply)

        def refused(reason: str) -> None:
            self._num_left -= 1
            self.note(f"is refused: {reason}")

        self._num_left += 1
        call = Call(self, self._kvmem, type(request).__name__, request, replied, refused)
        self.network.call(call, DEADLINE_US)

    def _pin(self, errand: Errand, num_attempts: int) -> None:
        self._num_left -= 1
        fence = self._fence()
        if fence is None:
            return
        pin = mutations.Pin(
            errand.domain, np.array(errand.token_ids, np.int32), errand.ttl_ms, errand.is_public
        )
        self._call(Pin(fence, pin), partial(self._on_pinned, errand, num_attempts))

    def _on_pinned(self, errand: Errand, num_attempts: int, pinned: mutations.Pinned) -> None:
        if pinned.pin_id and errand.let_go_us is not None:
            self.after(errand.let_go_us, partial(self._let_go, pinned.pin_id))
        elif not pinned.pin_id and num_attempts > 1:
            # Nothing of it was cached yet.
            self._num_left += 1
            self.after(ATTEMPTS_PAUSE_US, partial(self._pin, errand, num_attempts - 1))

    def _let_go(self, pin_id: int) -> None:
        fence = self._fence()
        if fence is not None:
            self._call(Unpin(fence, pin_id), lambda _: None)

    # ---- in the end ----

    @property
    def is_done(self) -> bool:
        """All errands are run, and nothing is held any more."""
        manager = self._kvmem.memory.manager
        return not self._num_left and (manager is None or not manager.pins)

    def let_go_of_all(self) -> None:
        """Also of pins whose replies were lost. What ends by itself is left to do so."""
        manager = self._kvmem.memory.manager
        for pin in manager.pins.values() if manager is not None else ():
            if not pin.ttl_ms:
                self._let_go(pin.pin_id)
        if not self.is_done:
            self.after(CLEANING_PAUSE_US, self.let_go_of_all)
