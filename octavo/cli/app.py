"""The `octavo` command. Each command is thin: it reads options and calls what does the work."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from octavo.cli import kvmem_cli

if TYPE_CHECKING:
    from octavo.client import Client

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Octavo: PagedAttention serving, split into services.",
)
app.add_typer(kvmem_cli.app, name="kvmem")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

Model = Annotated[
    str, typer.Option(help="A local folder or a hub id.", show_default="the demo model")
]
KvMemory = Annotated[
    str | None,
    typer.Option(help="For the KV pool, e.g. 2GiB.", show_default="a part of what is free"),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(envvar="OCTAVO_STATE_DIR", help="Where sockets, log and state are kept."),
]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="OCTAVO_ADDRESS",
        help="unix:/path or host:port; several with commas.",
        show_default="what `octavo up` runs",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OCTAVO_API_KEY",
        show_envvar=True,
        show_default=False,
        help="Where the server asks for one. Others on this machine see what is on a command line,"
        " and not the environment.",
    ),
]
CacheSalt = Annotated[
    str,
    typer.Option(
        help="Share cached prompts with requests of the same salt only.", show_default=False
    ),
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="0 or -1: all tokens.")]
TopP = Annotated[float | None, typer.Option(help="Mass of the likeliest tokens kept.")]
MinP = Annotated[float | None, typer.Option(help="Least probability, relative to the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answer repeatable.")]
MaxTokens = Annotated[int | None, typer.Option(help="At most so many tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends the text; may be given again.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]


def main() -> None:
    """The console script."""
    app()


@contextlib.contextmanager
def told_plainly() -> Iterator[None]:
    """Errors as one line on stderr, with an exit status and no traceback."""
    from octavo.cli.render import error_line
    from octavo.cli.stack import StackError
    from octavo.cli.state import StateError
    from octavo.cli.supervisor import ServiceFailedError
    from octavo.errors import InvalidArgumentError, OctavoError

    try:
        yield
    except InvalidArgumentError as error:
        err.print(error_line(error.message), soft_wrap=True)
        raise typer.Exit(USAGE_EXIT_CODE) from None
    except OctavoError as error:
        err.print(error_line(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    except (StateError, StackError, ServiceFailedError) as error:
        err.print(error_line(str(error)), soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    except BrokenPipeError:
        # The reader has seen enough. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


@contextlib.contextmanager
def connected(
    address: str | None, state_dir: Path | None, api_key: str | None = None
) -> Iterator[Client]:
    """A client of the server at `address`, or of the stack that runs on the state folder.

    Where an address is given, somebody must answer there now; a stack's own scheduler, which may
    be about to be restarted, is waited for as the SDK does.
    """
    from octavo.cli.state import StateDir, default_state_dir
    from octavo.client import Client
    from octavo.errors import UnavailableError
    from octavo.service import telemetry

    is_given = address is not None
    if address is None:
        address = StateDir(state_dir or default_state_dir()).running().scheduler
    traces = telemetry.setup("octavo-client")
    try:
        tracer = traces.tracer if traces.enabled else None
        with Client(address, tracer=tracer, api_key=api_key) as client:
            if is_given:
                client.health()
            yield client
    except UnavailableError as error:
        if error.reason != "UNAVAILABLE":  # a server answered, and said why
            raise
        raise UnavailableError(
            f"no server can be reached at {address} ({error.message.split(';')[0]}):"
            " start one with `octavo up`, or say where it is with --address",
            reason=error.reason,
        ) from error
    finally:
        traces.shutdown()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        out.print(f"octavo {importlib.metadata.version('octavo')}")
        raise typer.Exit
    assert context.invoked_subcommand is not None


@app.command()
def up(
    model: Model = "",
    kv_memory: KvMemory = None,
    swap_space: Annotated[
        str | None,
        typer.Option(
            help="Host memory for sequences that have to leave the KV pool for a while, like 1GiB;"
            " 0: none. Without: as much as the pool, at most an eighth of what is free and 4GiB."
        ),
    ] = None,
    state_dir: StateFolder = None,
    listen: Annotated[
        str | None, typer.Option(help="Serve the public API on host:port as well.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step, at most.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences of one step, at most.")
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="Serve callers with one of this file's keys only; see `new-key`."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the three services here, and restart what dies, until Ctrl-C."""
    from octavo.cli.stack import StackOptions
    from octavo.cli.state import StateDir, default_state_dir
    from octavo.cli.up import run_up

    options = StackOptions(
        model=model,
        kv_memory=kv_memory,
        swap_space=swap_space,
        listen=listen,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        log_level=log_level,
        api_keys=api_keys,
    )
    with told_plainly():
        state = StateDir(state_dir or default_state_dir())
        raise typer.Exit(asyncio.run(run_up(state, options, out)))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    n: Annotated[int | None, typer.Option("--n", help="So many answers.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    min_tokens: Annotated[int | None, typer.Option(help="At least so many tokens.")] = None,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Go on past the model's own end.")
    ] = None,
    as_json: AsJson = False,
    timeout_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 600.0,
    cache_salt: CacheSalt = "",
    address: Address = None,
    api_key: ApiKey = None,
    state_dir: StateFolder = None,
) -> None:
    """Complete a text, and show it as it is made."""
    from octavo.cli.talk import show_answer
    from octavo.types import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    with told_plainly(), connected(address, state_dir, api_key) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        with client.stream(text, params, timeout_s=timeout_s, cache_salt=cache_salt) as chunks:
            show_answer(chunks, n or 1, out, as_json=as_json)


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="One question; without it, a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    as_json: AsJson = False,
    cache_salt: CacheSalt = "",
    address: Address = None,
    api_key: ApiKey = None,
    state_dir: StateFolder = None,
) -> None:
    """Talk with the model: Ctrl-C stops an answer, Ctrl-D leaves."""
    from octavo.cli.talk import converse, show_answer
    from octavo.types import Message, SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or (),
    )
    opening = [] if system is None else [Message("system", system)]
    with told_plainly(), connected(address, state_dir, api_key) as client:
        ask = partial(client.stream_chat, params=params, cache_salt=cache_salt)
        if question is None:
            converse(ask, opening, out)
            return
        with ask([*opening, Message("user", question)]) as chunks:
            show_answer(chunks, 1, out, as_json=as_json)


