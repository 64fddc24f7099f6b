"""Run the KV memory service: `python -m kvmem_svc --address unix:/run/octavo/kvmem.sock`."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import structlog
import typer

from kvmem_svc.core.memory import KvMemory
from kvmem_svc.servicer import KvMemoryServicer
from octavo.service import logs, telemetry
from octavo.service.server import AddressError, ServiceHost, run
from octavo.v1 import kvmem_pb2, kvmem_pb2_grpc

log = structlog.get_logger()

SERVICE_NAME = kvmem_pb2.DESCRIPTOR.services_by_name["KvMemory"].full_name
app = typer.Typer(add_completion=False)


async def serve(address: str, memory: KvMemory) -> bool:
    """Serve until told to stop; False when a bug ended it."""
    tracing = telemetry.setup("octavo-kvmem")
    host = ServiceHost("kvmem", address, [SERVICE_NAME])
    bugs: list[Exception] = []

    def stop_on_bug(bug: Exception) -> None:
        log.critical("the books do not balance, stopping", error=repr(bug), exc_info=bug)
        bugs.append(bug)
        host.stopping.set()

    servicer = KvMemoryServicer(memory, tracing, stop_on_bug)
    kvmem_pb2_grpc.add_KvMemoryServicer_to_server(servicer, host.server)
    await host.start()
    await host.set_serving(True)
    await host.run_until_stopped(servicer.drain)
    tracing.shutdown()
    return not bugs


@app.command()
def main(
    address: Annotated[
        str, typer.Option(envvar="OCTAVO_KVMEM_ADDRESS", help="unix:/path or host:port.")
    ],
    max_sequences: Annotated[
        int, typer.Option(envvar="OCTAVO_KVMEM_MAX_SEQUENCES", min=1, max=2**20)
    ] = 4096,
    lease_ttl_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_LEASE_TTL_MS",
            min=100,
            max=3_600_000,
            help="Silence after which a session of unary calls ends.",
        ),
    ] = 5_000,
    resume_grace_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_RESUME_GRACE_MS",
            min=0,
            max=600_000,
            help="How long a session may be resumed after its stream broke.",
        ),
    ] = 1_000,
    log_level: Annotated[str, typer.Option(envvar="OCTAVO_KVMEM_LOG_LEVEL")] = "info",
) -> None:
    """The KV memory service: owner of every KV block and of every sequence that uses one."""
    logs.setup("octavo-kvmem", level=log_level)
    memory = KvMemory(
        # Random, so that no fence of a former process fits this one.
        secrets.token_hex(8),
        max_sequences=max_sequences,
        lease_ttl_ms=lease_ttl_ms,
        resume_grace_ms=resume_grace_ms,
    )
    clean = True

    async def serving() -> None:
        nonlocal clean
        clean = await serve(address, memory)

    try:
        run(serving())
    except AddressError as error:
        log.error("cannot start", error=str(error))
        sys.exit(2)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    app()
