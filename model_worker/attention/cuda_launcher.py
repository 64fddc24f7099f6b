"""Kernels on a CUDA device, compiled by NVRTC through CuPy, on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_worker.attention.cuda_kernels import THREADS, Argument, Grid, Kernel, source_text
from model_worker.errors import WorkerError

MIN_COMPUTE_CAPABILITY = (8, 0)  # cp.async


class CupyLauncher:
    """A `Launcher` for torch's current CUDA device."""

    device_type = "cuda"

    def __init__(self) -> None:
        """Raises WorkerError that says what is missing."""
        try:
            import cupy  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise WorkerError(
                "--attention cuda needs CuPy: install octavo[cuda12] or octavo[cuda13]"
            ) from error
        if not torch.cuda.is_available():
            raise WorkerError("--attention cuda needs a CUDA device and a torch built for CUDA")
        capability = torch.cuda.get_device_capability()
        if capability < MIN_COMPUTE_CAPABILITY:
            raise WorkerError(
                f"--attention cuda needs compute capability {MIN_COMPUTE_CAPABILITY} or higher;"
                f" {torch.cuda.get_device_name()} has {capability}"
            )
        self._cupy = cupy
        # CuPy has a current device of its own.
        cupy.cuda.Device(torch.cuda.current_device()).use()
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._functions: dict[Kernel, Any] = {}

    def prepare(self, kernel: Kernel) -> int:
        if kernel not in self._functions:
            self._functions[kernel] = self._load(kernel)
        per_multiprocessor = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self._functions[kernel].kernel.ptr, THREADS, kernel.shared_bytes
        )
        assert per_multiprocessor > 0, f"{kernel} does not fit a multiprocessor"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return per_multiprocessor * properties.multi_processor_count

    def launch(self, kernel: Kernel, grid: Grid, arguments: Sequence[Argument]) -> None:
        # An empty grid is an error to the driver.
        if 0 in grid:
            return
        values = tuple(np.int64(a) if isinstance(a, int) else a for a in arguments)
        with self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            self._functions[kernel](grid, (THREADS, 1, 1), values, shared_mem=kernel.shared_bytes)

    def _load(self, kernel: Kernel) -> Any:
        key = (kernel.source, kernel.options)
        if key not in self._modules:
            options = ("--std=c++17", *kernel.options)
            self._modules[key] = self._cupy.RawModule(
                code=source_text(kernel.source), options=options, backend="nvrtc"
            )
        function = self._modules[key].get_function(kernel.name)
        limit = torch.cuda.get_device_properties(
            torch.cuda.current_device()
        ).shared_memory_per_block_optin
        if kernel.shared_bytes > limit:
            raise WorkerError(
                f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory; this device"
                f" gives a thread block {limit}"
            )
        function.max_dynamic_shared_size_bytes = kernel.shared_bytes
        return function
