"""`python -m model_worker`: load a model and serve steps over gRPC."""

from __future__ import annotations

import os

# Before torch loads its OpenMP runtime, which reads these once. Its threads, left alone, spin
# for milliseconds after every parallel region, on cores that the other services need; here they
# spin just long enough to bridge the gap to the next operation of the same forward.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import asyncio
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from model_worker.errors import WorkerError
from model_worker.options import WorkerOptions
from model_worker.servicer import WorkerServicer
from octavo.service import logs, telemetry
from octavo.service.server import AddressError, ServiceHost, run
from octavo.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from model_worker.runner import ModelRunner

log = structlog.get_logger()

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].full_name
HEALTH_INTERVAL_S = 0.5


def _env(name: str) -> str:
    return f"OCTAVO_WORKER_{name}"


def main(
    address: Annotated[
        str, typer.Option(envvar=_env("ADDRESS"), help="unix:/path or host:port to listen on.")
    ] = "127.0.0.1:50053",
    model: Annotated[
        str,
        typer.Option(
            envvar=_env("MODEL"), help="A local folder or a hub id; empty: the demo model."
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(envvar=_env("DTYPE"), help="float32 or bfloat16.")
    ] = "float32",
    attention: Annotated[
        str, typer.Option(envvar=_env("ATTENTION"), help="Attention backend.")
    ] = "reference",
    kv_memory: Annotated[
        str,
        typer.Option(
            envvar=_env("KV_MEMORY"),
            help="Memory for the KV pool, like 2GiB; empty: a quarter of what is available.",
        ),
    ] = "",
    num_blocks: Annotated[
        int | None,
        typer.Option(envvar=_env("NUM_BLOCKS"), help="Exactly so many blocks.", min=1),
    ] = None,
    block_size: Annotated[
        int, typer.Option(envvar=_env("BLOCK_SIZE"), help="Tokens per block.", min=1)
    ] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(envvar=_env("MAX_NUM_BATCHED_TOKENS"), help="Tokens per step.", min=1)
    ] = 512,
    max_num_seqs: Annotated[
        int, typer.Option(envvar=_env("MAX_NUM_SEQS"), help="Sequences per step.", min=1)
    ] = 64,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            envvar=_env("MAX_MODEL_LEN"), help="Tokens per sequence; default: the model's.", min=1
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(envvar=_env("THREADS"), help="Default: one per core.", min=1)
    ] = None,
    step_timeout_ms: Annotated[
        int,
        typer.Option(
            envvar=_env("STEP_TIMEOUT_MS"),
            help="A step that runs longer makes health say NOT_SERVING until it ends.",
            min=1,
        ),
    ] = 30_000,
    log_level: Annotated[
        str, typer.Option(envvar=_env("LOG_LEVEL"), help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Serve a model's forward passes over the KV blocks it is told to use."""
    logs.setup("octavo-worker", level=log_level)
    options = WorkerOptions(
        model=model,
        dtype=dtype,
        attention=attention,
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        threads=threads,
    )
    try:
        run(_serve(address, options, step_timeout_ms / 1000))
    except (WorkerError, AddressError) as error:
        print(f"octavo-worker: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


async def _serve(address: str, options: WorkerOptions, step_timeout_s: float) -> None:
    """Listen at once, load the model on its thread, then serve until told to stop."""
    model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
    traces = telemetry.setup("octavo-worker")
    servicer = WorkerServicer(uuid.uuid4().hex, model_thread, traces)
    host = ServiceHost("octavo-worker", address, [SERVICE_NAME])
    worker_pb2_grpc.add_ModelWorkerServicer_to_server(servicer, host.server)
    await host.start()
    loop = asyncio.get_running_loop()
    stopped = asyncio.create_task(host.run_until_stopped())
    loading = loop.run_in_executor(model_thread, _load, options)
    await asyncio.wait({stopped, loading}, return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        try:
            servicer.set_runner(loading.result())
        except WorkerError:
            host.stopping.set()
            await stopped
            raise
        health = asyncio.create_task(_report_health(host, servicer, step_timeout_s))
        log.info("serving", boot_id=servicer.boot_id)
        await stopped
        health.cancel()
    model_thread.shutdown(wait=False, cancel_futures=True)
    traces.shutdown()


def _load(options: WorkerOptions) -> ModelRunner:
    """On the model thread: import torch, which takes seconds, and build the runner."""
    from model_worker.build import build_runner

    return build_runner(options)


async def _report_health(
    host: ServiceHost, servicer: WorkerServicer, step_timeout_s: float
) -> None:
    """Say SERVING, but not while a step hangs."""
    was_serving = None
    while not host.stopping.is_set():
        began_s = servicer.step_began_s
        is_serving = began_s is None or time.monotonic() - began_s < step_timeout_s
        if is_serving != was_serving:
            await host.set_serving(is_serving)
            if not is_serving:
                log.error("a step hangs", running_s=round(time.monotonic() - (began_s or 0.0), 1))
            was_serving = is_serving
        await asyncio.sleep(HEALTH_INTERVAL_S)


if __name__ == "__main__":
    typer.run(main)
