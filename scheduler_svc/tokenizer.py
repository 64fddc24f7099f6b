"""Text in and out: the tokenizer of the served model, its chat template, streaming decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream


class NoChatTemplateError(ValueError):
    """The model has no chat template."""


class Detokenizer:
    """Decodes one sequence as it grows. The chunks joined equal the full decode."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._shown_chars = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id) or ""
        self._shown_chars += len(piece)
        return piece

    def flush(self) -> str:
        """What the stream still holds: bytes that never became a character."""
        full = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return full[self._shown_chars :]


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, path: str) -> None:
        """Load from a local folder (or a hub id). Raises OSError when there is none."""
        self._wrapped = _load(path)
        self._fast: FastTokenizer = self._wrapped.backend_tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a plain text, with the special tokens that the model puts in front."""
        return tuple(self._fast.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises NoChatTemplateError, and ValueError when the template refuses the messages.
        """
        if not self.has_chat_template:
            raise NoChatTemplateError("this model has no chat template; use Generate with a prompt")
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template raises whatever its author chose
            raise ValueError(f"the model's chat template refused the messages: {error}") from error
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._fast)


def _load(path: str) -> Any:
    # PreTrainedTokenizerFast does not import torch (0.6 s to start instead of 3).
    if (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, use_fast=True)
