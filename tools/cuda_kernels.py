"""Compile the CUDA kernels without a GPU, and keep the table of what they use.

    python tools/cuda_kernels.py            write the table into cuda/README.md
    python tools/cuda_kernels.py --check    say whether it is what the kernels compile to
    python tools/cuda_kernels.py --all      compile every variant, and refuse spills

NVRTC comes from the wheel `nvidia-cuda-nvrtc`; no header, driver or toolkit is needed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model_worker.attention.cuda_kernels import (  # noqa: E402
    COPY_BLOCKS,
    ELEMENTS,
    HEAD_DIMS,
    MAX_HEADS,
    THREADS,
    WRITE_KV,
    Kernel,
    attention_kernels,
    source_text,
)

README = ROOT / "cuda" / "README.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
WHEEL = "nvidia-cuda-nvrtc"
# Bytes of shared memory of a multiprocessor.
SHARED_BYTES = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
ARCHITECTURES = tuple(SHARED_BYTES)
# The same everywhere: registers of a multiprocessor; shared memory the system takes of each
# thread block.
NUM_REGISTERS = 64 * 1024
SYSTEM_SHARED_BYTES = 1024
# SmolLM2-135M; Llama 3 8B; Qwen 3 and Llama 3 70B; Gemma 2.
COMMON = (
    (torch.bfloat16, 64, 3),
    (torch.bfloat16, 128, 4),
    (torch.bfloat16, 128, 8),
    (torch.bfloat16, 256, 2),
)

_USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel: registers of a thread, bytes spilled to local memory."""

    registers: int
    spilled_bytes: int


class CompileError(Exception):
    """NVRTC refused a source; holds its log."""


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC out of its wheel. It finds its builtins only when they are loaded already."""
    files = importlib.metadata.distribution(WHEEL).files or []
    libraries = {p.name.split(".")[0]: p.locate() for p in files if ".so" in p.name}
    ctypes.CDLL(str(libraries["libnvrtc-builtins"]), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(libraries["libnvrtc"]))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    result = getattr(nvrtc(), name)(*arguments)
    if result:
        raise CompileError(f"{name}: {nvrtc().nvrtcGetErrorString(result).decode()}")


def _text(name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{name}", program, text)
    return text.raw


def compile_source(
    source: str, name: str, options: Sequence[str], architecture: str
) -> tuple[bytes, str]:
    """(cubin, log) of `source`. Raises CompileError with the log."""
    program = ctypes.c_void_p()
    _call(
        "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    flags = (
        f"--gpu-architecture={architecture}",
        *("--std=c++17", "--ptxas-options=-v"),
        *options,
    )
    encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    try:
        failed = nvrtc().nvrtcCompileProgram(program, len(flags), encoded)
        log = _text("ProgramLog", program).rstrip(b"\0").decode()
        if failed:
            raise CompileError(f"{name} {' '.join(options)} for {architecture}:\n{log}")
        return _text("CUBIN", program), log
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def parse_usage(log: str) -> dict[str, Usage]:
    """By function, out of ptxas' log."""
    return {
        name: Usage(int(registers), int(stores) + int(loads))
        for name, stores, loads, registers in _USAGE.findall(log)
    }


def usage_of(kernel: Kernel, architecture: str) -> dict[str, Usage]:
    """Compile the file of `kernel` in its variant: what each function in it uses."""
    source = source_text(kernel.source)
    return parse_usage(compile_source(source, kernel.source, kernel.options, architecture)[1])


def all_variants() -> list[Kernel]:
    """Every kernel that can be asked for, one per file and variant."""
    attention = [
        attention_kernels(dtype, head_dim, heads).attention
        for dtype, head_dim, heads in itertools.product(
            ELEMENTS, HEAD_DIMS, range(1, MAX_HEADS + 1)
        )
    ]
    return [WRITE_KV, COPY_BLOCKS, *attention]


def table_variants() -> list[Kernel]:
    """Those of the table: common models' first, then every head size, the types and the group
    sizes 1, 3, 4 and 8 in turn."""
    others = zip(HEAD_DIMS, itertools.cycle(ELEMENTS), itertools.cycle((1, 3, 4, 8)), strict=False)
    wanted = [*COMMON, *((dtype, head_dim, group) for head_dim, dtype, group in others)]
    return [WRITE_KV, COPY_BLOCKS, *(attention_kernels(*each).attention for each in wanted)]


