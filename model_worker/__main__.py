"""`python -m model_worker`: load a model and serve steps over gRPC."""

from __future__ import annotations

from octavo.service import transport  # noqa: F401 (before grpc)

# isort: split

import sys
from typing import Annotated

import typer

from model_worker.errors import WorkerError
from model_worker.options import WorkerOptions
from model_worker.serve import serve
from model_worker.threads import place_threads
from octavo.service import logs
from octavo.service.server import AddressError, run


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
        str,
        typer.Option(
            envvar=_env("ATTENTION"),
            help="auto, reference, cpu or cuda; auto: cpu where there is a C++ compiler.",
        ),
    ] = WorkerOptions.attention,
    batch_invariant: Annotated[
        str,
        typer.Option(
            envvar=_env("BATCH_INVARIANT"),
            help="auto, on or off: a request's logits are the same bits in any batch."
            " auto: on where it can be.",
        ),
    ] = WorkerOptions.batch_invariant,
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
    swap_space: Annotated[
        str,
        typer.Option(
            envvar=_env("SWAP_SPACE"),
            help="Memory of the host for blocks that are swapped out, like 2GiB; 0: none. Empty: an"
            " eighth of what is available, at most 4GiB and as many blocks as the pool has.",
        ),
    ] = "",
    num_host_blocks: Annotated[
        int | None,
        typer.Option(
            envvar=_env("NUM_HOST_BLOCKS"), help="Exactly so many blocks of swap space.", min=0
        ),
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
    place_threads()
    logs.setup("octavo-worker", level=log_level)
    options = WorkerOptions(
        model=model,
        dtype=dtype,
        attention=attention,
        batch_invariant=batch_invariant,
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        swap_space=swap_space,
        num_host_blocks=num_host_blocks,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        threads=threads,
    )
    try:
        run(serve(address, options, step_timeout_ms / 1000))
    except (WorkerError, AddressError) as error:
        print(f"octavo-worker: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
