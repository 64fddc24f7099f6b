"""Kernels on the CPU: built by GCC behind cuda/host/emulator.h."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import platformdirs

from model_worker.attention.cuda_kernels import (
    SOURCES,
    THREADS,
    Argument,
    Grid,
    Kernel,
    source_text,
)

EMULATOR = SOURCES / "host" / "emulator.h"
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)
SANITIZERS = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
BUILD_TIMEOUT_S = 120


class _Launch(ctypes.Structure):
    """`emulator::Launch`, field by field."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint32 * 3),
        ("num_threads", ctypes.c_uint32),
        ("num_arguments", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint64)),
    ]


class EmulationError(Exception):
    """The emulator noticed a mistake in a kernel."""


class HostLauncher:
    """A `Launcher` on the CPU. Pointers are those of CPU tensors.

    seed: of the order in which threads run. num_resident: thread blocks that the device is to
    hold, on which the number of splits depends. edit: applied to every source before it is built.
    """

    device_type = "cpu"

    def __init__(
        self,
        seed: int = 2,
        num_resident: int = 1,
        edit: Callable[[str], str] = lambda source: source,
        extra_flags: tuple[str, ...] = (),
    ) -> None:
        self.seed, self.num_resident = seed, num_resident
        self._edit, self._flags = edit, (*FLAGS, *extra_flags)
        self._functions: dict[Kernel, Any] = {}
        self.launched: list[str] = []

    def prepare(self, kernel: Kernel) -> int:
        if kernel not in self._functions:
            source = self._edit(source_text(kernel.source))
            library = ctypes.CDLL(str(build(source, (*self._flags, *kernel.options))))
            function = getattr(library, f"launch_{kernel.name}")
            function.restype = ctypes.c_char_p
            self._functions[kernel] = function
        return self.num_resident

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Argument]) -> None:
        self.launched.append(kernel.name)
        values = [np.int64(a) if isinstance(a, int) else a for a in arguments]
        held = [np.array([value]) for value in values]
        what = _Launch(
            grid,
            THREADS,
            len(held),
            kernel.shared_bytes,
            self.seed,
            (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held)),
            (ctypes.c_uint64 * len(held))(*(value.itemsize for value in held)),
        )
        error = self._functions[kernel](ctypes.byref(what))
        if error is not None:
            raise EmulationError(f"{kernel.name}: {error.decode()}")


def build(source: str, flags: tuple[str, ...]) -> Path:
    """The library of `source`, from the user's cache when the same text was built before."""
    compiler = shutil.which("g++")
    assert compiler is not None, "the CUDA kernels are checked through g++, which is not there"
    key = hashlib.blake2b(digest_size=12)
    for part in (source, EMULATOR.read_text(), compiler, *flags):
        key.update(part.encode() + b"\0")
    root = os.environ.get("OCTAVO_CACHE") or platformdirs.user_cache_dir("octavo")
    path = Path(root) / "cuda-host" / f"{key.hexdigest()}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            command = [compiler, *flags, "-include", str(EMULATOR), "-x", "c++", "-"]
            done = subprocess.run(
                [*command, "-o", str(built)],
                input=source,
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            built.replace(path)
    return path
