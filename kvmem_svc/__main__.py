"""Run the KV memory service: `python -m kvmem_svc --address unix:/run/octavo/kvmem.sock`."""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import asyncio
import contextlib
import secrets
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer

from kvmem_svc.core.gatekeeper import Gatekeeper
from kvmem_svc.core.leases import LeaseTimes
from kvmem_svc.core.memory import KvMemory
from kvmem_svc.core.mutations import Configure
from kvmem_svc.core.tenants import Quota
from kvmem_svc.ports import Journal
from kvmem_svc.servicer import KvMemoryServicer
from octavo.service import logs, telemetry
from octavo.service.pages import use_large_pages_soon
from octavo.service.server import AddressError, ServiceHost, run
from octavo.v1 import kvmem_pb2, kvmem_pb2_grpc

log = structlog.get_logger()

SERVICE_NAME = kvmem_pb2.DESCRIPTOR.services_by_name["KvMemory"].full_name
TIMES = LeaseTimes()
HOUR_MS = 3_600_000
app = typer.Typer(add_completion=False)


async def serve(
    address: str, gatekeeper: Gatekeeper, journal: Journal | None, configuration: Configure
) -> bool:
    """Serve until told to stop; False when a bug ended it."""
    tracing = telemetry.setup("octavo-kvmem")
    host = ServiceHost("kvmem", address, [SERVICE_NAME])
    bugs: list[Exception] = []

    def stop_on_bug(bug: Exception) -> None:
        log.critical("the books do not balance, stopping", error=repr(bug), exc_info=bug)
        bugs.append(bug)
        host.stopping.set()

    servicer = KvMemoryServicer(
        gatekeeper, tracing, stop_on_bug, journal=journal, on_serving=host.set_serving
    )
    gatekeeper.configure(configuration)
    kvmem_pb2_grpc.add_KvMemoryServicer_to_server(servicer, host.server)
    await host.start()
    ticking = asyncio.create_task(servicer.keep_ticking())
    await host.set_serving(True)
    use_large_pages_soon()
    await host.run_until_stopped(servicer.drain)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking
    if journal is not None:
        journal.close()
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
            max=HOUR_MS,
            help="Silence after which a session may be taken over.",
        ),
    ] = TIMES.lease_ttl_ms,
    resume_grace_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_RESUME_GRACE_MS",
            min=0,
            max=HOUR_MS,
            help="How long a session waits for its holder after its stream broke.",
        ),
    ] = TIMES.resume_grace_ms,
    recovery_grace_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_RECOVERY_GRACE_MS",
            min=0,
            max=HOUR_MS,
            help="The same after this service has recovered from its journal.",
        ),
    ] = TIMES.recovery_grace_ms,
    orphan_ttl_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_ORPHAN_TTL_MS",
            min=0,
            max=24 * HOUR_MS,
            help="How long live sequences are kept while there is no session.",
        ),
    ] = TIMES.orphan_ttl_ms,
    result_ttl_ms: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_RESULT_TTL_MS",
            min=0,
            max=24 * HOUR_MS,
            help="The same for results that nobody has confirmed.",
        ),
    ] = TIMES.result_ttl_ms,
    journal: Annotated[
        str,
        typer.Option(
            envvar="OCTAVO_KVMEM_JOURNAL",
            help="The folder of the journal, or none: then the state dies with the process.",
        ),
    ] = "none",
    journal_segment_mib: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_JOURNAL_SEGMENT_MIB",
            min=1,
            max=1024,
            help="Size at which a segment of the journal is sealed, to be folded.",
        ),
    ] = 64,
    discard_damaged_journal: Annotated[
        bool,
        typer.Option(
            envvar="OCTAVO_KVMEM_DISCARD_DAMAGED_JOURNAL",
            help="Set a damaged journal aside and begin a new one.",
        ),
    ] = False,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            envvar="OCTAVO_KVMEM_PREFIX_CACHE",
            help="Keep the KV of finished sequences for prompts that begin alike.",
        ),
    ] = True,
    tenant_max_blocks: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_TENANT_MAX_BLOCKS",
            min=0,
            help="Blocks in use that a tenant may have; 0: no limit.",
        ),
    ] = 0,
    tenant_max_sequences: Annotated[
        int,
        typer.Option(
            envvar="OCTAVO_KVMEM_TENANT_MAX_SEQUENCES",
            min=0,
            help="Sequences, waiting or running, that a tenant may have; 0: no limit.",
        ),
    ] = 0,
    log_level: Annotated[str, typer.Option(envvar="OCTAVO_KVMEM_LOG_LEVEL")] = "info",
) -> None:
    """The KV memory service: owner of every KV block and of every sequence that uses one."""
    logs.setup("octavo-kvmem", level=log_level)
    times = LeaseTimes(
        lease_ttl_ms, resume_grace_ms, recovery_grace_ms, orphan_ttl_ms, result_ttl_ms
    )
    memory, opened_journal, recovered = _memory_and_journal(
        journal,
        max_sequences,
        segment_bytes=journal_segment_mib * 1024 * 1024,
        discard_damaged=discard_damaged_journal,
    )
    quota = Quota(tenant_max_blocks, tenant_max_sequences)
    configuration = Configure(prefix_cache, quota)
    clean = True

    async def serving() -> None:
        nonlocal clean
        gatekeeper = Gatekeeper(memory, times, recovered=recovered)
        clean = await serve(address, gatekeeper, opened_journal, configuration)

    try:
        run(serving())
    except AddressError as error:
        log.error("cannot start", error=str(error))
        sys.exit(2)
    sys.exit(0 if clean else 1)


def _memory_and_journal(
    journal: str, max_sequences: int, *, segment_bytes: int, discard_damaged: bool
) -> tuple[KvMemory, Journal | None, bool]:
    """The memory to serve, its journal, and whether it was recovered from that.

    Ends the process with code 3 when the journal cannot be used.
    """
    if journal == "none":
        return KvMemory(_new_boot_id(), max_sequences=max_sequences), None, False
    # A service without a journal needs nothing of it.
    from kvmem_svc.journal.errors import JournalError
    from kvmem_svc.journal.recover import recover
    from kvmem_svc.journal.writer import SegmentLimits

    try:
        memory, opened, report = recover(
            Path(journal),
            _new_boot_id,
            max_sequences=max_sequences,
            limits=SegmentLimits(max_bytes=segment_bytes),
            discard_damaged=discard_damaged,
        )
    except JournalError as error:
        # The last line is what a supervisor shows: a sentence for a person.
        print(f"octavo-kvmem: {error}", file=sys.stderr)
        sys.exit(3)
    return memory, opened, report.recovered


def _new_boot_id() -> str:
    """Random, so that no fence of a former life fits this one."""
    return secrets.token_hex(8)


if __name__ == "__main__":
    app()
