"""A stream that was given up reaches the scheduler late, after the one that its caller reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import Client, SamplingParams
from tests.system.requests import token_prompt
from tests.system.stack import Stack, wait_until

PARAMS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
HEADERS_FRAME = 1
FRAME_HEADER_BYTES = 9
PREFACE_BYTES = 24


class LateFirstRequest:
    """Relays connections to a service. Of the first one the request is kept back: its caller is
    cut off as soon as all of it is here, and the service gets it with `deliver`."""

    def __init__(self, path: Path, target: str) -> None:
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._kept = b""
        self._late: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def deliver(self) -> None:
        assert self._late is not None, "no request was kept back"
        self._late.sendall(self._kept)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        relay = self._relay_first
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            service = socket.socket(socket.AF_UNIX)
            service.connect(self._target)
            self._sockets += [caller, service]
            threading.Thread(target=_copy, args=(service, caller), daemon=True).start()
            threading.Thread(target=relay, args=(caller, service), daemon=True).start()
            relay = _copy

    def _relay_first(self, caller: socket.socket, service: socket.socket) -> None:
        received, sent = b"", 0
        while (end := _frames_before_headers(received)) == len(received) or not _is_whole(
            received[end:]
        ):
            service.sendall(received[sent:end])
            sent = end
            received += caller.recv(65536)
        service.sendall(received[sent:end])
        self._kept, self._late = received[end:], service
        caller.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while received := source.recv(65536):
            try:
                target.sendall(received)
            except OSError:
                continue  # nobody is there any more: what comes is dropped
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # closed


def _frames(received: bytes, start: int) -> Iterator[tuple[int, int, int, int]]:
    """Type, flags, start and end of each whole HTTP/2 frame from `start` on."""
    while len(received) >= start + FRAME_HEADER_BYTES:
        end = start + FRAME_HEADER_BYTES + int.from_bytes(received[start : start + 3], "big")
        if len(received) < end:
            return
        yield received[start + 3], received[start + 4], start, end
        start = end


def _frames_before_headers(received: bytes) -> int:
    """Where the first request begins, or all whole frames end."""
    if len(received) < PREFACE_BYTES:
        return 0
    at = PREFACE_BYTES
    for kind, _, start, end in _frames(received, PREFACE_BYTES):
        if kind == HEADERS_FRAME:
            return start
        at = end
    return at


def _is_whole(request: bytes) -> bool:
    """Whether its caller has sent all of it: a DATA frame that ends the stream."""
    return any(kind == 0 and flags & 1 for kind, flags, _, _ in _frames(request, 0))


@pytest.fixture
def late(tiny: Stack) -> Iterator[tuple[LateFirstRequest, str]]:
    path = tiny.folder / "late.sock"
    relay = LateFirstRequest(path, tiny.addresses["scheduler"].removeprefix("unix:"))
    yield relay, f"unix:{path}"
    relay.close()
    path.unlink()


def test_the_callers_own_late_attempt_does_not_end_its_answer(
    tiny: Stack, late: tuple[LateFirstRequest, str]
) -> None:
    relay, address = late
    prompt = token_prompt(20, salt=9)
    with tiny.client() as other:
        alone = other.generate(prompt, PARAMS)
    with Client(address) as client, client.stream(prompt, PARAMS) as chunks:
        token_ids = list(next(part for chunk in chunks for part in chunk.candidates).token_ids)
        relay.deliver()
        wait_until(
            lambda: "attached again" in tiny.logs(), "the late attempt has attached to the request"
        )
        for chunk in chunks:
            for part in chunk.candidates:
                token_ids += part.token_ids
        assert chunks._reconnect.num_reconnects == 2
    assert tuple(token_ids) == alone.candidates[0].token_ids
