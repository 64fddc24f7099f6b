"""Paged attention on a CUDA device against the bandwidth of a copy, by shape.

    python -m benchmarks.gpu

A decode step, bfloat16 KV in blocks of 16 scattered at random, beside torch's SDPA on contiguous
KV and, where it can be imported, FlashInfer on the same blocks. Each is captured in a CUDA graph
over as many layers as exceed the L2 cache several times, so what is timed is the device and not
the launching of kernels. The graphs are replayed in turn in every round; figures are medians. The
ceiling is a copy within the device, bytes read plus bytes written. Writes a CSV, and a roofline
plot where matplotlib can be imported; the last line is JSON.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from model_worker.attention import AttentionBatch, LayerKv, LayerSpec
from model_worker.attention.cuda import CudaAttention
from model_worker.errors import WorkerError

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
MIN_KV_BYTES = 2**28  # of all layers together
MAX_KV_BYTES = 2**33
COPY_BYTES = 2**31
console = Console(stderr=True)

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One decode step: a row for each of `batch` sequences of `context` tokens."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values that must be read, once each, in one layer."""
        row_bytes = self.num_kv_heads * self.head_dim * DTYPE.itemsize
        return 2 * self.batch * self.context * row_bytes

    @property
    def flops(self) -> int:
        """Of scores and weighted sums."""
        return 4 * self.batch * self.context * self.num_heads * self.head_dim

    @property
    def num_layers(self) -> int:
        return max(1, -(-MIN_KV_BYTES // self.kv_bytes))


@dataclass(frozen=True)
class Figure:
    """What one contender reached on one shape."""

    model: str
    batch: int
    context: int
    contender: str
    us_per_layer: float
    gb_per_s: float
    share_of_copy: float
    flops_per_byte: float


HEADS = {
    "SmolLM2-135M": (9, 3, 64),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B": (64, 8, 128),
    "Gemma-2-9B": (16, 8, 256),
}
SHAPES = [
    Shape(model, *heads, batch, context)
    for model, heads in HEADS.items()
    for batch in (1, 16, 128)
    for context in (512, 2048, 8192, 32768)
]


class Problem:
    """The tensors of a step over several layers, the same KV paged and contiguous."""

    def __init__(self, shape: Shape, num_layers: int, device: torch.device) -> None:
        draw = np.random.default_rng(0)
        self.shape = shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.spec = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5)
        per_sequence = -(-shape.context // BLOCK_SIZE)
        num_blocks = shape.batch * per_sequence
        self.tables = draw.permutation(num_blocks).reshape(shape.batch, -1).astype(np.int32)
        last = self.tables[:, -1].astype(np.int64)
        self.batch = AttentionBatch(
            query_starts=np.arange(shape.batch + 1, dtype=np.int32),
            context_lens=np.full(shape.batch, shape.context, np.int32),
            block_tables=self.tables,
            slot_mapping=last * BLOCK_SIZE + (shape.context - 1) % BLOCK_SIZE,
        )

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=DTYPE, device=device)

        pool = (num_blocks, kv_heads, BLOCK_SIZE, dim)
        self.layers = [LayerKv(self.spec, random(*pool), random(*pool)) for _ in range(num_layers)]
        self.query = random(shape.batch, heads, dim)
        self.key, self.value = (random(shape.batch, kv_heads, dim) for _ in "kv")

    def paged(self, backend: CudaAttention) -> Step:
        """Octavo: writes the step's keys and values and attends."""
        backend.check(self.spec, BLOCK_SIZE, DTYPE)
        plan = backend.plan(self.batch, BLOCK_SIZE, self.query.device)

        def step() -> torch.Tensor:
            outs = [
                backend.forward(layer, self.query, self.key, self.value, plan)
                for layer in self.layers
            ]
            return outs[0]

        return step

    def sdpa(self) -> Step:
        """torch on contiguous KV; as many layers, of a copy of what the blocks hold now."""
        order = torch.from_numpy(self.tables.astype(np.int64)).to(self.query.device)
        contiguous = [
            (self._contiguous(layer.keys, order), self._contiguous(layer.values, order))
            for layer in self.layers
        ]
        query = self.query[:, :, None]

        def step() -> torch.Tensor:
            outs = [
                torch.nn.functional.scaled_dot_product_attention(
                    query, keys, values, scale=self.spec.scaling, enable_gqa=True
                )
                for keys, values in contiguous
            ]
            return outs[0][:, :, 0]

        return step

    def flashinfer(self) -> Step:
        """FlashInfer on the same blocks, which have its layout "HND"."""
        import flashinfer  # pyright: ignore[reportMissingImports]

        device, (batch, per_sequence) = self.query.device, self.tables.shape
        workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        lengths = torch.arange(batch + 1, dtype=torch.int32) * per_sequence
        last = torch.full((batch,), (self.shape.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
        wrapper.plan(
            lengths.to(device),
            torch.from_numpy(self.tables.reshape(-1)).to(device),
            last.to(device),
            self.spec.num_heads,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            BLOCK_SIZE,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

        def step() -> torch.Tensor:
            outs = [wrapper.run(self.query, (layer.keys, layer.values)) for layer in self.layers]
            return outs[0]

        return step

    def _contiguous(self, pool: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """[batch, num_kv_heads, context, head_dim]"""
        blocks = pool[order].transpose(1, 2)
        rows = blocks.reshape(len(order), self.spec.num_kv_heads, -1, self.spec.head_dim)
        return rows[:, :, : self.shape.context].contiguous()


def captured(step: Step) -> Callable[[], None]:
    """`step` as one replay of a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(work: Callable[[], object]) -> float:
    """Between two events on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_bytes_per_s(rounds: int) -> float:
    """Of a copy within the device, bytes read plus bytes written."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    times = [seconds(lambda: destination.copy_(source)) for _ in range(rounds + 3)]
    return 2 * COPY_BYTES / statistics.median(times[3:])


def measure(shape: Shape, backend: CudaAttention, ceiling: float, rounds: int) -> Iterable[Figure]:
    """Each contender's figure; their outputs are compared first."""
    problem = Problem(shape, shape.num_layers, torch.device("cuda"))
    steps = {"octavo": problem.paged(backend)}
    expected = steps["octavo"]()  # writes the newest token, which the others find there
    steps["sdpa"] = problem.sdpa()
    if importlib.util.find_spec("flashinfer"):
        steps["flashinfer"] = problem.flashinfer()
    for step in steps.values():
        torch.testing.assert_close(step(), expected, rtol=2e-2, atol=2e-3)
    replays = {name: captured(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for index in range(rounds + 2):
        for name, replay in replays.items():
            elapsed = seconds(replay)
            if index >= 2:
                times[name].append(elapsed)
    for name, elapsed in times.items():
        per_layer = statistics.median(elapsed) / shape.num_layers
        rate = shape.kv_bytes / per_layer
        yield Figure(
            shape.model,
            shape.batch,
            shape.context,
            name,
            us_per_layer=per_layer * 1e6,
            gb_per_s=rate / 1e9,
            share_of_copy=rate / ceiling,
            flops_per_byte=shape.flops / shape.kv_bytes,
        )


def write_csv(figures: list[Figure], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(figures[0])))
        writer.writeheader()
        writer.writerows(asdict(figure) for figure in figures)


def plot(figures: list[Figure], ceiling: float, path: Path) -> bool:
    """Arithmetic rate over intensity, below the line the copy's bandwidth draws. False without
    matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]

    canvas = Canvas(figsize=(7, 5))
    axes: Any = canvas.subplots()
    intensities = np.geomspace(0.5, 64, 50)
    axes.loglog(intensities, intensities * ceiling / 1e12, "k-", label="copy bandwidth")
    for name in dict.fromkeys(figure.contender for figure in figures):
        mine = [figure for figure in figures if figure.contender == name]
        rates = [figure.flops_per_byte * figure.gb_per_s / 1e3 for figure in mine]
        axes.loglog([figure.flops_per_byte for figure in mine], rates, ".", label=name)
    axes.set(xlabel="FLOP per byte of KV", ylabel="TFLOP/s", title=torch.cuda.get_device_name())
    axes.legend()
    canvas.savefig(path, dpi=150)
    return True


def main(
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot.")] = Path("build/gpu"),
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    model: Annotated[str, typer.Option(help="Of one model only.")] = "",
) -> None:
    """Measure every shape whose KV fits."""
    try:
        backend = CudaAttention()
    except WorkerError as error:
        raise typer.BadParameter(str(error)) from None
    ceiling = copy_bytes_per_s(rounds)
    console.print(f"{torch.cuda.get_device_name()}: a copy moves {ceiling / 1e9:.0f} GB/s")
    table = Table("model", "batch", "context", "contender", "µs/layer", "GB/s", "÷ copy")
    figures: list[Figure] = []
    # The contiguous copy and its making take as much again, and half of that.
    max_kv_bytes = min(MAX_KV_BYTES, torch.cuda.mem_get_info()[0] // 3)
    for shape in SHAPES:
        if shape.kv_bytes > max_kv_bytes or (model and shape.model != model):
            continue
        for figure in measure(shape, backend, ceiling, rounds):
            figures.append(figure)
            rates = (figure.us_per_layer, figure.gb_per_s, figure.share_of_copy)
            table.add_row(
                figure.model,
                *map(str, (figure.batch, figure.context)),
                figure.contender,
                *(f"{rate:.2f}" for rate in rates),
            )
        torch.cuda.empty_cache()
    if not figures:
        raise typer.BadParameter(f"--model {model}: there are only {', '.join(HEADS)}")
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(figures, out / "attention.csv")
    plotted = plot(figures, ceiling, out / "roofline.png")
    print(json.dumps(summary(figures, ceiling) | {"plotted": plotted}))


def summary(figures: list[Figure], ceiling: float) -> dict[str, object]:
    """Medians over the shapes of each contender."""
    result: dict[str, object] = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "copy_gb_per_s": round(ceiling / 1e9, 1),
    }
    for name in dict.fromkeys(figure.contender for figure in figures):
        shares = [figure.share_of_copy for figure in figures if figure.contender == name]
        result[f"{name}_share_of_copy"] = round(statistics.median(shares), 3)
    return result


if __name__ == "__main__":
    typer.run(main)
