"""`python -m scheduler_svc`: start the scheduler."""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import structlog
import typer

from octavo.service import logs, telemetry
from octavo.service.pages import use_large_pages_soon
from octavo.service.server import AddressError, ServiceHost, run
from octavo.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.api_keys import ApiKeys, ApiKeysError, NoApiKeys, load_api_keys
from scheduler_svc.core.machine import SchedulerConfig
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.kvmem_port import GrpcKvMemory
from scheduler_svc.loop import Engine, Patience
from scheduler_svc.peers import FenceHolder
from scheduler_svc.ports import Holder, WorkerDescription
from scheduler_svc.servicer import InferenceServicer
from scheduler_svc.tokenizer import Detokenizer, Tokenizer
from scheduler_svc.worker_port import GrpcWorker

log = structlog.get_logger()
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
DRAIN_S = 30.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


async def serve(
    addresses: list[str],
    holder: Holder,
    peers: tuple[str, str],
    config: SchedulerConfig,
    patience: Patience,
    api_keys: Path | None = None,
) -> None:
    """Run the scheduler until it is told to stop. peers: addresses of memory service and worker.

    Raises ApiKeysError when the file of that name will not do.
    """
    known: ApiKeys | NoApiKeys = NoApiKeys() if api_keys is None else load_api_keys(api_keys)
    traces = telemetry.setup("octavo-scheduler")
    fence = FenceHolder()
    kvmem, worker = GrpcKvMemory(peers[0], fence), GrpcWorker(peers[1], fence)

    def open_text(description: WorkerDescription) -> Callable[[], Detokenizer]:
        servicer.tokenizer = Tokenizer(description.model_path)
        return servicer.tokenizer.detokenizer

    engine = Engine(config, kvmem, worker, traces, open_text, patience)
    servicer = InferenceServicer(engine, traces, known)
    if api_keys is not None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, _read_keys_again, servicer, api_keys
        )
    host = ServiceHost("scheduler", addresses[0], [SERVICE_NAME], more_addresses=addresses[1:])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, host.server)
    await host.start()
    running = asyncio.create_task(engine.run(holder, host.set_serving))
    running.add_done_callback(lambda _: host.stopping.set())
    use_large_pages_soon()
    await host.run_until_stopped(drain=lambda: engine.drain(DRAIN_S))
    failed = running.done() and not running.cancelled() and running.exception()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await kvmem.close()
    await worker.close()
    traces.shutdown()
    if failed:
        raise failed


def _read_keys_again(servicer: InferenceServicer, path: Path) -> None:
    """Calls from now on; what was begun with a key that is gone goes on to its end."""
    try:
        known = load_api_keys(path)
    except ApiKeysError as error:
        log.error("the API keys stay as they were", error=str(error))
    else:
        servicer.api_keys = known
        log.info("API keys read again", num_keys=len(known))


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
    prefix_cache: Annotated[
        bool,
        typer.Option(
            envvar="OCTAVO_SCHEDULER_PREFIX_CACHE",
            help="Take the cached KV of a prompt's beginning, and let what is computed be cached.",
        ),
    ] = True,
    preemption: Annotated[
        PreemptionMode,
        typer.Option(
            envvar="OCTAVO_SCHEDULER_PREEMPTION",
            help="What becomes of a running group when blocks run out: its KV is dropped and"
            " computed again, or swapped to the host tier and back; auto: what costs less, by the"
            " rates that the worker has measured.",
        ),
    ] = PreemptionMode.AUTO,
    advertise_address: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_SCHEDULER_ADVERTISE_ADDRESS",
            help="Where callers reach this scheduler; told to those who ask another one."
            " Default: the first address it listens on.",
        ),
    ] = "",
    recovery_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.0, max=3600.0, help="How long callers wait for a lost peer before they are told."
        ),
    ] = Patience.recovery_s,
    result_ttl_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=86400.0,
            help="How long the result of a caller that is gone, but may come back, is kept.",
        ),
    ] = Patience.result_s,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            envvar="OCTAVO_SCHEDULER_API_KEYS",
            help="A file, mode 0600, of lines TENANT KEY or TENANT sha256:DIGEST: only callers with"
            " one of these keys are served, each as its tenant. Read again on SIGHUP."
            " Default: everybody is served, as one tenant.",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(envvar="OCTAVO_LOG_LEVEL")] = "info",
) -> None:
    """Serve the public API, planning steps over a memory service and a worker."""
    logs.setup("scheduler", level=log_level)
    if max_num_seqs > max_num_batched_tokens:
        raise typer.BadParameter(
            f"max_num_seqs is {max_num_seqs}; it must be in [1, {max_num_batched_tokens}],"
            " the last being max_num_batched_tokens"
        )
    config = SchedulerConfig(
        max_num_batched_tokens, max_num_seqs, max_waiting, watermark, prefix_cache, preemption
    )
    try:
        # A name of this process alone, so that no other is taken for it.
        holder = Holder(
            f"scheduler-{os.getpid()}-{secrets.token_hex(4)}", advertise_address or address[0]
        )
        patience = Patience(recovery_timeout_s, result_ttl_s)
        run(serve(address, holder, (kvmem, worker), config, patience, api_keys))
    except (AddressError, ApiKeysError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
