"""Text in and out: the tokenizer of the served model, its chat template, streaming decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Of single tokens. A text takes about 60 bytes.
MAX_KEPT_TEXTS = 2**15


class NoChatTemplateError(ValueError):
    """The model has no chat template."""


class Detokenizer:
    """Decodes one sequence as it grows. The chunks joined equal the full decode.

    The window of ids that is decoded anew begins one chunk back, since some decoders strip the
    space of whatever comes first. (The `tokenizers` library's own DecodeStream raises on runs
    of byte tokens that are not UTF-8, so it cannot be used on what a model may sample.)
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_token_ids: frozenset[int]
    ) -> None:
        """`byte_token_ids`: ids that stand for one raw byte (byte fallback)."""
        self._decode_ids = decode
        self._byte_token_ids = byte_token_ids
        self._token_ids: list[int] = []
        self._window_start = 0
        self._shown_end = 0
        self._shown_chars = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._token_ids.append(token_id)
        if token_id in self._byte_token_ids:
            # One bad byte turns its whole run into replacement characters, so nothing of a
            # run is certain before it is over.
            return ""
        window = self._decode(self._window_start, len(self._token_ids))
        if window.endswith(REPLACEMENT):
            return ""
        shown = self._decode(self._window_start, self._shown_end)
        piece = window[len(shown) :]
        if piece:
            self._window_start, self._shown_end = self._shown_end, len(self._token_ids)
            self._shown_chars += len(piece)
        return piece

    def flush(self) -> str:
        """What is still held: bytes that never became a character."""
        return self._decode(0, len(self._token_ids))[self._shown_chars :]

    def _decode(self, start: int, end: int) -> str:
        return self._decode_ids(self._token_ids[start:end])


class Decoder:
    """Token ids to text. What single ids decode to is kept, since a window usually begins with one
    that was decoded before."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode_one = lru_cache(MAX_KEPT_TEXTS)(self._decode)

    def __call__(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode_one(token_ids[0])
        return self._decode(*token_ids)

    def _decode(self, *token_ids: int) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def byte_tokens(tokenizer: FastTokenizer) -> frozenset[int]:
    """Ids of the byte-fallback tokens `<0x00>` ... `<0xFF>`; empty when there are none."""
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, path: str) -> None:
        """Load from a local folder (or a hub id). Raises OSError when there is none."""
        self._wrapped = _load(path)
        self._fast: FastTokenizer = self._wrapped.backend_tokenizer
        self._byte_token_ids = byte_tokens(self._fast)
        self._decode = Decoder(self._fast)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a plain text, with the special tokens that the model puts in front."""
        return self._ids(text, add_special_tokens=True)

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
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # The batch call alone lets other threads run meanwhile, and without offsets it takes a
        # fifth of the time.
        encodings = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encodings[0].ids)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._decode, self._byte_token_ids)


def _load(path: str) -> Any:
    # PreTrainedTokenizerFast does not import torch (0.6 s to start instead of 3).
    if (Path(path) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, use_fast=True)
