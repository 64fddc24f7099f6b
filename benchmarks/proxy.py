"""A relay between two processes whose connections can be cut, refused or silenced.

It knows nothing of what it carries. It belongs to the event loop it is started on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

# What is written and not yet taken before the other side is no longer read from.
MAX_BUFFERED_BYTES: Final = 1 << 20

# Sees what goes from the caller to the service, before it goes there.
OnRequest = Callable[[bytes], None]


class Proxy:
    """Listens at `address` and relays what connects there to `target`; both are `unix:/path`
    or `host:port`."""

    def __init__(self, address: str, target: str) -> None:
        self.address = address
        self.target = target
        self.on_request: OnRequest | None = None
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._is_refusing = False
        # What is no longer carried: to the service, and from it.
        self._silent = {"request": False, "reply": False}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        if self.address.startswith("unix:"):
            path = self.address.removeprefix("unix:")
            self._server = await loop.create_unix_server(self._accept, path)
        else:
            host, _, port = self.address.rpartition(":")
            self._server = await loop.create_server(self._accept, host, int(port))

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    # ---- faults ----

    def cut(self) -> None:
        """Break what is connected now. Whoever connects again is served."""
        for pair in list(self._pairs):
            pair.abort()

    def refuse(self) -> None:
        """Break what is connected, and whatever connects until `heal`."""
        self._is_refusing = True
        self.cut()

    def silence(self, *, requests: bool = True, replies: bool = True) -> None:
        """Carry nothing in these directions until `heal`; nothing is lost or closed by it."""
        self._silent = {"request": requests, "reply": replies}
        self._update()

    def heal(self) -> None:
        """Relay again."""
        self._is_refusing = False
        self._silent = dict.fromkeys(self._silent, False)
        self._update()

    def _update(self) -> None:
        for pair in self._pairs:
            pair.update()

    # ---- connections ----

    def _accept(self) -> _Side:
        return _Pair(self).caller

    def is_silent(self, direction: str) -> bool:
        return self._silent[direction]

    def connected(self, pair: _Pair) -> None:
        if self._is_refusing:
            pair.abort()
        else:
            self._pairs.add(pair)

    def forget(self, pair: _Pair) -> None:
        self._pairs.discard(pair)


class _Pair:
    """One connection of a caller, and the one made for it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.caller = _Side(self, "request")
        self.service = _Side(self, "reply")
        self.caller.other, self.service.other = self.service, self.caller
        self._ended = False

    async def reach_service(self) -> None:
        loop, target = asyncio.get_running_loop(), self.proxy.target
        try:
            if target.startswith("unix:"):
                path = target.removeprefix("unix:")
                await loop.create_unix_connection(lambda: self.service, path)
            else:
                host, _, port = target.rpartition(":")
                await loop.create_connection(lambda: self.service, host, int(port))
        except OSError:
            self.abort()
            return
        if self._ended:
            self.service.abort()
        self.update()

    def update(self) -> None:
        self.caller.update()
        self.service.update()

    def end(self) -> None:
        """One end has closed: the other one is closed behind what is still to go there."""
        self._ended = True
        self.proxy.forget(self)
        self.caller.close()
        self.service.close()

    def abort(self) -> None:
        self._ended = True
        self.proxy.forget(self)
        self.caller.abort()
        self.service.abort()


class _Side(asyncio.Protocol):
    """One end of a pair. `direction`: that of what is read here."""

    other: _Side

    def __init__(self, pair: _Pair, direction: str) -> None:
        self._pair = pair
        self._direction = direction
        self._transport: asyncio.Transport | None = None
        self._is_congested = False
        self._reaching: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(MAX_BUFFERED_BYTES)
        if self._direction == "request":
            self._transport.pause_reading()
            self._pair.proxy.connected(self._pair)
            self._reaching = asyncio.get_running_loop().create_task(self._pair.reach_service())

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._pair.end()

    def data_received(self, data: bytes) -> None:
        proxy = self._pair.proxy
        if self._direction == "request" and proxy.on_request is not None:
            proxy.on_request(data)
        if self.other._transport is not None:
            self.other._transport.write(data)

    def pause_writing(self) -> None:
        self._is_congested = True
        self.other.update()

    def resume_writing(self) -> None:
        self._is_congested = False
        self.other.update()

    def update(self) -> None:
        """Read exactly when what is read may go on."""
        if self._transport is None or self._transport.is_closing():
            return
        is_open = self.other._transport is not None and not self.other._is_congested
        # Pausing and resuming twice is harmless.
        if is_open and not self._pair.proxy.is_silent(self._direction):
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()
