"""A scripted peer on a real socket, and both clients behind one blocking face."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient, Client
from octavo.client import AsyncChunkStream
from tests.sdk.scripted_peer import ScriptedPeer, serve


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a path short enough for sockets; pytest's own tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield Path(folder)


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


@pytest.fixture
def address(peer: ScriptedPeer, socket_dir: Path) -> Iterator[str]:
    socket = socket_dir / "peer.sock"
    server = serve(peer, socket)
    yield f"unix:{socket}"
    server.stop(grace=0).wait()


class BlockingStream:
    """An AsyncChunkStream as an ordinary iterator."""

    def __init__(self, stream: AsyncChunkStream, runner: asyncio.Runner) -> None:
        self.inner = stream
        self._runner = runner

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._runner.run(anext_of(self.inner))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._runner.run(self.inner.aclose())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def anext_of(stream: AsyncChunkStream) -> Any:
    return await anext(stream)


class BlockingClient:
    """An AsyncClient whose calls block, so that one test serves both clients."""

    def __init__(self, address: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(address, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        def blocking(*args: Any, **kwargs: Any) -> Any:
            result = self._runner.run(call(*args, **kwargs))
            if isinstance(result, AsyncChunkStream):
                return BlockingStream(result, self._runner)
            return result

        return blocking

    def close(self) -> None:
        self._runner.run(self._client.aclose())

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._runner.close()


@pytest.fixture(params=["sync", "async", "async-older-server"])
def client_class(request: pytest.FixtureRequest, peer: ScriptedPeer) -> Any:
    """Both clients, and the one that multiplexes also where the peer does not."""
    if request.param == "async-older-server":
        peer.multiplexes = False
    return Client if request.param == "sync" else BlockingClient


@pytest.fixture
def client(client_class: Any, address: str) -> Iterator[Any]:
    with client_class(address) as made:
        yield made


@pytest.fixture
def impatient(client_class: Any, address: str) -> Iterator[Any]:
    """A client that tries once to have a request accepted."""
    with client_class(address, connect_timeout_s=0) as made:
        yield made
