"""Mistakes that the checks on the CPU must notice: text that is in a source once, and what it
becomes. Each is tried with one shape of `checks.SHAPES`, or with one of `OTHER_CHECKS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model_worker.attention.cuda import CudaAttention
from tests.cuda import checks
from tests.cuda.host import HostLauncher

BARRIER = "__syncthreads();"
OTHER_CHECKS: dict[str, Callable[[HostLauncher], object]] = {
    "copies": checks.check_copy_shapes,
    "large offsets": lambda launcher: checks.check_large_offsets(CudaAttention(launcher)),
}


def run_check(name: str, launcher: HostLauncher) -> None:
    """The check called `name`, with `launcher`; raises when it fails."""
    if name in OTHER_CHECKS:
        OTHER_CHECKS[name](launcher)
    else:
        checks.check_attention(checks.SHAPES[name].draw(), CudaAttention(launcher))


@dataclass(frozen=True)
class Mutant:
    check: str
    text: str
    becomes: str = ""


def _without_barrier(check: str, context: str) -> Mutant:
    return Mutant(check, context, context.replace(BARRIER, ""))


MUTANTS = {
    # Barriers of paged_attention, from its begin to its end.
    "no barrier before the first copies": _without_barrier(
        "plain", f"{BARRIER}\n  pool.fetch(shared, span, span.begin_tile, true);"
    ),
    "no barrier after the keys are there": _without_barrier(
        "plain", f"{BARRIER}       // everyone's; and"
    ),
    "no barrier after the scores": _without_barrier("plain", f"{BARRIER}  // scores and rows"),
    "no barrier after the weights": _without_barrier(
        "plain", f"{BARRIER}       // everyone's, and the weights"
    ),
    "no barrier before the sums": _without_barrier("softcap", f"{BARRIER}  // the last tile"),
    "no barrier after the sums": _without_barrier(
        "plain", f"{BARRIER}\n\n  for (int i = threadIdx.x; i < present_heads"
    ),
    # Asynchronous copies.
    "keys not waited for": Mutant("plain", "wait_for_copies<2>();"),
    "keys waited for too late": Mutant("plain", "wait_for_copies<2>()", "wait_for_copies<3>()"),
    "values not waited for": Mutant("plain", "wait_for_copies<3>();"),
    "values waited for too late": Mutant("plain", "wait_for_copies<3>()", "wait_for_copies<4>()"),
    "a group left out": Mutant("plain", "commit_copies();\n  }\n};", "}\n};"),
    "a tile fetched beyond the end": Mutant(
        "plain", "if (tile < span.end_tile) {", "if (tile <= span.end_tile) {"
    ),
    "one buffer for all keys": Mutant("plain", "? shared.keys[tile & 1] :", "? shared.keys[0] :"),
    # Masks.
    "a token after the row is seen": Mutant("plain", "position < length;", "position <= length;"),
    "the row's own token is not seen": Mutant(
        "plain", "position < length;", "position < length - 1;"
    ),
    "a token before the window is seen": Mutant(
        "window", "row_length - window : 0", "row_length - window - 1 : 0"
    ),
    "the window's first token is not seen": Mutant(
        "window", "position >= first", "position > first"
    ),
    "b46: unused slots are read": Mutant("plain", "&& span.sees(position)) {", ") {"),
    "b46: scores are not masked": Mutant(
        "plain", "seen ? score : float_of_bits(0xff800000u)", "score"
    ),
    # Where things are.
    "strides of block and head swapped": Mutant(
        "plain", "block * block_stride + head_offset", "block * head_offset + block_stride"
    ),
    "a head's stride forgotten": Mutant("plain", "kv_head * head_stride,", "kv_head * 0,"),
    "a query head as far as a row": Mutant(
        "plain",
        "(first_head + head) * query_head_stride",
        "(first_head + head) * query_row_stride",
    ),
    "the table of another sequence": Mutant(
        "plain", "row_sequences[row] * table_stride", "row * table_stride"
    ),
    "a table as wide as it is used": Mutant("plain", "/ block_size];", "/ block_size + 1];"),
    "heads of a part beyond its group": Mutant(
        "parts", "group - part * HEADS < HEADS ? group - part * HEADS : HEADS", "HEADS"
    ),
    "b47: reads with 32-bit offsets": Mutant(
        "large offsets", "row = block * block_stride", "row = (int)(block * block_stride)"
    ),
    "b47: writes with 32-bit offsets": Mutant(
        "large offsets", "begin = block * block_stride", "begin = (int)(block * block_stride)"
    ),
    # Sums.
    "old sums not rescaled": Mutant("plain", "sums[head][i] *= shared.rescale[head];", ";"),
    "old weights not rescaled": Mutant("plain", "row_sum[i] * shrink", "row_sum[i]"),
    "a subset of the values lost": Mutant("plain", "s < SUBSETS; ++s", "s < SUBSETS - 1; ++s"),
    "a lane's share of the scores lost": Mutant(
        "plain", "step = TOKENS; step < LANES", "step = TOKENS; step < LANES / 2"
    ),
    "softcap left out": Mutant("softcap", "softcap > 0.0f) score", "softcap < 0.0f) score"),
    "softcap in base 2": Mutant("softcap", "softcap > 0.0f ? scale :", "softcap < 0.0f ? scale :"),
    "splits overlap": Mutant(
        "splits",
        "end_tile = begin_tile + tiles_per_split;",
        "end_tile = begin_tile + tiles_per_split + 1;",
    ),
    "splits weigh the same": Mutant(
        "splits",
        "partial_out[split * HEAD_DIM + at] * exp2f(stats[split].x - highest)",
        "partial_out[split * HEAD_DIM + at]",
    ),
    "the last split not merged": Mutant("splits", "num_tiles + tiles_per_split - 1", "num_tiles"),
    # write_kv and copy_blocks.
    "written one slot too far": Mutant(
        "plain", "slot * row_chunks * 16", "(slot + 1) * row_chunks * 16"
    ),
    "values written from the keys": Mutant(
        "plain", "value + token * value_token_stride", "key + token * value_token_stride"
    ),
    "block copy one piece too long": Mutant(
        "copies", "if (at < num_chunks) to[at]", "if (at <= num_chunks) to[at]"
    ),
    "block copy without its last slice": Mutant(
        "copies",
        "begin < num_chunks; begin += stride",
        "begin + STEP < num_chunks; begin += stride",
    ),
    "block sizes of the first pool": Mutant("copies", "block_bytes[blockIdx.y]", "block_bytes[0]"),
    "block copy with 16-bit offsets": Mutant(
        "copies",
        "source[blockIdx.x] * num_chunks",
        "(short)(source[blockIdx.x] * num_chunks * 4) / 4",
    ),
}
