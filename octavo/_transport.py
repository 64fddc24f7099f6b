"""The connections of a client: one channel to each server it has spoken to, made at first use.

Both kinds start the attempts of a stream, carry out unary calls, and send the Abort of a request
that was left early: nobody waits for that, and it is given up after a short while, since a server
lets go of a request that nobody comes back to.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from octavo import _wire
from octavo._multiplex import Multiplexer
from octavo._reconnect import Addresses, Round
from octavo._stubs import Attempt, Stubs
from octavo._wire import Metadata, UnaryCall
from octavo.errors import OctavoError
from octavo.service.server import CHANNEL_OPTIONS

ABORT_TIMEOUT_S: Final = 2.0
# Requests left early whose Abort was not sent yet. Past it they are left to their TTL.
MAX_WAITING_ABORTS: Final = 1024

Reply = TypeVar("Reply")


class Transport:
    """For threads."""

    def __init__(self, addresses: Addresses, metadata: Metadata = ()) -> None:
        """metadata: of every call."""
        self.addresses = addresses
        self._metadata = metadata
        self._stubs: dict[str, Stubs] = {}
        self._lock = threading.Lock()

    def start(self, attempt: Attempt) -> Any:
        """A call whose replies can be iterated over."""
        return self._stubs_of(attempt.address).start(attempt)

    def unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        """Ask the servers in turn. Raises OctavoError."""
        asking: Round[Reply] = Round(
            self.addresses, call.settles, deadline_s=time.monotonic() + timeout_s
        )
        for address in asking:
            method = self._stubs_of(address).method(call)
            try:
                timeout_s = asking.timeout_s(time.monotonic())
                reply = method(call.request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as failure:
                asking.failed(_wire.failure_of(failure))
            else:
                asking.answered(call.read(reply))
        return asking.result()

    def close(self) -> None:
        """Cancel what is open."""
        with self._lock:
            for stubs in self._stubs.values():
                stubs.channel.close()

    def _stubs_of(self, address: str) -> Stubs:
        with self._lock:
            if address not in self._stubs:
                self._stubs[address] = Stubs(
                    grpc.insecure_channel(address, options=CHANNEL_OPTIONS), self._metadata
                )
            return self._stubs[address]


class Aborter:
    """Sends Aborts from a thread of its own, which lives as long as this object.

    A stream can be dropped anywhere, also by the garbage collector in the middle of a call, so
    that nothing may be locked there: `abort` only puts the call into a queue made for that.
    """

    def __init__(self, transport: Transport) -> None:
        self._waiting: SimpleQueue[UnaryCall[bool] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_send_aborts,
            args=(transport, self._waiting),
            name="octavo-abort",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._waiting.put, None)

    def abort(self, call: UnaryCall[bool]) -> None:
        """Have `call` sent, soon."""
        if self._waiting.qsize() < MAX_WAITING_ABORTS:
            self._waiting.put(call)

    def close(self) -> None:
        """Wait, for a short while, until all are sent."""
        self._waiting.put(None)
        self._thread.join(ABORT_TIMEOUT_S)


def _send_aborts(transport: Transport, waiting: SimpleQueue[UnaryCall[bool] | None]) -> None:
    while (call := waiting.get()) is not None:
        # ValueError: the channel was closed meanwhile.
        with contextlib.suppress(OctavoError, ValueError):
            transport.unary(call, ABORT_TIMEOUT_S)


class AsyncTransport:
    """For the event loop in which it is made; a channel belongs to that."""

    def __init__(self, addresses: Addresses, metadata: Metadata = ()) -> None:
        """metadata: of every call."""
        self.addresses = addresses
        self._metadata = metadata
        self._loop = asyncio.get_running_loop()
        self._stubs: dict[str, Stubs] = {}
        self._multiplexers: dict[str, Multiplexer] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    def start(self, attempt: Attempt) -> Any:
        """A call whose replies can be read."""
        address = attempt.address
        if address not in self._multiplexers:
            self._multiplexers[address] = Multiplexer(self._stubs_of(address))
        return self._multiplexers[address].start(attempt)

    async def unary(self, call: UnaryCall[Reply], timeout_s: float) -> Reply:
        """Ask the servers in turn. Raises OctavoError."""
        asking: Round[Reply] = Round(
            self.addresses, call.settles, deadline_s=time.monotonic() + timeout_s
        )
        for address in asking:
            method = self._stubs_of(address).method(call)
            try:
                timeout_s = asking.timeout_s(time.monotonic())
                reply = await method(call.request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as failure:
                asking.failed(_wire.failure_of(failure))
            else:
                asking.answered(call.read(reply))
        return asking.result()

    def abort(self, call: UnaryCall[bool]) -> None:
        """Have `call` sent, soon; from any thread, and in vain once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send_abort, call)

    async def close(self) -> None:
        """Wait, for a short while, until all Aborts are sent, and cancel what is open."""
        await asyncio.sleep(0)  # those of this moment are only about to be tasks
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_TIMEOUT_S)
        for stubs in self._stubs.values():
            await stubs.channel.close(None)

    def _send_abort(self, call: UnaryCall[bool]) -> None:
        if len(self._aborts) < MAX_WAITING_ABORTS:
            task = self._loop.create_task(self._abort(call))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, call: UnaryCall[bool]) -> None:
        with contextlib.suppress(OctavoError):
            await self.unary(call, ABORT_TIMEOUT_S)

    def _stubs_of(self, address: str) -> Stubs:
        if address not in self._stubs:
            self._stubs[address] = Stubs(
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), self._metadata
            )
        return self._stubs[address]
