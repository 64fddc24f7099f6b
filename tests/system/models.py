"""Models for the tests: a tiny random one that is fast, and references from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

# Two candidates closer than this may be swapped by the rounding of another batch shape.
NEAR_TIE = 1e-4

# The head is padded beyond the tokenizer, as real ones are: ids from TINY_NUM_TOKENS on can be
# read and must never be drawn.
TINY_VOCAB_SIZE = 300
TINY_NUM_TOKENS = 258
TINY_MAX_MODEL_LEN = 512  # what most tests let it be served with
TINY_MAX_POSITIONS = 32768
TINY_EOS = 257
TINY_WORKER = ("--threads=1", f"--max-model-len={TINY_MAX_MODEL_LEN}")


def save_tiny_llama(folder: Path, max_positions: int = TINY_MAX_POSITIONS) -> Path:
    """A random two-layer Llama with byte-level tokens and no chat template.

    Its weights are wide enough that two logits are seldom near one another.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=TINY_EOS,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|begin|>", "<|end|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<|begin|>", eos_token="<|end|>"
    )
    wrapped.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Reference:
    """Greedy output of transformers, and how far the runner-up was at each position."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]

    def disagreement(self, token_ids: Sequence[int]) -> str | None:
        """None when `token_ids` is this output, up to the first near tie that fell otherwise."""
        assert len(token_ids) == len(self.token_ids)
        at = self.first_difference(token_ids)
        if at is None or self.margins[at] < NEAR_TIE:
            return None
        return (
            f"token {at} is {token_ids[at]} and not {self.token_ids[at]}, whose logit is"
            f" {self.margins[at]:.2g} above the next"
        )

    def first_difference(self, token_ids: Sequence[int]) -> int | None:
        pairs = enumerate(zip(token_ids, self.token_ids, strict=True))
        return next((at for at, (got, wanted) in pairs if got != wanted), None)


class Transformers:
    """A model folder under plain `transformers`, float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(2)
        return AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    @lru_cache(maxsize=256)  # noqa: B019 (lives as long as the session)
    def greedy(self, prompt: tuple[int, ...], max_tokens: int) -> Reference:
        """One prompt alone."""
        return self.greedy_all([prompt], max_tokens)[0]

    def greedy_all(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Reference]:
        """`generate` without an end-of-sequence token, among the ids that the tokenizer has.

        All prompts in one batch, padded on the left, which takes a fifth of the time that twelve
        of them take one by one.
        """
        import torch

        longest = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        padding = range(len(self.tokenizer), self._model.config.vocab_size)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=list(padding) or None,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tops = torch.stack(output.scores, dim=1).topk(2).values
        return [
            Reference(tuple(token_ids), tuple(margins))
            for token_ids, margins in zip(
                output.sequences[:, longest:].tolist(),
                (tops[..., 0] - tops[..., 1]).tolist(),
                strict=True,
            )
        ]
