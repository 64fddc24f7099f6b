"""Short socket paths, and a real KV memory service in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from octavo.service.server import CHANNEL_OPTIONS


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a path short enough for sockets; pytest's own tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield Path(folder)


@pytest.fixture
def kvmem_address(socket_dir: Path) -> Iterator[str]:
    """The address of a running `kvmem_svc`."""
    address = f"unix:{socket_dir}/kvmem.sock"
    command = [sys.executable, "-m", "kvmem_svc", "--address", address, "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
                grpc.channel_ready_future(channel).result(timeout=60)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)
