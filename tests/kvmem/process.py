"""A real memory service process over a unix socket, and a client of it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np

from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import kvmem_pb2 as pb
from octavo.v1 import kvmem_pb2_grpc, types_pb2

DEADLINE_S = 20


@contextmanager
def kvmem_process(
    folder: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = ("-m", "kvmem_svc"),
) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a ready process, and the process; killed at the end if it still runs."""
    address = f"unix:{folder}/kvmem.sock"
    command = [sys.executable, *program, "--address", address, *options]
    with (folder / "kvmem.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
    try:
        with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(DEADLINE_S)
        yield address, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


class Client:
    """The unary side of one session. Unless told, every pool it attaches is another worker's."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address)
        self.stub = kvmem_pb2_grpc.KvMemoryStub(self.channel)
        self.fence = types_pb2.Fence()
        self.open_reply = pb.SessionOpened()
        self.is_open = False
        self.batch_seq = 0
        self.step_id = 1

    def open(self) -> pb.SessionOpened:
        request = pb.OpenSessionRequest(holder="test")
        return self.opened(self.stub.OpenSession(request, timeout=DEADLINE_S))

    def opened(self, opened: pb.SessionOpened) -> pb.SessionOpened:
        """Go on from here, wherever the session was opened."""
        self.open_reply = opened
        self.fence, self.is_open, self.batch_seq = opened.fence, True, 0
        self.step_id = opened.last_step_id + 1
        return opened

    def close_session(self) -> None:
        self.stub.CloseSession(pb.CloseSessionRequest(fence=self.fence), timeout=DEADLINE_S)
        self.is_open = False

    def attach(
        self,
        num_blocks: int = 8,
        block_size: int = 4,
        max_model_len: int = 32,
        worker_boot_id: str = "",
        last_executed_step: int = 0,
        num_host_blocks: int = 0,
    ) -> pb.AttachPoolReply:
        request = pb.AttachPoolRequest(
            fence=self.fence,
            worker_boot_id=worker_boot_id or uuid.uuid4().hex,
            geometry=types_pb2.PoolGeometry(
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                num_host_blocks=num_host_blocks,
            ),
            last_executed_step=last_executed_step,
        )
        reply = self.stub.AttachPool(request, timeout=DEADLINE_S)
        self.fence = reply.fence
        return reply

    def adopt(self) -> list[pb.AdoptedRequest]:
        request = pb.AdoptSequencesRequest(fence=self.fence)
        return list(self.stub.AdoptSequences(request, timeout=DEADLINE_S))

    def drop_everything(self) -> None:
        """As the holder of a new session: end and confirm every request there is."""
        for request in self.adopt():
            live = [
                one.sequence_id
                for one in request.sequences
                if one.status != pb.SEQUENCE_STATUS_FINISHED
            ]
            self.apply(
                *([free(*live)] if live else []),
                pb.Op(confirm=pb.Confirm(request_id=request.request_id)),
            )

    def batch(self, *ops: pb.Op, traceparent: str = "") -> pb.Batch:
        """The next batch of the session, everything before its step acknowledged."""
        self.batch_seq += 1
        step = pb.StepOps(step_id=self.step_id, acknowledged_step=self.step_id - 1, ops=list(ops))
        return pb.Batch(
            fence=self.fence, batch_seq=self.batch_seq, step=step, traceparent=traceparent
        )

    def apply(self, *ops: pb.Op, traceparent: str = "") -> pb.BatchResult:
        batch = self.batch(*ops, traceparent=traceparent)
        return self.stub.Apply(batch, timeout=DEADLINE_S)

    def stats(self) -> pb.PoolStats:
        return self.stub.GetPoolStats(pb.GetPoolStatsRequest(), timeout=DEADLINE_S)


class Stream:
    """A Session stream: one request out, one reply in."""

    def __init__(self, client: Client, first: pb.SessionRequest) -> None:
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._requests.put(first)
        self.call = client.stub.Session(iter(self._requests.get, None), timeout=DEADLINE_S)

    def receive(self) -> pb.SessionReply:
        return next(self.call)

    def send(self, batch: pb.Batch) -> pb.BatchResult:
        self._requests.put(pb.SessionRequest(batch=batch))
        return self.receive().result

    def put(self, request: pb.SessionRequest) -> None:
        self._requests.put(request)

    def close(self) -> None:
        """Half-close, as a holder does that is done, and read to the end."""
        self._requests.put(None)
        assert list(self.call) == []


def reason_of(error: grpc.RpcError) -> str:
    service_error = ServiceError.from_rpc_error(error)
    assert service_error is not None, f"no reason came with {error}"
    return service_error.reason


def arrive(name: str, num_tokens: int, **fields) -> pb.Op:
    prompt = list(range(num_tokens))
    return pb.Op(
        arrive=pb.Arrive(
            request_id=name, prompt_token_ids=prompt, **{"num_candidates": 4, **fields}
        )
    )


def admit(sequence_id: int, num_slots: int) -> pb.Op:
    member = pb.AdmitMember(sequence_id=sequence_id, num_slots=num_slots)
    return pb.Op(admit=pb.Admit(members=[member]))


def free(
    *sequence_ids: int, reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_STOP
) -> pb.Op:
    return pb.Op(free=pb.Free(sequence_ids=sequence_ids, finish_reason=reason))


def int32s(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
