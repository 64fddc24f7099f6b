"""A real worker process over a unix socket, and a client that speaks to it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np

from octavo.service.columns import F32, I32, U32, U64, pack, unpack
from octavo.service.errors import ServiceError
from octavo.service.server import CHANNEL_OPTIONS
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc

DEADLINE_S = 60


@contextmanager
def worker_process(
    folder: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a process that was just started; killed at the end if it still runs."""
    address = f"unix:{folder}/worker.sock"
    command = [sys.executable, "-m", "model_worker", "--address", address, *options]
    with (folder / "worker.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **(environment or {})})
    try:
        yield address, process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


def reason_of(error: grpc.RpcError) -> str:
    """The ErrorInfo.reason a call failed with; its bare status code when there is none."""
    service_error = ServiceError.from_rpc_error(error)
    if service_error is None:
        return str(error.code())  # type: ignore[attr-defined]
    return service_error.reason


def request(
    fence: types_pb2.Fence,
    step_id: int,
    rows: list[tuple[int, int, int, list[int], int]],
    *,
    starts: list[worker_pb2.SequenceStart] | None = None,
    dropped: list[int] | None = None,
) -> worker_pb2.ExecuteRequest:
    """rows: (sequence_id, table_version, num_computed_tokens, input ids, num_samples)."""
    return worker_pb2.ExecuteRequest(
        fence=fence,
        step_id=step_id,
        starts=starts or [],
        dropped_sequence_ids=pack(dropped or [], U64),
        sequence_ids=pack([r[0] for r in rows], U64),
        table_versions=pack([r[1] for r in rows], U32),
        num_computed_tokens=pack([r[2] for r in rows], I32),
        num_input_tokens=pack([len(r[3]) for r in rows], I32),
        input_token_ids=pack([t for r in rows for t in r[3]], I32),
        num_samples=pack([r[4] for r in rows], I32),
    )


def start(sequence_id: int, block_ids: list[int], version: int = 1) -> worker_pb2.SequenceStart:
    return worker_pb2.SequenceStart(
        sequence_id=sequence_id, block_ids=pack(block_ids, I32), table_version=version
    )


def sampled(reply: worker_pb2.ExecuteReply) -> list[int]:
    assert len(unpack(reply.logprobs, F32)) == len(unpack(reply.sampled_token_ids, I32))
    return np.asarray(unpack(reply.sampled_token_ids, I32)).tolist()


class ExecuteStream:
    """One Execute stream, one request at a time."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        stub = worker_pb2_grpc.ModelWorkerStub(self.channel)
        self._queue: SimpleQueue[worker_pb2.ExecuteRequest | None] = SimpleQueue()
        self.call = stub.Execute(iter(self._queue.get, None), timeout=DEADLINE_S)

    def send(self, message: worker_pb2.ExecuteRequest) -> None:
        self._queue.put(message)

    def receive(self) -> worker_pb2.ExecuteReply:
        return next(self.call)

    def step(self, message: worker_pb2.ExecuteRequest) -> worker_pb2.ExecuteReply:
        self.send(message)
        return self.receive()

    def failure(self) -> str:
        """The reason the stream ends with."""
        try:
            reply = next(self.call)
        except grpc.RpcError as error:
            return reason_of(error)
        raise AssertionError(f"the stream did not fail but answered step {reply.step_id}")

    def end(self) -> None:
        """Half-close and wait for the worker to close its side."""
        self._queue.put(None)
        assert next(self.call, None) is None
        self.channel.close()

    def vanish(self) -> None:
        """Drop the connection without a word."""
        self._queue.put(None)
        self.call.cancel()
        self.channel.close()
