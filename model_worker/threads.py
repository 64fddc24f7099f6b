"""Where torch's threads are told how to wait. Imports nothing heavy: it must run first."""

from __future__ import annotations

import os

# OpenMP reads these once, when torch loads it. Its threads, left alone, spin for milliseconds
# after every parallel region, on cores that the other services need; here they spin just long
# enough to bridge the gap to the next operation of the same forward. Measured with
# SmolLM2-135M in float32 on two cores, 16 sequences at context 256: a forward takes 180 ms with
# no spinning, 103 ms with this and 112 ms with OpenMP's own; in 100 ms without work they burn
# 0.1, 3 and 7 ms of CPU. Kernels of our own have other threads: see native/tile_pool.h.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}


def place_threads() -> None:
    """Set how OpenMP threads wait, unless the environment says otherwise already."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
