"""Answers on the console: streamed, several at once, as JSON, and a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from octavo.cli.render import answer_name, answer_style, error_line
from octavo.cli.text import printable
from octavo.client import ChunkStream
from octavo.errors import OctavoError
from octavo.types import FinishReason, Message, ModelDescription

# Begins the answer to a conversation.
Ask = Callable[[list[Message]], ChunkStream]

_UNUSUAL_ENDS = {
    FinishReason.LENGTH: "cut at its greatest length",
    FinishReason.ABORT: "aborted",
    FinishReason.KV_CAPACITY: "cut: the KV pool is too small for more",
}


def show_answer(
    chunks: ChunkStream, num_candidates: int, console: Console, *, as_json: bool = False
) -> None:
    """Show an answer as it comes: one flows, several stand in boxes, JSON comes at the end."""
    if as_json:
        for _ in chunks:
            pass
        console.out(json.dumps(dataclasses.asdict(chunks.generation())), highlight=False)
    elif num_candidates == 1:
        flow(chunks, console)
    else:
        _show_boxes(chunks, num_candidates, console)


def flow(chunks: ChunkStream, console: Console) -> None:
    """Print one answer piece by piece, and on a terminal say when its end was unusual."""
    end: FinishReason | None = None
    try:
        for chunk in chunks:
            print_piece(chunk.text, console)
            for part in chunk.candidates:
                end = part.finish_reason
    finally:
        console.print()
    if console.is_terminal and end is not None and end in _UNUSUAL_ENDS:
        console.print(f"[dim]({_UNUSUAL_ENDS[end]})[/]")


def print_piece(text: str, console: Console, style: str = "") -> None:
    """Print a piece of running text as it is, and at once."""
    if text:
        # Captured first: rich prints again what a Ctrl-C interrupted after it was written.
        with console.capture() as captured:
            console.print(Text(printable(text), style), end="", soft_wrap=True)
        console.file.write(captured.get())
        console.file.flush()


class _Boxes:
    """Several answers under each other, one box each."""

    def __init__(self, num_candidates: int) -> None:
        self._texts = [""] * num_candidates
        self._ends: list[FinishReason | None] = [None] * num_candidates

    def add(self, index: int, text: str, end: FinishReason | None) -> None:
        self._texts[index] += text
        self._ends[index] = end or self._ends[index]

    def __rich__(self) -> Group:
        return Group(
            *(
                Panel(
                    Text(printable(text.strip())),
                    title=f"answer {answer_name(index)}",
                    subtitle=None if end is None else str(end),
                    title_align="left",
                    subtitle_align="right",
                    border_style=answer_style(index),
                )
                for index, (text, end) in enumerate(zip(self._texts, self._ends, strict=True))
            )
        )


def _show_boxes(chunks: ChunkStream, num_candidates: int, console: Console) -> None:
    boxes = _Boxes(num_candidates)
    live = Live(boxes, console=console, refresh_per_second=12, vertical_overflow="visible")
    with live if console.is_terminal else contextlib.nullcontext():
        for chunk in chunks:
            for part in chunk.candidates:
                boxes.add(part.index, part.text, part.finish_reason)
    if not console.is_terminal:
        console.print(boxes)


def converse(ask: Ask, opening: Sequence[Message], console: Console) -> None:
    """Questions and answers until Ctrl-D. Ctrl-C stops the answer, which then stays as it is."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing and history)
    console.print("[dim]Ctrl-C stops an answer, Ctrl-D leaves.[/]")
    history = list(opening)
    while True:
        try:
            question = input(_prompt(console)).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim](Ctrl-D leaves)[/]")
            continue
        if question:
            history = _exchange(ask, history, question, console)


def _prompt(console: Console) -> str:
    """The prompt; \\x01 and \\x02 tell line editing what takes no room on the screen."""
    if console.color_system is None:
        return "you> "
    return "\x01\x1b[1;36m\x02you>\x01\x1b[0m\x02 "


def _exchange(
    ask: Ask,
    history: list[Message],
    question: str,
    console: Console,
) -> list[Message]:
    """Ask one question; the history after it, unchanged when it could not be asked."""
    asked = [*history, Message("user", question)]
    answer: list[str] = []
    try:
        with ask(asked) as chunks:
            for chunk in chunks:
                answer.append(chunk.text)
                print_piece(chunk.text, console)
        console.print()
    except KeyboardInterrupt:
        console.print("\n[dim](stopped)[/]")
    except OctavoError as error:
        console.print(error_line(str(error)))
        return history
    return [*asked, Message("assistant", "".join(answer))]


def show_model(model: ModelDescription, console: Console, *, as_json: bool = False) -> None:
    """The description of a model as a table, or as JSON."""
    if as_json:
        console.out(json.dumps(dataclasses.asdict(model)), highlight=False)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("name", model.name)
    table.add_row("longest sequence", f"{model.max_model_len} tokens")
    table.add_row("vocabulary", f"{model.vocab_size} tokens")
    table.add_row("chat template", "yes" if model.has_chat_template else "no")
    table.add_row("attention", model.attention_backend)
    if model.geometry is not None:
        pool = model.geometry
        size_mib = pool.num_blocks * pool.kv_bytes_per_block / 2**20
        table.add_row(
            "KV pool",
            f"{pool.num_blocks} blocks of {pool.block_size} tokens, {pool.kv_dtype},"
            f" {size_mib:.0f} MiB",
        )
    console.print(table)
