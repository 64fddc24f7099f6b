"""A gRPC server that follows a script: the peer of the SDK's tests, over a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc, types_pb2
from tests.sdk.by_call import ByCall, fail


@dataclass(frozen=True)
class Fail:
    """End the call with a bare status, as a server that knows no ErrorInfo would."""

    code: grpc.StatusCode
    message: str


class Hang:
    """Send nothing more until the caller is gone."""


Act = pb.GenerateReply | ServiceError | Fail | Hang


@dataclass
class Call:
    """What the peer saw of one call."""

    method: str
    request: Any
    metadata: dict[str, str | bytes]
    time_remaining_s: float
    gone: threading.Event = field(default_factory=threading.Event)


class ScriptedPeer(ByCall):
    """Plays `script` for every Generate and Chat, also of a Multiplex, and answers unary calls.

    `earlier` holds the scripts of the streams before: one each, from the first one on.
    """

    def __init__(self) -> None:
        self.script: list[Act] = []
        self.earlier: list[list[Act]] = []
        self.refuses: ServiceError | None = None  # what unary calls fail with
        self.calls: list[Call] = []
        self._noted = threading.Condition()
        self.health = health.HealthServicer()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateReply]:
        return self._play(self._note("Generate", request, context), context)

    def Chat(self, request: pb.ChatRequest, context: Any) -> Iterator[pb.GenerateReply]:
        return self._play(self._note("Chat", request, context), context)

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeReply:
        self._note("Tokenize", request, context)
        return pb.TokenizeReply(token_ids=[3, 1, 4])

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:
        self._note("Abort", request, context)
        return pb.AbortReply(aborted=request.request_id == "live")

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.ModelDescription:
        self._note("GetModel", request, context)
        return pb.ModelDescription(
            name="tiny",
            max_model_len=2048,
            vocab_size=49152,
            eos_token_ids=[2, 0],
            has_chat_template=True,
            geometry=types_pb2.PoolGeometry(num_blocks=64, block_size=16, kv_dtype="bfloat16"),
            attention_backend="cpu",
        )

    def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsReply:
        summary = pb.RequestSummary(
            request_id="r1",
            status="running",
            num_prompt_tokens=7,
            num_candidates=2,
            num_output_tokens=5,
        )
        return pb.ListRequestsReply(requests=[summary])

    def _note(self, method: str, request: Any, context: grpc.ServicerContext) -> Call:
        metadata = {key: value for key, value in context.invocation_metadata()}
        remaining = context.time_remaining()
        call = Call(method, request, metadata, remaining if remaining is not None else -1.0)
        with self._noted:
            self.calls.append(call)
            self._noted.notify_all()
        if self.refuses is not None and method not in ("Generate", "Chat"):
            fail(self.refuses, context)
        return call

    def of(self, *methods: str) -> list[Call]:
        """The calls of these methods so far."""
        return [call for call in self.calls if call.method in methods]

    def wait_for(self, method: str, count: int = 1) -> list[Call]:
        """The calls of `method`, once there are `count`."""
        with self._noted:
            assert self._noted.wait_for(lambda: len(self.of(method)) >= count, timeout=60)
        return self.of(method)

    def _play(self, call: Call, context: Any) -> Iterator[pb.GenerateReply]:
        context.add_callback(call.gone.set)
        script = self.earlier.pop(0) if self.earlier else self.script
        for act in script:
            if isinstance(act, pb.GenerateReply):
                yield act
            elif isinstance(act, ServiceError):
                fail(act, context)
            elif isinstance(act, Fail):
                context.abort(act.code, act.message)
            else:
                assert call.gone.wait(timeout=60)


def serve(peer: ScriptedPeer, socket: Path) -> grpc.Server:
    """Start a server for `peer` on a unix socket; the caller stops it."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    inference_pb2_grpc.add_InferenceServicer_to_server(peer, server)
    health_pb2_grpc.add_HealthServicer_to_server(peer.health, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    peer.health.set("", health_pb2.HealthCheckResponse.SERVING)
    return server


def accepted(
    request_id: str = "r1", seed: int = 42, num_prompt_tokens: int = 7
) -> pb.GenerateReply:
    """The first reply to a request."""
    return pb.GenerateReply(request_id=request_id, seed=seed, num_prompt_tokens=num_prompt_tokens)


def delta(index: int, text: str, *token_ids: int, **rest: Any) -> pb.GenerateReply:
    """A reply with one candidate's delta."""
    return pb.GenerateReply(
        deltas=[pb.CandidateDelta(index=index, text=text, token_ids=token_ids, **rest)]
    )