@app.command()
def health(address: Address = None, state_dir: StateFolder = None) -> None:
    """Ask the server how it is; exit status 0 when it serves."""
    with told_plainly(), connected(address, state_dir) as client:
        said = client.health()
        out.print(said.status)
    raise typer.Exit(0 if said.serving else 1)


@app.command()
def model(
    as_json: AsJson = False,
    address: Address = None,
    api_key: ApiKey = None,
    state_dir: StateFolder = None,
) -> None:
    """Describe the model that is served."""
    from octavo.cli.talk import show_model

    with told_plainly(), connected(address, state_dir, api_key) as client:
        show_model(client.model(), out, as_json=as_json)


@app.command()
def top(
    address: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_KVMEM_ADDRESS",
            help="Of the memory service: unix:/path or host:port.",
            show_default="that of `octavo up`",
        ),
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="One frame, of two looks one interval apart.")
    ] = False,
    state_dir: StateFolder = None,
) -> None:
    """Watch the memory service: pool, cache, sequences, tenants, session. Ctrl-C leaves."""
    from octavo.cli.inspecting import kvmem_address
    from octavo.cli.top import show_once, watch

    with told_plainly():
        show = show_once if once else watch
        show(kvmem_address(address, state_dir), out, interval_s)


@app.command()
def new_key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is to be.")],
) -> None:
    """Make an API key: the key for the caller, and the line for the file of `--api-keys`."""
    from octavo.cli.keys import new_key_lines

    with told_plainly():
        for line in new_key_lines(tenant):
            out.print(line, soft_wrap=True, markup=False)


@app.command()
def prepare(model: Model = "") -> None:
    """Fetch or convert a model, so that nothing waits for it later."""
    from octavo.cli.up import run_prepare

    with told_plainly():
        asyncio.run(run_prepare(model, out))


@app.command()
def demo(model: Model = "", kv_memory: KvMemory = None) -> None:
    """Ask a real model a question through three processes, and look inside."""
    from octavo.cli.demo import run_demo

    with told_plainly():
        raise typer.Exit(asyncio.run(run_demo(model, kv_memory, out)))
