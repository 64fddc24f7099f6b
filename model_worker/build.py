"""Putting a model runner together from options: the server and in-process benchmarks both do."""

from __future__ import annotations

import os

import psutil
import structlog
import torch

from model_worker.errors import ModelError, WorkerError
from model_worker.host_tensors import choose_num_host_blocks
from model_worker.input_batch import InputBatch, Limits
from model_worker.kv_tensors import (
    KvTensors,
    bytes_per_block,
    choose_num_blocks,
    parse_bytes,
)
from model_worker.loader import DTYPES, LoadedModel, load_model
from model_worker.modes import choose_backend, make_forward
from model_worker.options import WorkerOptions
from model_worker.rates import measure_rates
from model_worker.runner import ModelRunner
from model_worker.source import resolve_model

log = structlog.get_logger()


def build_runner(options: WorkerOptions) -> ModelRunner:
    """Load the model, make the KV pool, check both with a tiny forward. Raises WorkerError."""
    _check_counts(options)
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    if options.dtype not in DTYPES:
        raise ModelError(f"--dtype {options.dtype}: there are only {', '.join(DTYPES)}")
    backend = choose_backend(options)
    loaded = load_model(
        resolve_model(options.model),
        dtype=DTYPES[options.dtype],
        device=backend.device,
        max_model_len=options.max_model_len,
    )
    forward = make_forward(options, loaded, backend)
    backend = forward.backend
    num_blocks = _num_blocks(options, loaded)
    num_host_blocks = _num_host_blocks(options, loaded, num_blocks)
    limits = Limits(
        num_blocks=num_blocks,
        block_size=options.block_size,
        num_token_ids=loaded.num_embeddings,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        num_host_blocks=num_host_blocks,
    )
    kv = KvTensors(
        loaded.layer_specs,
        num_blocks,
        options.block_size,
        loaded.dtype,
        loaded.device,
        backend.block_copier,
        num_host_blocks=num_host_blocks,
    )
    rates = measure_rates(forward, kv, limits)
    log.info(
        "model loaded",
        model=loaded.source.name,
        dtype=options.dtype,
        attention=backend.name,
        batch_invariant=forward.is_batch_invariant,
        num_blocks=num_blocks,
        kv_mib=num_blocks * kv.bytes_per_block // 2**20,
        num_host_blocks=num_host_blocks,
        swap_space_mib=num_host_blocks * kv.bytes_per_block // 2**20,
        prefill_tokens_per_s=round(rates.prefill_tokens_per_s),
        swap_mib_per_s=round(rates.swap_bytes_per_s / 2**20),
        threads=torch.get_num_threads(),
    )
    return ModelRunner(forward, kv, InputBatch(limits), rates)


def _check_counts(options: WorkerOptions) -> None:
    for name in ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise WorkerError(f"--{name.replace('_', '-')} {value} is below 1")
    if options.num_host_blocks is not None and options.num_host_blocks < 0:
        raise WorkerError(f"--num-host-blocks {options.num_host_blocks} is below 0")


def _num_blocks(options: WorkerOptions, loaded: LoadedModel) -> int:
    if options.num_blocks is not None:
        return options.num_blocks
    return choose_num_blocks(
        block_bytes=bytes_per_block(loaded.layer_specs, options.block_size, loaded.dtype),
        block_size=options.block_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=options.max_num_seqs,
        available_bytes=_available_bytes(loaded.device),
        kv_memory_bytes=parse_bytes(options.kv_memory) if options.kv_memory else None,
    )


def _num_host_blocks(options: WorkerOptions, loaded: LoadedModel, num_blocks: int) -> int:
    if options.num_host_blocks is not None:
        return options.num_host_blocks
    block_bytes = bytes_per_block(loaded.layer_specs, options.block_size, loaded.dtype)
    available_bytes = psutil.virtual_memory().available
    if loaded.device.type == "cpu":
        available_bytes -= num_blocks * block_bytes  # the pool's, once it is full
    return choose_num_host_blocks(
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        available_bytes=available_bytes,
        swap_space_bytes=parse_bytes(options.swap_space) if options.swap_space else None,
    )


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
