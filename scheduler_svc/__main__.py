"""`python -m scheduler_svc`: start the scheduler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Annotated

import structlog
import typer

from octavo.service import logs, telemetry
from octavo.service.server import AddressError, ServiceHost, run
from octavo.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.loop import Engine
from scheduler_svc.ports import FenceHolder, GrpcKvMemory, GrpcWorker, WorkerDescription
from scheduler_svc.servicer import InferenceServicer
from scheduler_svc.tokenizer import Detokenizer, Tokenizer

log = structlog.get_logger()
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
DRAIN_S = 30.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


async def serve(
    addresses: list[str], kvmem_address: str, worker_address: str, config: SchedulerConfig
) -> None:
    """Run the scheduler until it is told to stop."""
    traces = telemetry.setup("octavo-scheduler")
    fence = FenceHolder()
    kvmem, worker = GrpcKvMemory(kvmem_address, fence), GrpcWorker(worker_address, fence)

    def open_text(description: WorkerDescription) -> Callable[[], Detokenizer]:
        servicer.tokenizer = Tokenizer(description.model_path)
        return servicer.tokenizer.detokenizer

    engine = Engine(config, kvmem, worker, traces, open_text)
    servicer = InferenceServicer(engine, traces)
    host = ServiceHost("scheduler", addresses[0], [SERVICE_NAME], more_addresses=addresses[1:])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, host.server)
    await host.start()
    running = asyncio.create_task(engine.run(f"scheduler-{os.getpid()}", host.set_serving))
    running.add_done_callback(lambda _: host.stopping.set())
    await host.run_until_stopped(drain=lambda: engine.drain(DRAIN_S))
    failed = running.done() and not running.cancelled() and running.exception()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await kvmem.close()
    await worker.close()
    traces.shutdown()
    if failed:
        raise failed


@app.command()
def main(
    address: Annotated[
        list[str], typer.Option(help="unix:/path or host:port; may be given more than once")
    ],
    kvmem: Annotated[str, typer.Option(envvar="OCTAVO_KVMEM_ADDRESS")],
    worker: Annotated[str, typer.Option(envvar="OCTAVO_WORKER_ADDRESS")],
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, max=1 << 20)] = 512,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096)] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, max=65536)] = 1024,
    watermark: Annotated[float, typer.Option(min=0.0, max=0.5)] = 0.01,
    log_level: Annotated[str, typer.Option(envvar="OCTAVO_LOG_LEVEL")] = "info",
) -> None:
    """Serve the public API, planning steps over a memory service and a worker."""
    logs.setup("scheduler", level=log_level)
    if max_num_seqs > max_num_batched_tokens:
        raise typer.BadParameter(
            f"max_num_seqs is {max_num_seqs}; it must be in [1, {max_num_batched_tokens}],"
            " the last being max_num_batched_tokens"
        )
    config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_waiting, watermark)
    try:
        run(serve(address, kvmem, worker, config))
    except AddressError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
