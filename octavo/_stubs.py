"""The stubs of one channel, and one attempt to have a request served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from octavo._wire import Metadata, UnaryCall
from octavo.v1 import inference_pb2_grpc


@dataclass(frozen=True)
class Attempt:
    """One stream of a request: what is called, where, and for how long."""

    address: str
    method: str
    request: Any
    timeout_s: float
    metadata: Metadata


class Stubs:
    """The stubs of one channel, by the names `UnaryCall.stub` uses. metadata: of every call."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel, metadata: Metadata) -> None:
        self.channel: Any = channel
        self.metadata = metadata
        # Both kinds of channel have the same stubs; their types know one of them.
        self.inference: Any = inference_pb2_grpc.InferenceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def method(self, call: UnaryCall[Any]) -> Any:
        return getattr(getattr(self, call.stub), call.method)

    def start(self, attempt: Attempt) -> Any:
        """An RPC for this attempt alone."""
        method = getattr(self.inference, attempt.method)
        metadata = (*self.metadata, *attempt.metadata)
        return method(attempt.request, timeout=attempt.timeout_s, metadata=metadata)
