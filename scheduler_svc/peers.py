"""What the ports to both peers share: the fence, reading streams, health, and naming failures."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.service.errors import ServiceError
from octavo.v1 import types_pb2
from scheduler_svc.ports import PeerLostError

OPEN_DEADLINE_S = 5.0

STREAM_FAILURES = (grpc.RpcError, TimeoutError, asyncio.InvalidStateError)


class FenceHolder:
    """The fence of the open session, shared by the two ports of one engine."""

    def __init__(self) -> None:
        self.fence = types_pb2.Fence()


async def read(stream: grpc.aio.StreamStreamCall, reason: str, who: str) -> Any:
    """The next message; a stream that ends instead raises PeerLostError."""
    reply = await stream.read()
    if reply is grpc.aio.EOF:  # type: ignore[attr-defined]
        code = await stream.code()
        raise PeerLostError(
            reason, f"{who} ended its stream: {code.name}, {await stream.details()}"
        )
    return reply


def health_stub(channel: grpc.aio.Channel) -> Any:
    # Its methods are attributes that the type stubs leave out.
    return health_pb2_grpc.HealthStub(channel)


async def watch_health(channel: grpc.aio.Channel, reason: str, who: str) -> NoReturn:
    """Follow what the peer says of its health. Raises PeerLostError when that is bad or stops."""
    watching = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
    try:
        async for health in watching:
            check_serving(health, reason, who)
    except grpc.RpcError as error:
        raise lost(reason, who, error) from error
    finally:
        watching.cancel()
    raise PeerLostError(reason, f"{who} has stopped")


def check_serving(health: health_pb2.HealthCheckResponse, reason: str, who: str) -> None:
    """Raises PeerLostError unless it says SERVING."""
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
        raise PeerLostError(reason, f"{who} says {name} of itself")


def lost(reason: str, who: str, error: BaseException) -> PeerLostError:
    """What to say about a call that failed: what the peer said, or `reason` if it said nothing."""
    if isinstance(error, PeerLostError):
        return error
    if isinstance(error, grpc.RpcError):
        stated = ServiceError.from_rpc_error(error)
        if stated is not None:
            return PeerLostError(stated.reason, stated.message, stated.metadata)
        code = getattr(error, "code", lambda: None)()
        details = getattr(error, "details", lambda: "")()
        return PeerLostError(reason, f"{who} cannot be reached ({code}: {details})")
    if isinstance(error, TimeoutError):
        return PeerLostError(reason, f"{who} did not answer in time")
    return PeerLostError(reason, f"{who} has ended its stream")
