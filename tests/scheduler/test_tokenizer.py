"""Streaming detokenization: the chunks joined equal the full decode, for any ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from scheduler_svc.tokenizer import Decoder, Detokenizer, byte_tokens

TEXT = ["The quick brown fox.", "한국어 텍스트", "日本語の文", "emoji 🦊🚀 and ümläute"]


def byte_level() -> FastTokenizer:
    """A byte-level BPE with a tiny vocabulary: most characters span several tokens."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def sentencepiece_like() -> FastTokenizer:
    """Metaspace words with byte fallback, as Llama's: spaces belong to the next token."""
    words = ["▁The", "▁quick", "▁fox", "▁", "s", "."]
    vocab = {"<unk>": 0, "<eos>": 1}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *words]:
        vocab[piece] = len(vocab)
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "sentencepiece_like": sentencepiece_like()}


def streamed(tokenizer: FastTokenizer, token_ids: list[int]) -> list[str]:
    stream = Detokenizer(Decoder(tokenizer), byte_tokens(tokenizer))
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@pytest.mark.parametrize("text", TEXT)
def test_b30_no_replacement_character_the_full_decode_does_not_have(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    chunks = streamed(tokenizer, tokenizer.encode(text).ids)
    assert "".join(chunks) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in chunks)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(data=st.data())
def test_b30_b31_chunks_joined_equal_the_full_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(
        st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24), label="token_ids"
    )
    full = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(streamed(tokenizer, token_ids)) == full
