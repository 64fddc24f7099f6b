"""A journal for people: `python -m kvmem_svc.journal.tool verify|show|purge DIR`.

Prompts are in a journal. Nothing of them is shown unless `--tokens` asks for it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvmem_svc.core import batch as b
from kvmem_svc.core import mutations as m
from kvmem_svc.journal.encoding import decode, kind_name
from kvmem_svc.journal.errors import JournalDamaged, JournalError
from kvmem_svc.journal.folder import JournalFolder, machine_boot_id
from kvmem_svc.journal.load import load
from kvmem_svc.journal.reader import JournalReader, machine_boot_ids
from kvmem_svc.journal.segment import Record

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

DAMAGED_EXIT_CODE = 3
Directory = Annotated[Path, typer.Argument(help="The journal's folder.")]


@contextmanager
def told_plainly() -> Iterator[None]:
    """Errors as one line, and an exit status: 3 for a damaged journal, 1 for all else."""
    try:
        yield
    except JournalDamaged as error:
        print(f"damaged: {error}", file=sys.stderr)
        raise typer.Exit(DAMAGED_EXIT_CODE) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (JournalError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def verify(directory: Directory) -> None:
    """Read everything, carry every record out again, and say whether it fits together."""
    with told_plainly():
        folder = JournalFolder(directory, create=False)
        _print_surroundings(folder)
        num_records: Counter[str] = Counter()

        def count(file_name: str, _: Record) -> None:
            num_records[file_name] += 1

        with folder.fold_lock():
            try:
                loaded = load(folder, on_record=count)
            finally:
                _print_files(folder, num_records)
        if loaded is None:
            print("there is no journal: nothing was written yet")
            return
        if loaded.num_torn_bytes:
            print(
                f"{loaded.num_torn_bytes} bytes follow the last whole record: a write under way,"
                " or torn by a kill; the next start cuts them off"
            )
        stats = loaded.memory.stats()
        print(
            f"whole: {loaded.next_record - 1} records, {loaded.num_replayed} of them carried out"
            f" again to the same replies; {stats.num_requests} requests, {stats.num_sequences}"
            f" live sequences, kvmem_boot_id {loaded.life.kvmem_boot_id}"
        )


def _print_surroundings(folder: JournalFolder) -> None:
    written_on = machine_boot_ids(folder)
    if written_on and machine_boot_id() not in written_on:
        print("from before a reboot of this machine: the next start of the service removes it")
    for path in folder.set_aside_folders():
        print(f"{path.name}/: set aside, {sum(1 for _ in path.iterdir())} files")


def _print_files(folder: JournalFolder, num_records: Counter[str]) -> None:
    for path in folder.files():
        records = f"{num_records[path.name]:>9} records" if path.name in num_records else ""
        print(f"{path.name:<14} {path.stat().st_size:>12} bytes {records}")


@app.command()
def show(
    directory: Directory,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids as well: prompts and answers.")
    ] = False,
) -> None:
    """One line for each record, oldest first: number, time, kind, size, what it does."""
    with told_plainly():
        folder = JournalFolder(directory, create=False)
        with folder.fold_lock():
            reader = JournalReader(folder)
            if reader.snapshot is not None:
                print(
                    f"snapshot of the {reader.snapshot.header.next_record - 1} records before,"
                    f" {len(reader.snapshot.state)} bytes"
                )
            for _, record in reader.records():
                print(_line(record))
                if tokens:
                    for line in _token_lines(record):
                        print(f"           {line}")


def _line(record: Record) -> str:
    at = datetime.fromtimestamp(record.unix_time_ms / 1000, UTC)
    when = at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03}Z"
    return (
        f"{record.number:>9}  {when}  {kind_name(record.kind):<13} {record.num_bytes:>8} B"
        f"  {_summary(_mutation(record))}"
    ).rstrip()


def _mutation(record: Record) -> m.Mutation:
    return decode(record.kind, record.payload, lambda: b.Fence("", 0, ""))


def _summary(mutation: m.Mutation) -> str:
    match mutation:
        case m.GrantSession(holder, holder_address):
            return f"to {holder!r}" + (f" at {holder_address}" if holder_address else "")
        case m.ConfirmPool(worker_boot_id, geometry, last_executed_step):
            return (
                f"of worker {worker_boot_id}: {geometry.num_blocks} blocks of"
                f" {geometry.block_size} and {geometry.num_host_blocks} on the host, last executed"
                f" step {last_executed_step}"
            )
        case m.ApplyBatch(batch):
            kinds = Counter(b.op_name(op) for op in batch.ops)
            ops = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "nothing"
            return (
                f"{batch.batch_seq} for step {batch.step_id}, acknowledging"
                f" {batch.acknowledged_step}: {ops}"
            )
        case m.Expire(request_ids):
            return f"{len(request_ids)} requests"
        case m.Configure() | m.Pin() | m.Unpin():
            return _settings_summary(mutation)
        case _:
            return ""


def _settings_summary(mutation: m.Configure | m.Pin | m.Unpin) -> str:
    match mutation:
        case m.Configure(use_prefix_cache, quota):
            return (
                f"prefix cache {'on' if use_prefix_cache else 'off'}, at most"
                f" {quota.max_blocks or 'all'} blocks and {quota.max_sequences or 'all'} sequences"
                " a tenant"
            )
        case m.Pin(domain, token_ids, ttl_ms, is_public):
            return (
                f"{token_ids.size} tokens of tenant {domain.tenant!r}"
                + (f" for {ttl_ms} ms" if ttl_ms else "")
                + (", public" if is_public else "")
            )
        case m.Unpin(pin_id):
            return str(pin_id)


def _token_lines(record: Record) -> Iterator[str]:
    mutation = _mutation(record)
    if isinstance(mutation, m.Pin):
        yield f"pin: {_ids(mutation.token_ids)}"
    if not isinstance(mutation, m.ApplyBatch):
        return
    for op in mutation.batch.ops:
        match op:
            case b.Arrive():
                yield f"arrive {op.request_id!r}: {_ids(op.prompt_token_ids)}"
                for candidate in op.candidates:
                    yield f"  candidate {candidate.candidate}: {_ids(candidate.output_token_ids)}"
            case b.Commit():
                sizes = op.num_tokens.tolist() or [1] * op.sequence_ids.size
                start = 0
                for sequence_id, size in zip(op.sequence_ids.tolist(), sizes, strict=False):
                    yield f"commit {sequence_id}: {_ids(op.token_ids[start : start + size])}"
                    start += size
            case b.Append() | b.Fork():
                name = b.op_name(op)
                yield f"{name} {op.sequence_id}: {_ids(op.token_ids)}"


def _ids(column: b.Column) -> list[int]:
    return column.tolist()


@app.command()
def purge(
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the journal and everything that was set aside. Not while a service uses it."""
    with told_plainly():
        folder = JournalFolder(directory, create=False)
        lock = folder.lock()
        try:
            if not yes:
                what = f"{len(folder.files())} files and {len(folder.set_aside_folders())}"
                typer.confirm(
                    f"Delete {what} journals set aside in {folder.path}, with every request in"
                    " them?",
                    abort=True,
                )
            with folder.fold_lock():
                num_files, num_aside = folder.remove_journal(), folder.remove_set_aside()
        finally:
            os.close(lock)
        print(f"deleted {num_files} files and {num_aside} journals set aside")


if __name__ == "__main__":
    app()
