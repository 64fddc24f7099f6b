"""A gRPC server with what every service has: health, reflection, size limits, clean shutdown."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc.aio
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

log = structlog.get_logger()

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# What a stream may send before its reader has read.
WINDOW_BYTES = 1024 * 1024
# Linux: sun_path holds 108 bytes, the terminating zero included.
MAX_UNIX_PATH_BYTES = 107

# Of both ends of a connection.
COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC measures the bandwidth of every connection by pings, ten times a second, each of which
    # wakes threads at both ends: a tenth of the CPU of a step. So its flow control does not adapt
    # to the connection: 1 MB a round trip is plenty for what is sent here.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *COMMON_OPTIONS,
    # Whether a call is made again is decided above gRPC, which then need not keep its messages.
    ("grpc.enable_retries", 0),
    # A dead peer is noticed within seconds, also without traffic.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The same for pings of every other kind, which a dead peer would be given a minute for.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A peer that was restarted is found again soon after it listens. The minimum is not a pause:
    # it is what a connection attempt that is not refused may take.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 200),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *COMMON_OPTIONS,
    # A client that is cut off, or stopped, without a word is noticed as well; but only once
    # nothing can be sent to it, since gRPC takes what it sends for a sign of life.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class AddressError(ValueError):
    """An address no server can listen on, with the reason."""


def check_address(address: str) -> str:
    """`unix:/path` or `host:port`; raises AddressError with what is wrong."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise AddressError(
                f"socket path of {len(path.encode())} bytes, at most {MAX_UNIX_PATH_BYTES} are"
                f" possible: {path}"
            )
        return address
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 65536):
        raise AddressError(f"{address!r} is neither unix:/path nor host:port")
    return address


class ServiceHost:
    """One gRPC server. Register servicers on `server`, then `await run()`."""

    def __init__(
        self,
        name: str,
        address: str,
        service_names: Sequence[str],
        more_addresses: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.addresses = [check_address(each) for each in (address, *more_addresses)]
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self.stopping = asyncio.Event()
        self._service_names = ("", *service_names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1` says of this server and its services."""
        status = SERVING if serving else NOT_SERVING
        for service_name in self._service_names:
            await self._health.set(service_name, status)

    async def start(self) -> None:
        """Listen, NOT_SERVING until `set_serving(True)`. Raises AddressError when it cannot."""
        await self.set_serving(False)
        for address in self.addresses:
            try:
                self.server.add_insecure_port(address)
            except RuntimeError as error:
                raise AddressError(f"cannot listen on {address}: {error}") from error
        await self.server.start()
        log.info("listening", addresses=self.addresses)

    async def run_until_stopped(
        self, drain: Callable[[], Coroutine[Any, Any, None]] | None = None, grace_s: float = 2.0
    ) -> None:
        """Serve until SIGTERM, SIGINT or `stopping`; then drain and close what is open."""
        # What a service is made of stays as long as it does: the collector need not look again.
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        await self.stopping.wait()
        log.info("stopping")
        await self.set_serving(False)
        if drain is not None:
            await drain()
        await self.server.stop(grace_s)
        log.info("stopped")


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service's main coroutine on uvloop."""
    uvloop.run(main)
