"""A last check at start: paged logits against the model's own eager attention."""

from __future__ import annotations

import numpy as np
import torch

from model_worker.attention.hook import PAGED
from model_worker.errors import UnsupportedModelError
from model_worker.forward import PagedForward
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.step import SequenceStart, StepInput

# Two sequences: one in three pieces, the last a single token, one beside it in the second piece.
PIECES = (9, 7, 1)
NEIGHBOUR = 5
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def check_against_eager(forward: PagedForward, block_size: int) -> None:
    """Compute a short sequence both ways and compare the logits after its last token.

    Finds whatever a model keeps of a sequence outside of its attention's keys and values, and
    warms the model up. Raises UnsupportedModelError.
    """
    loaded = forward.loaded
    length = min(sum(PIECES), loaded.max_model_len)
    token_ids = (np.arange(length) * 7 + 1) % loaded.num_token_ids
    paged = _paged_logits(forward, token_ids.astype(np.int32), block_size)
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        inputs = torch.from_numpy(token_ids).to(loaded.device)[None]
        eager = model(input_ids=inputs, use_cache=False).logits[0, -1].float().cpu().numpy()
    model.set_attn_implementation(PAGED)
    difference = float(np.abs(paged - eager).max() / max(np.ptp(eager), 1e-6))
    # Written so that a NaN is refused too.
    if not difference <= TOLERANCE[loaded.dtype]:
        raise UnsupportedModelError(
            f"{loaded.source.name} cannot be served: with paged attention its logits are off by"
            f" {difference:.2g} of their range (at most {TOLERANCE[loaded.dtype]} is rounding)"
        )


def _paged_logits(forward: PagedForward, token_ids: np.ndarray, block_size: int) -> np.ndarray:
    """Logits [vocab_size] after the last of `token_ids`, computed in pieces beside a neighbour."""
    loaded = forward.loaded
    num_blocks = -(-token_ids.size // block_size)
    limits = Limits(
        num_blocks=2 * num_blocks,
        block_size=block_size,
        num_token_ids=loaded.num_embeddings,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=2 * token_ids.size,
        max_num_seqs=2,
    )
    kv = KvTensors(loaded.layer_specs, 2 * num_blocks, block_size, loaded.dtype, loaded.device)
    batch = InputBatch(limits)
    # The sequence's blocks lie backwards, its neighbour's between them.
    own = np.arange(2 * num_blocks - 1, 0, -2, dtype=np.int32)
    starts = (SequenceStart(1, own, 1), SequenceStart(2, own - 1, 1))
    logits, computed = np.empty(0), 0
    for number, size in enumerate(PIECES):
        piece = token_ids[computed : computed + size]
        if not piece.size:
            break
        neighbour = token_ids[:NEIGHBOUR] if number == 1 else token_ids[:0]
        sizes = [piece.size] + ([neighbour.size] if neighbour.size else [])
        flat = batch.apply(
            StepInput(
                step_id=number + 1,
                sequence_ids=np.arange(1, len(sizes) + 1, dtype=np.uint64),
                table_versions=np.ones(len(sizes), np.uint32),
                num_input_tokens=np.array(sizes, np.int32),
                num_computed_tokens=np.array([computed, 0][: len(sizes)], np.int32),
                input_token_ids=np.concatenate([piece, neighbour]),
                num_samples=np.array([1, 0][: len(sizes)], np.int32),
                starts=starts if number == 0 else (),
            )
        )
        logits = forward(flat, kv)[0].numpy()
        computed += piece.size
    return logits
