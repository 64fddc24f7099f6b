"""The same cores wired in one process: what the split is measured against."""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer

from benchmarks.inprocess import InProcessKvMemory, InProcessWorker
from model_worker.options import WorkerOptions
from octavo.service import logs, telemetry
from octavo.service.server import ServiceHost, run
from octavo.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.loop import Engine
from scheduler_svc.ports import Holder, WorkerDescription
from scheduler_svc.servicer import InferenceServicer
from scheduler_svc.tokenizer import Detokenizer, Tokenizer

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


async def serve(address: str, options: WorkerOptions) -> None:
    """The public service over cores that call each other directly."""
    traces = telemetry.disabled()
    kvmem, worker = InProcessKvMemory(), InProcessWorker(options)

    def open_text(description: WorkerDescription) -> Callable[[], Detokenizer]:
        servicer.tokenizer = Tokenizer(description.model_path)
        return servicer.tokenizer.detokenizer

    engine = Engine(SchedulerConfig(), kvmem, worker, traces, open_text)
    servicer = InferenceServicer(engine, traces)
    host = ServiceHost("one-process", address, [SERVICE_NAME])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, host.server)
    await host.start()
    running = asyncio.create_task(engine.run(Holder("one-process"), host.set_serving))
    running.add_done_callback(lambda _: host.stopping.set())
    await host.run_until_stopped()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await worker.close()


def main(
    address: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()] = "",
    num_blocks: Annotated[int, typer.Option(min=1)] = 2048,
    attention: Annotated[str, typer.Option()] = WorkerOptions.attention,
) -> None:
    """Serve until SIGTERM."""
    logs.setup("one-process")
    options = WorkerOptions(
        model=model, num_blocks=num_blocks, attention=attention, num_host_blocks=0
    )
    run(serve(address, options))


if __name__ == "__main__":
    # Before torch is loaded: its threads must not spin against the event loop.
    from model_worker.threads import place_threads

    place_threads()
    typer.run(main)
