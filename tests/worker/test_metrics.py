"""The histograms of a worker, by the SDK's own reader; and over the wire, from a real worker."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from model_worker.metrics import StepMetrics
from model_worker.step import StepOutput, StepTimings
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.worker.process import DEADLINE_S, ExecuteStream, request, start, worker_process

NAMES = {
    f"octavo.worker.{name}"
    for name in ("step", "forward", "gap_between_steps", "idle_between_steps")
}


def output(gap_us: int, idle_us: int) -> StepOutput:
    timings = StepTimings(
        gap_us=gap_us, idle_us=idle_us, prepare_us=10, copy_us=0, forward_us=200, sample_us=30
    )
    return StepOutput(1, 0, np.empty(0, np.int32), np.empty(0, np.float32), timings)


def test_time_between_steps_is_of_those_that_were_waited_for():
    reader = InMemoryMetricReader()
    metrics = StepMetrics(MeterProvider([reader]).get_meter("t"))
    metrics.record(output(0, 0))  # The first, or newcomers alone.
    metrics.record(output(70, 0))
    metrics.record(output(90, 60))
    read: Any = reader.get_metrics_data()
    points = {
        metric.name.removeprefix("octavo.worker."): metric.data.data_points[0]
        for metric in read.resource_metrics[0].scope_metrics[0].metrics
    }
    counted = {name: (point.count, point.sum) for name, point in points.items()}
    assert counted == {
        "step": (3, 720),
        "forward": (3, 600),
        "gap_between_steps": (2, 160),
        "idle_between_steps": (2, 60),
    }
    # Zero is a bucket of its own: the median is exactly that when half of the steps had no wait.
    assert points["idle_between_steps"].bucket_counts[0] == 1


class Sink(metrics_service_pb2_grpc.MetricsServiceServicer):
    """An OTLP collector of metrics; what it has seen, by name."""

    def __init__(self) -> None:
        self.units: dict[str, str] = {}

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.units |= {metric.name: metric.unit for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


def test_a_worker_exports_them(model_folders: dict[str, Path], tmp_path: Path):
    sink, server = Sink(), grpc.server(ThreadPoolExecutor(1))
    # The traces go to the same endpoint, which does not take them, and nothing comes of that.
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
        "no_grpc_proxy": "127.0.0.1",
    }
    options = (f"--model={model_folders['llama-gqa']}", "--num-blocks=8", "--threads=1")
    try:
        with worker_process(tmp_path, *options, environment=environment) as (address, _):
            boot_id = wait_for_boot_id(address)
            stream = ExecuteStream(address)
            fence = types_pb2.Fence(
                session_id="s", epoch=1, kvmem_boot_id="k", worker_boot_id=boot_id
            )
            stream.step(request(fence, 1, [(1, 1, 0, [5], 1)], starts=[start(1, [0])]))
            stream.step(request(fence, 2, [(1, 1, 1, [-1], 1)]))
            stream.end()
            wait_until_seen(sink)
    finally:
        server.stop(None)
    assert sink.units == dict.fromkeys(NAMES, "us")


def wait_for_boot_id(address: str) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    with grpc.insecure_channel(address) as channel:
        stub: Any = worker_pb2_grpc.ModelWorkerStub(channel)
        while True:
            try:
                return stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=5).boot_id
            except grpc.RpcError:
                assert time.monotonic() < deadline_s, "the worker does not come up"
                time.sleep(0.1)


def wait_until_seen(sink: Sink) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while sink.units.keys() < NAMES:
        assert time.monotonic() < deadline_s, f"only {set(sink.units)} came"
        time.sleep(0.05)