def compile_all(kernels: Iterable[Kernel]) -> dict[Kernel, dict[str, dict[str, Usage]]]:
    """Usage by kernel, architecture and function; two compilations at a time."""
    work = list(itertools.product(kernels, ARCHITECTURES))
    with ThreadPoolExecutor(2) as pool:
        usages = list(pool.map(lambda pair: usage_of(*pair), work))
    result: dict[Kernel, dict[str, dict[str, Usage]]] = {}
    for (kernel, architecture), usage in zip(work, usages, strict=True):
        assert kernel.name in usage, f"ptxas says nothing of {kernel.name}"
        result.setdefault(kernel, {})[architecture] = usage
    return result


def spilling(compiled: dict[Kernel, dict[str, dict[str, Usage]]]) -> list[str]:
    """A line for each function that spills registers."""
    return [
        f"{name} {' '.join(kernel.options)} spills {usage.spilled_bytes} bytes for {architecture}"
        for kernel, by_architecture in compiled.items()
        for architecture, by_name in by_architecture.items()
        for name, usage in by_name.items()
        if usage.spilled_bytes
    ]


def in_flight_bytes(kernel: Kernel, architecture: str, usage: Usage) -> int:
    """KV that the thread blocks of a full multiprocessor have on its way at any time.

    Three of the four buffers of each, of which keys and values have two.
    """
    registers = -(-usage.registers // 8) * 8 * THREADS
    resident = min(
        SHARED_BYTES[architecture] // (kernel.shared_bytes + SYSTEM_SHARED_BYTES),
        NUM_REGISTERS // registers,
    )
    defines = dict(kernel.defines)
    dtype = next(d for d, name in ELEMENTS.items() if name == defines["ELEMENT"])
    head_dim = int(defines["HEAD_DIM"])
    tile = attention_kernels(dtype, head_dim, int(defines["HEADS"])).tile
    return 3 * tile * head_dim * dtype.itemsize * resident


def table(compiled: dict[Kernel, dict[str, dict[str, Usage]]]) -> str:
    """The table of the README, in Markdown."""
    lines = [
        "| kernel | type | head size | query heads | shared memory, bytes | "
        + " | ".join(f"registers, {architecture}" for architecture in ARCHITECTURES)
        + " | spilled, bytes | "
        + " | ".join(f"in flight, KiB, {architecture}" for architecture in ARCHITECTURES)
        + " |",
        "|" + "---|" * (6 + 2 * len(ARCHITECTURES)),
    ]
    for kernel, by_architecture in compiled.items():
        defines = dict(kernel.defines)
        usages = [by_architecture[a][kernel.name] for a in ARCHITECTURES]
        cells = (
            f"`{kernel.name}`",
            *(defines.get(name, "any") for name in ("ELEMENT", "HEAD_DIM", "HEADS")),
            *(kernel.shared_bytes, *(usage.registers for usage in usages)),
            sum(usage.spilled_bytes for usage in usages),
        )
        if kernel.defines:
            in_flight = (
                in_flight_bytes(kernel, architecture, usage) // 1024
                for architecture, usage in zip(ARCHITECTURES, usages, strict=True)
            )
            cells = (*cells, *in_flight)
        else:
            cells = (*cells, *("" for _ in ARCHITECTURES))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def updated_readme(compiled: dict[Kernel, dict[str, dict[str, Usage]]]) -> str:
    """cuda/README.md with the table as compiled."""
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table(compiled) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    compiled = compile_all(all_variants() if arguments.all else table_variants())
    spills = spilling(compiled)
    if spills:
        sys.exit("\n".join(spills))
    if arguments.all:
        print(f"{len(compiled)} variants for {' and '.join(ARCHITECTURES)}, no spills")
    elif not arguments.check:
        README.write_text(updated_readme(compiled))
    elif README.read_text() != updated_readme(compiled):
        sys.exit("cuda/README.md: the table is not what the kernels compile to: make kernels")


if __name__ == "__main__":
    main()
