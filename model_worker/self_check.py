"""Last checks at start: paged logits against the model's own eager attention, and against
themselves in other company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model_worker.attention.hook import PAGED
from model_worker.errors import NotInvariantError, UnsupportedModelError
from model_worker.forward import PagedForward
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import KvTensors
from model_worker.loader import LoadedModel
from model_worker.step import SequenceStart, StepInput

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Piece:
    """Tokens of the checked sequence in one step, and how many of each other sequence beside it.

    The others come before it in the batch when `is_last`, else after.
    """

    num_tokens: int
    neighbours: tuple[int, ...] = ()
    is_last: bool = False


# In three pieces, the last a single token, with a neighbour beside the second.
AGAINST_EAGER = (Piece(9), Piece(7, (5,)), Piece(1))
# Largest difference that is put down to rounding, as a share of the logits' spread.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

# The same 41 tokens: whole, in pieces, ending alone or in company. The large neighbours are for
# operations that are shared out among threads only when there is much to do.
INVARIANCE = (
    (Piece(41),),
    (Piece(16), Piece(24), Piece(1)),
    (Piece(3), Piece(37, (9, 1), is_last=True), Piece(1, (1, 2, 17), is_last=True)),
    (Piece(41, (70, 33), is_last=True),),
)


def check_against_eager(forward: PagedForward, block_size: int) -> None:
    """Compare with the model as it is now; see check_logits."""
    check_logits(eager_logits(forward.loaded), forward, block_size)


def eager_logits(loaded: LoadedModel) -> F32:
    """[vocab_size]: what the model's own eager attention gives after a short sequence."""
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        inputs = torch.from_numpy(_token_ids(loaded, AGAINST_EAGER)).to(loaded.device)[None]
        eager = model(input_ids=inputs, use_cache=False).logits[0, -1].float().cpu().numpy()
    model.set_attn_implementation(PAGED)
    return eager


def check_logits(eager: F32, forward: PagedForward, block_size: int) -> None:
    """Compute that sequence with paged attention, in pieces, and compare its logits with `eager`.

    Finds whatever a model keeps of a sequence outside of its attention's keys and values, and
    warms the model up. Raises UnsupportedModelError.
    """
    loaded = forward.loaded
    paged = paged_logits(forward, block_size, AGAINST_EAGER)
    difference = float(np.abs(paged - eager).max() / max(np.ptp(eager), 1e-6))
    # Written so that a NaN is refused too.
    if not difference <= TOLERANCE[loaded.dtype]:
        raise UnsupportedModelError(
            f"{loaded.source.name} cannot be served: with paged attention its logits are off by"
            f" {difference:.2g} of their range (at most {TOLERANCE[loaded.dtype]} is rounding)"
        )


def check_invariance(forward: PagedForward, block_size: int) -> None:
    """Compare logits bit for bit over the schedules of INVARIANCE, the last with one thread too.

    Raises NotInvariantError.
    """
    expected = paged_logits(forward, block_size, INVARIANCE[0])
    num_threads = torch.get_num_threads()
    try:
        for threads, schedules in ((num_threads, INVARIANCE), (1, INVARIANCE[-1:])):
            torch.set_num_threads(threads)
            for pieces in schedules:
                actual = paged_logits(forward, block_size, pieces)
                if not np.array_equal(actual, expected):
                    sizes = "+".join(str(piece.num_tokens) for piece in pieces)
                    raise NotInvariantError(
                        f"{forward.loaded.source.name} is not batch-invariant: computed as {sizes}"
                        f" tokens on {threads} threads its logits differ by up to"
                        f" {np.abs(actual - expected).max():.2g}"
                    )
    finally:
        torch.set_num_threads(num_threads)


def _token_ids(loaded: LoadedModel, pieces: Sequence[Piece]) -> I32:
    length = min(sum(piece.num_tokens for piece in pieces), loaded.max_model_len)
    return ((np.arange(length) * 7 + 1) % loaded.num_token_ids).astype(np.int32)


def paged_logits(forward: PagedForward, block_size: int, pieces: Sequence[Piece]) -> F32:
    """Logits [vocab_size] after the last of the tokens that `pieces` say."""
    loaded = forward.loaded
    token_ids = _token_ids(loaded, pieces)
    most = max(token_ids.size, *(size for piece in pieces for size in (0, *piece.neighbours)))
    most_rows = 1 + max(len(piece.neighbours) for piece in pieces)
    per_sequence = -(-most // block_size)
    num_blocks = most_rows * per_sequence
    limits = Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        num_token_ids=loaded.num_embeddings,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=most_rows * most,
        max_num_seqs=most_rows,
    )
    kv = KvTensors(loaded.layer_specs, num_blocks, block_size, loaded.dtype, loaded.device)
    batch = InputBatch(limits)
    # Each sequence's blocks lie backwards, the others' between them.
    starts = tuple(
        SequenceStart(row + 1, np.arange(num_blocks - 1 - row, -1, -most_rows, dtype=np.int32), 1)
        for row in range(most_rows)
    )
    logits, computed = np.empty(0, np.float32), 0
    for number, piece in enumerate(pieces):
        own = token_ids[computed : computed + piece.num_tokens]
        if not own.size:
            break
        others = [
            np.arange(min(size, loaded.max_model_len), dtype=np.int32) % loaded.num_token_ids
            for size in piece.neighbours
        ]
        order = np.arange(1 + len(others))
        if piece.is_last:
            order = np.roll(order, -1)
        rows = [own, *others]
        flat = batch.apply(
            StepInput(
                step_id=number + 1,
                sequence_ids=(order + 1).astype(np.uint64),
                table_versions=np.ones(order.size, np.uint32),
                num_input_tokens=np.array([rows[i].size for i in order], np.int32),
                num_computed_tokens=np.where(order == 0, computed, 0).astype(np.int32),
                input_token_ids=np.concatenate([rows[i] for i in order]),
                num_samples=(order == 0).astype(np.int32),
                starts=starts if number == 0 else (),
            )
        )
        logits = forward(flat, kv)[0].numpy()
        computed += own.size
    return logits
