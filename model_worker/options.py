"""What a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is started with.

    model: empty for the demo model, a folder, or a hub id. kv_memory: like "2GiB"; empty: chosen
    from the memory at hand. num_blocks: exactly so many, whatever kv_memory says. swap_space and
    num_host_blocks: likewise, of the host tier; "0": there is none.
    max_model_len: in tokens; None: the model's own. threads: None: one per core. attention and
    batch_invariant "auto": `cpu` and on where they work, see `model_worker.modes`.
    """

    model: str = ""
    dtype: str = "float32"
    attention: str = "auto"
    batch_invariant: str = "auto"
    kv_memory: str = ""
    num_blocks: int | None = None
    swap_space: str = ""
    num_host_blocks: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    threads: int | None = None
