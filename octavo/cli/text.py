"""Text that a model or a service wrote, made safe for a terminal."""

from __future__ import annotations

import unicodedata

_KEPT = frozenset("\n\t")


def printable(text: str) -> str:
    """`text` with control characters shown as symbols, so that none reaches the terminal.

    A model can write escape sequences; a terminal would obey them.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    """`printable`, with line ends and tabs as symbols as well: for names somebody chose."""
    return printable(text).replace("\n", "\N{SYMBOL FOR LINE FEED}").replace("\t", " ")


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in ("Cc", "Cs"):
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"
