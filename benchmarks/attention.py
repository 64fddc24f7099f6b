"""CPU paged attention against memory bandwidth, and against contiguous KV.

    python -m benchmarks.attention

Decode of 16 sequences, 9/3 heads of 64, over enough layers that the pool fits no cache. The
three things compared run in turn in every round; ratios are medians over rounds. The limit is
the time to read the same KV bytes once at the bandwidth that the same threads reach on a plain
sum. The last line is JSON: `cpu_vs_bandwidth_*` and `vs_contiguous` are time ratios, 1 is the
limit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from model_worker.attention import (
    AttentionBackend,
    AttentionBatch,
    LayerKv,
    LayerSpec,
    create_backend,
)

BATCH = 16
SPEC = LayerSpec(9, 3, 64, 64, 64**-0.5)
BANDWIDTH_BYTES = 2**29
POOL_BYTES = 3 * 2**29
console = Console(stderr=True)


def problem(
    context: int, block_size: int, num_layers: int, dtype: torch.dtype
) -> tuple[list[LayerKv], AttentionBatch]:
    """A decode step at `context`: pools of random blocks, tables scattered over them."""
    draw = np.random.default_rng(0)
    per_sequence = -(-context // block_size)
    num_blocks = BATCH * per_sequence
    shape = (num_blocks, SPEC.num_kv_heads, block_size, SPEC.head_dim)
    layers = [
        LayerKv(SPEC, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
        for _ in range(num_layers)
    ]
    tables = draw.permutation(num_blocks).reshape(BATCH, per_sequence).astype(np.int32)
    last = tables[:, (context - 1) // block_size].astype(np.int64)
    batch = AttentionBatch(
        query_starts=np.arange(BATCH + 1, dtype=np.int32),
        context_lens=np.full(BATCH, context, np.int32),
        block_tables=tables,
        slot_mapping=last * block_size + (context - 1) % block_size,
    )
    return layers, batch


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def stepper(
    backend: AttentionBackend, layers: list[LayerKv], batch: AttentionBatch
) -> Callable[[], None]:
    """One decode step over all layers."""
    block_size, dtype = layers[0].keys.shape[2], layers[0].keys.dtype
    plan = backend.plan(batch, block_size, torch.device("cpu"))
    query = torch.randn(BATCH, SPEC.num_heads, SPEC.head_dim).to(dtype)
    key, value = (torch.randn(BATCH, SPEC.num_kv_heads, SPEC.head_dim).to(dtype) for _ in "kv")

    def step() -> None:
        for layer in layers:
            backend.forward(layer, query, key, value, plan)

    return step


def measure(context: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of each, medians over rounds, and the ratios."""
    backend = create_backend("cpu")
    kv_bytes = 2 * BATCH * context * SPEC.num_kv_heads * SPEC.head_dim * dtype.itemsize
    num_layers = max(1, min(30, POOL_BYTES // 2 // kv_bytes))
    paged = stepper(backend, *problem(context, 16, num_layers, dtype))
    contiguous = stepper(backend, *problem(context, context, num_layers, dtype))
    plain = torch.ones(BANDWIDTH_BYTES // 4)
    times: dict[str, list[float]] = {"read": [], "paged": [], "contiguous": []}
    work = {"read": plain.sum, "paged": paged, "contiguous": contiguous}
    for index in range(rounds + 1):
        for name, run in work.items():
            seconds = timed(run)
            if index:  # the first round warms up
                times[name].append(seconds)
    total_bytes = kv_bytes * num_layers
    limits = [t * total_bytes / BANDWIDTH_BYTES for t in times["read"]]
    return {
        "paged_ms_per_layer": statistics.median(times["paged"]) / num_layers * 1e3,
        "limit_ms_per_layer": statistics.median(limits) / num_layers * 1e3,
        "bandwidth_gb_s": BANDWIDTH_BYTES / statistics.median(times["read"]) / 1e9,
        "vs_bandwidth": statistics.median(
            paged / limit for paged, limit in zip(times["paged"], limits, strict=True)
        ),
        "vs_contiguous": statistics.median(
            paged / other for paged, other in zip(times["paged"], times["contiguous"], strict=True)
        ),
    }


def main(rounds: Annotated[int, typer.Option(min=1)] = 15) -> None:
    """Measure at contexts of 512 and 2048 tokens, float32 and bfloat16 KV."""
    result: dict[str, object] = {"benchmark": "attention", "threads": torch.get_num_threads()}
    table = Table("KV", "context", "ms/layer", "limit", "÷ limit", "÷ contiguous", "GB/s read")
    contiguous = []
    for dtype in (torch.float32, torch.bfloat16):
        for context in (512, 2048):
            figures = measure(context, dtype, rounds)
            name = str(dtype).removeprefix("torch.")
            table.add_row(name, str(context), *(f"{value:.3f}" for value in _row(figures)))
            suffix = "" if dtype is torch.float32 else "_bf16"
            result[f"cpu_vs_bandwidth_{context}{suffix}"] = round(figures["vs_bandwidth"], 3)
            contiguous.append(figures["vs_contiguous"])
    console.print(table)
    result["vs_contiguous"] = round(statistics.median(contiguous), 3)
    print(json.dumps(result))


def _row(figures: dict[str, float]) -> list[float]:
    names = ("paged_ms_per_layer", "limit_ms_per_layer", "vs_bandwidth", "vs_contiguous")
    return [figures[name] for name in (*names, "bandwidth_gb_s")]


if __name__ == "__main__":
    typer.run(main)
