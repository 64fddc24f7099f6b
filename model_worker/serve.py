"""The worker as a process: listen, load, serve, report health, stop."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from model_worker.errors import WorkerError
from model_worker.options import WorkerOptions
from model_worker.servicer import WorkerServicer
from model_worker.source import resolve_model
from octavo.service import telemetry
from octavo.service.server import ServiceHost
from octavo.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    # It brings torch, and the server is to listen before that is loaded.
    from model_worker.runner import ModelRunner

log = structlog.get_logger()

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].full_name
HEALTH_INTERVAL_S = 0.5


async def serve(
    address: str,
    options: WorkerOptions,
    step_timeout_s: float,
    load: Callable[[WorkerOptions], ModelRunner] | None = None,
) -> None:
    """Listen at once, load the model on its thread, then serve until told to stop.

    load: makes the runner, on the model thread; None: `build_runner`.
    Raises WorkerError when the model cannot be loaded and AddressError for a bad address.
    """
    model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
    traces = telemetry.setup("octavo-worker", with_metrics=True)
    servicer = WorkerServicer(uuid.uuid4().hex, model_thread, traces)
    host = ServiceHost("octavo-worker", address, [SERVICE_NAME])
    worker_pb2_grpc.add_ModelWorkerServicer_to_server(servicer, host.server)
    await host.start()
    stopped = asyncio.create_task(host.run_until_stopped())
    # In this context its logs name the service.
    context = contextvars.copy_context()
    loading = asyncio.get_running_loop().run_in_executor(
        model_thread, lambda: context.run(load or _load, options)
    )
    await asyncio.wait({stopped, loading}, return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        try:
            servicer.set_runner(loading.result())
        except WorkerError:
            host.stopping.set()
            await stopped
            raise
        health = asyncio.create_task(report_health(host, servicer, step_timeout_s))
        log.info("serving", boot_id=servicer.boot_id)
        await stopped
        health.cancel()
    model_thread.shutdown(wait=False, cancel_futures=True)
    traces.shutdown()
    if not loading.done() or servicer.step_began_s is not None:
        # A thread inside torch cannot be interrupted, and the interpreter would wait for it.
        log.warning("leaving while the model thread is busy")
        os._exit(0)


def _load(options: WorkerOptions) -> ModelRunner:
    """On the model thread: import torch, which takes seconds, and build the runner."""
    # A model that is not there is said at once, not after seconds of imports.
    resolve_model(options.model)
    from model_worker.build import build_runner

    return build_runner(options)


async def report_health(host: ServiceHost, servicer: WorkerServicer, step_timeout_s: float) -> None:
    """Say SERVING, but not while a step has been running for longer than `step_timeout_s`."""
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
