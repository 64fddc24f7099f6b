"""The worker as a process of its own, over a unix socket, with a tiny model."""

from __future__ import annotations

import itertools
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.service.columns import I32, U32, U64, pack
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.process import (
    DEADLINE_S,
    ExecuteStream,
    request,
    sampled,
    start,
    worker_process,
)
from tests.worker.tiny import eager_model, greedy_ids, random_prompt

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Half of the options as options, half as variables.
OPTIONS = ("--block-size", "4", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def socket_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield Path(folder)


class Worker:
    """A ready worker; `fence` opens a session that is newer than all before."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address)
        self.stub = worker_pb2_grpc.ModelWorkerStub(self.channel)
        self.statuses = list(self._statuses_until_serving())
        self.info = self.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=DEADLINE_S)
        self._epochs = itertools.count(1)
        self._step_ids = itertools.count(1)

    def _statuses_until_serving(self) -> Iterator[int]:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="octavo.v1.ModelWorker")
        for reply in stub.Watch(request, timeout=DEADLINE_S, wait_for_ready=True):
            yield reply.status
            if reply.status == SERVING:
                return

    def fence(self, epoch: int | None = None) -> types_pb2.Fence:
        return types_pb2.Fence(
            session_id="test",
            epoch=next(self._epochs) if epoch is None else epoch,
            kvmem_boot_id="kvmem-1",
            worker_boot_id=self.info.boot_id,
        )

    def next_step_id(self) -> int:
        return next(self._step_ids)

    def stream(self) -> ExecuteStream:
        return ExecuteStream(self.address)

    def health(self) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status


@pytest.fixture(scope="module")
def worker(socket_dir: Path, model_folders: dict[str, Path]) -> Iterator[Worker]:
    environment = {
        "OCTAVO_WORKER_MODEL": str(model_folders["llama-gqa"]),
        "OCTAVO_WORKER_NUM_BLOCKS": "32",
        "OCTAVO_WORKER_NUM_HOST_BLOCKS": "5",
    }
    with worker_process(socket_dir, *OPTIONS, environment=environment) as (address, process):
        ready = Worker(address)
        yield ready
        stream = ready.stream()
        stream.step(request(ready.fence(), ready.next_step_id(), []))  # open while it stops
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        ready.channel.close()


def test_info(worker, model_folders):
    info = worker.info
    assert len(info.boot_id) == 32
    assert info.model_name == "llama-gqa"
    assert Path(info.model_path) == model_folders["llama-gqa"]
    assert (info.vocab_size, list(info.eos_token_ids)) == (97, [2])
    assert (info.attention_backend, info.device) == ("cpu", "cpu")
    assert info.batch_invariant
    assert (info.max_inflight_steps, info.max_num_batched_tokens) == (2, 64)
    geometry = info.geometry
    assert (geometry.num_blocks, geometry.block_size) == (32, 4)
    assert (geometry.max_model_len, geometry.kv_dtype) == (256, "float32")
    assert geometry.num_host_blocks == 5
    assert info.prefill_tokens_per_s > 0
    assert info.swap_bytes_per_s > 0
    assert geometry.kv_bytes_per_block == 2 * 2 * 2 * 4 * 16 * 4  # layers, k/v, heads, slots, dim


def swap(blocks: list[int], others: list[int]) -> types_pb2.BlockCopies:
    return types_pb2.BlockCopies(src_block_ids=pack(blocks, I32), dst_block_ids=pack(others, I32))


def test_a_sequence_goes_on_after_it_was_swapped_out_and_in(worker, model_folders):
    """By steps without rows; in between another one has its blocks."""
    prompt = random_prompt(2, 10)
    expected = greedy_ids(eager_model(model_folders["llama-gqa"]), prompt, 3)
    stream, fence = worker.stream(), worker.fence()
    step, next_id = stream.step, worker.next_step_id
    started = [start(1, [9, 3, 30])]
    tokens = sampled(step(request(fence, next_id(), [(1, 1, 0, prompt, 1)], starts=started)))
    out = request(fence, next_id(), [])
    out.swap_outs.CopyFrom(swap([9, 3, 30], [4, 0, 2]))
    assert sampled(step(out)) == []
    other = [start(2, [3, 30, 9])]
    step(request(fence, next_id(), [(2, 1, 0, random_prompt(3, 12), 1)], starts=other))
    back = request(fence, next_id(), [], starts=[start(1, [7, 8, 1], 2)])
    back.swap_ins.CopyFrom(swap([4, 0, 2], [7, 8, 1]))
    assert sampled(step(back)) == []
    for position in (10, 11):
        row = (1, 2, position, tokens[-1:], 1)
        tokens += sampled(step(request(fence, next_id(), [row])))
    assert tokens == expected
    stream.end()


def test_a_swap_beyond_the_host_tier_is_refused(worker):
    stream = worker.stream()
    bad = request(worker.fence(), worker.next_step_id(), [])
    bad.swap_outs.CopyFrom(swap([1], [5]))
    stream.send(bad)
    assert stream.failure() == "INVALID_BATCH"


def test_tokens_over_the_wire_equal_generate(worker, model_folders):
    prompt = random_prompt(1, 10)
    expected = greedy_ids(eager_model(model_folders["llama-gqa"]), prompt, 7)
    stream, fence = worker.stream(), worker.fence()
    reply = stream.step(
        request(fence, worker.next_step_id(), [(1, 1, 0, prompt, 1)], starts=[start(1, [9, 3, 30])])
    )
    assert reply.worker_boot_id == worker.info.boot_id
    tokens = sampled(reply)
    for i in range(6):
        message = request(fence, worker.next_step_id(), [(1, 1 + (i >= 2), 10 + i, tokens[-1:], 1)])
        if i == 2:  # the third block is full: a fourth, as a delta
            message.deltas.CopyFrom(
                types_pb2.TableDeltas(
                    sequence_ids=pack([1], U64),
                    table_indices=pack([3], I32),
                    block_ids=pack([17], I32),
                    table_versions=pack([2], U32),
                )
            )
        reply = stream.step(message)
        assert reply.step_id == message.step_id
        assert reply.timings.forward_us > 0
        tokens += sampled(reply)
    stream.end()
    assert tokens == expected


def test_one_stream_holds_the_worker_until_a_newer_epoch_takes_it(worker):
    old, old_fence = worker.stream(), worker.fence()
    old.step(request(old_fence, worker.next_step_id(), []))
    rival = worker.stream()
    rival.send(request(old_fence, worker.next_step_id(), []))
    assert rival.failure() == "SESSION_HELD"

    new, new_fence = worker.stream(), worker.fence()
    new.step(request(new_fence, worker.next_step_id(), []))
    assert old.failure() == "STALE_EPOCH"
    late = worker.stream()
    late.send(request(old_fence, worker.next_step_id(), []))
    assert late.failure() == "STALE_EPOCH"
    new.step(request(new_fence, worker.next_step_id(), []))  # undisturbed by either
    new.end()


def test_a_new_epoch_begins_with_an_empty_mirror(worker):
    stream, fence = worker.stream(), worker.fence()
    stream.step(request(fence, worker.next_step_id(), [(1, 1, 0, [5], 1)], starts=[start(1, [0])]))
    stream.end()
    # The same session resumes on another stream and is still known.
    stream = worker.stream()
    stream.step(request(fence, worker.next_step_id(), [(1, 1, 1, [5], 1)]))
    stream.end()
    stream = worker.stream()
    stream.send(request(worker.fence(), worker.next_step_id(), [(1, 1, 2, [5], 1)]))
    assert stream.failure() == "UNKNOWN_SEQUENCE"


def test_a_client_that_vanishes_frees_the_stream(worker):
    fence = worker.fence()
    for _ in range(3):
        stream = worker.stream()
        stream.send(
            request(
                fence,
                worker.next_step_id(),
                [(1, 1, 0, [5] * 60, 1)],
                starts=[start(1, list(range(15)))],
            )
        )
        stream.vanish()
    # The worker hears of it in its own time; until then the session is held.
    deadline = time.monotonic() + DEADLINE_S
    while True:
        stream = worker.stream()
        stream.send(request(fence, worker.next_step_id() + 100, []))
        try:
            stream.receive()
            break
        except grpc.RpcError:
            assert time.monotonic() < deadline
    stream.end()
    for _ in range(101):
        worker.next_step_id()


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("STALE_BOOT_ID", {"boot": "another"}),
        ("TABLE_VERSION_MISMATCH", {"rows": [(1, 2, 0, [5], 1)]}),
        ("UNKNOWN_SEQUENCE", {"rows": [(2, 1, 0, [5], 1)]}),
        ("TOKEN_OUT_OF_VOCABULARY", {"rows": [(1, 1, 0, [97], 1)]}),
        ("TOKEN_OUT_OF_VOCABULARY", {"rows": [(1, 1, 0, [-2], 1)]}),
        ("INVALID_BATCH", {"rows": [(1, 1, 0, [-1], 1)]}),
        ("INVALID_BATCH", {"rows": [(1, 1, 0, [], 1)]}),
        ("INVALID_BATCH", {"ragged": True}),
        ("STEP_OUT_OF_ORDER", {"step_id": 1}),
    ],
)
def test_a_bad_step_ends_the_stream_with_its_reason_and_nothing_else(worker, reason, changes):
    fence = worker.fence()
    stream = worker.stream()
    stream.step(request(fence, worker.next_step_id(), [], starts=[start(1, [0])]))
    bad = request(fence, worker.next_step_id(), changes.get("rows", [(1, 1, 0, [5], 1)]))
    bad.fence.worker_boot_id = changes.get("boot", bad.fence.worker_boot_id)
    bad.step_id = changes.get("step_id", bad.step_id)
    if changes.get("ragged"):
        bad.input_token_ids += b"\0"
    stream.send(bad)
    assert stream.failure() == reason
    again = worker.stream()
    good = request(fence, worker.next_step_id(), [(1, 1, 0, [5], 1)])
    assert len(sampled(again.step(good))) == 1
    again.end()
    assert worker.health() == SERVING


def test_it_listens_before_it_has_loaded_and_says_when_it_has(worker):
    assert worker.statuses == [NOT_SERVING, SERVING]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "/nowhere/at/all"), "There is no folder /nowhere/at/all"),
        (("--address", "nonsense"), "neither unix:/path nor host:port"),
        (("--batch-invariant", "on", "--attention", "reference"), "needs --attention cpu"),
        (("--batch-invariant", "on"), "apt-get install g++"),  # there is no compiler
    ],
)
def test_what_it_cannot_start_with_is_one_sentence(model_folders, options, sentence):
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        model = ("--model", str(model_folders["llama-gqa"]))
        environment = {"CXX": "no-such-compiler", "OCTAVO_CACHE": folder}
        with worker_process(Path(folder), *model, *options, environment=environment) as (
            _,
            process,
        ):
            assert process.wait(DEADLINE_S) == 1
        lines = (Path(folder) / "worker.log").read_text().splitlines()
        assert any(line.startswith("octavo-worker: ") and sentence in line for line in lines)
        assert not any("Traceback" in line for line in lines)
