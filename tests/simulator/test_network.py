"""The simulated network keeps the promises of real streams, and no others."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from simulator.checkers import Checks
from simulator.clock import MS, Clock
from simulator.history import History
from simulator.knobs import Knobs
from simulator.marks import Marks
from simulator.network import Call, End, Network, NetworkFaults
from simulator.process import Process, Surroundings


class Server(Process):
    """Keeps what it gets."""

    def boot(self) -> None:
        self.got: list[int] = []
        self.ends: list[str] = []
        self.num_calls = 0

    def accept(self, service: str, end: End) -> None:
        end.on_message = self.got.append
        end.on_end = self.ends.append

    def serve(self, method: str, request: object) -> int:
        self.num_calls += 1
        return self.num_calls


class Lab:
    def __init__(self, seed: int, faults: NetworkFaults) -> None:
        self.clock = Clock()
        draw = Random(seed)
        history, marks = History(self.clock, keep=False), Marks()
        self.network = Network(self.clock, draw, 500 * MS, history, marks)
        self.network.faults = faults
        world = Surroundings(Knobs.draw(draw), draw, self.network, history, marks, Checks(marks))
        self.client, self.server = Server("client", world), Server("server", world)
        self.client.start()
        self.server.start()

    def run(self) -> None:
        while self.clock.now_us < 5_000 * MS and self.clock.run_next():
            pass


@pytest.mark.parametrize("seed", range(40))
def test_what_arrives_on_a_stream_is_a_beginning_of_what_was_sent(seed: int) -> None:
    lab = Lab(seed, NetworkFaults(break_connection=0.03, delay_much=0.2))
    ends: list[str] = []
    stream = lab.network.open_stream(lab.client, lab.server, "numbers")
    stream.on_end = ends.append
    for i in range(40):
        lab.clock.at(i * MS, partial(stream.send, i))
    disturbance = (lab.server.kill, lab.server.pause, partial(lab.network.cut, stream.pair))
    if seed % 2:
        lab.clock.at(20 * MS, disturbance[seed % 3])
        lab.clock.at(700 * MS, lab.server.resume)
    got = lab.server.got
    lab.run()
    assert got == list(range(len(got)))
    # Lost is nothing without both ends being told, if they live and are not cut off.
    assert len(got) == 40 or len(ends) == 1
    assert len(lab.server.ends) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_call_is_answered_exactly_once(seed: int) -> None:
    faults = NetworkFaults(lose_request=0.3, lose_reply=0.3, call_twice=0.5)
    lab = Lab(seed, faults)
    answers: list[object] = []
    call = Call(lab.client, lab.server, "count", None, answers.append, answers.append)
    lab.network.call(call, deadline_us=1_000 * MS)
    lab.run()
    assert len(answers) == 1
    assert lab.server.num_calls <= 2


def test_a_message_to_a_former_life_never_arrives() -> None:
    lab = Lab(1, NetworkFaults())
    ends: list[str] = []
    stream = lab.network.open_stream(lab.client, lab.server, "numbers")
    stream.on_end = ends.append
    lab.run()
    stream.send(1)
    lab.server.kill()
    lab.server.start()
    stream.send(2)
    lab.run()
    assert lab.server.got == []
    assert ends == ["UNAVAILABLE"]


def test_what_waits_for_a_short_cut_arrives_late() -> None:
    lab = Lab(1, NetworkFaults())
    stream = lab.network.open_stream(lab.client, lab.server, "numbers")
    lab.network.cut(stream.pair)
    stream.send(1)
    lab.clock.at(100 * MS, partial(lab.network.heal, stream.pair))
    lab.clock.at(99 * MS, lambda: seen.append(list(lab.server.got)))
    seen: list[list[int]] = []
    lab.run()
    assert seen == [[]]
    assert lab.server.got == [1]
