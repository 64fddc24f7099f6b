"""Hugging Face's own continuous batching (`generate_batch`) on the same requests, f32.

One JSON line. It takes all prompts at once and is asked for the mean output length, since it
has one max_new_tokens for all.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from model_worker.source import resolve_model


def main(
    workload: Annotated[Path, typer.Option(help="JSON list of items")],
    model: Annotated[str, typer.Option()] = "",
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Serve the workload's first `concurrency` prompts at once."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    items = json.loads(workload.read_text())[:concurrency]
    num_output = round(sum(item["num_output_tokens"] for item in items) / len(items))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(resolve_model(model).path), dtype=torch.float32, attn_implementation="sdpa"
    )
    # eos -1 never comes, so that every request runs to its length, as on the other side.
    config = GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1)
    prompts = [item["prompt_token_ids"] for item in items]
    started = time.perf_counter()
    outputs = loaded.generate_batch(prompts, generation_config=config, warmup=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    assert num_tokens == num_output * len(prompts), (num_tokens, num_output, len(prompts))
    print(json.dumps({"tokens_per_s": num_tokens / seconds, "num_tokens": num_tokens}))


if __name__ == "__main__":
    typer.run(main)
