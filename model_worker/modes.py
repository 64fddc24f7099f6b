"""Which attention backend runs, and whether a token's logits depend on the batch it comes in.

In batch-invariant mode a request's logits have the same bits alone, in any batch, with any
chunking and after being recomputed. It takes a kernel for every operation that reduces, whose
order does not depend on the number of rows: the `cpu` attention backend and the modules of
`model_worker.native_modules`. Both are also faster than what they replace, so both are the
default where they work.
"""

from __future__ import annotations

import structlog
import torch

from model_worker.attention import AttentionBackend, create_backend
from model_worker.errors import (
    NativeBuildError,
    NotInvariantError,
    UnsupportedModelError,
    WorkerError,
)
from model_worker.forward import PagedForward
from model_worker.loader import LoadedModel
from model_worker.options import WorkerOptions
from model_worker.self_check import check_invariance, check_logits, eager_logits

log = structlog.get_logger()

AUTO = "auto"
SWITCH = (AUTO, "on", "off")


def choose_backend(options: WorkerOptions) -> AttentionBackend:
    """The backend to try first. Raises WorkerError when it is not to be had."""
    if options.batch_invariant not in SWITCH:
        raise WorkerError(
            f"--batch-invariant {options.batch_invariant}: there are only {', '.join(SWITCH)}"
        )
    if options.batch_invariant == "on" and options.attention not in (AUTO, "cpu"):
        raise NotInvariantError(
            f"--batch-invariant on needs --attention cpu: with {options.attention} a sum's order,"
            " and so its rounding, depends on the batch"
        )
    if options.attention != AUTO:
        return create_backend(options.attention)
    try:
        return create_backend("cpu")
    except NativeBuildError as error:
        if options.batch_invariant == "on":
            raise
        log.warning("attention in plain torch, which is slower", why=str(error))
        return create_backend("reference")


def make_forward(
    options: WorkerOptions, loaded: LoadedModel, backend: AttentionBackend
) -> PagedForward:
    """The forward of `loaded`, checked; takes the modules of `loaded` over. Raises WorkerError."""
    backend = _fitting(options, loaded, backend)
    why_not = _why_not_invariant(options, loaded, backend)
    if why_not and options.batch_invariant == "on":
        raise NotInvariantError(f"--batch-invariant on: {why_not}")
    eager = eager_logits(loaded)
    if why_not is None:
        _install(loaded)
    forward = PagedForward(loaded, backend)
    check_logits(eager, forward, options.block_size)
    if why_not is None:
        why_not = _check(options, forward)
    forward.is_batch_invariant = why_not is None
    log.info("batch-invariant" if why_not is None else "not batch-invariant", why_not=why_not)
    return forward


def _fitting(
    options: WorkerOptions, loaded: LoadedModel, backend: AttentionBackend
) -> AttentionBackend:
    """`backend`, or reference where it was not asked for by name and cannot do this model."""
    try:
        for spec in loaded.layer_specs:
            backend.check(spec, options.block_size, loaded.dtype)
    except UnsupportedModelError as error:
        if options.attention != AUTO or options.batch_invariant == "on":
            raise
        log.warning("attention in plain torch, which is slower", why=str(error))
        return create_backend("reference")
    return backend


def _why_not_invariant(
    options: WorkerOptions, loaded: LoadedModel, backend: AttentionBackend
) -> str | None:
    """What is known to stand in the way before anything is replaced; None: nothing."""
    from model_worker.native_modules import unreplaced_products

    if options.batch_invariant == "off":
        return "--batch-invariant off"
    if backend.name != "cpu":
        return f"attention is {backend.name}"
    products = unreplaced_products(loaded.model)
    if products:
        return (
            f"{len(products)} matrix products of {type(loaded.model).__name__} are not those of"
            f" linear layers, the first {products[0]}"
        )
    return None


def _install(loaded: LoadedModel) -> None:
    from model_worker.native_modules import install

    with torch.inference_mode():
        install(loaded.model)


def _check(options: WorkerOptions, forward: PagedForward) -> str | None:
    try:
        check_invariance(forward, options.block_size)
    except NotInvariantError as error:
        if options.batch_invariant == "on":
            raise
        return str(error)
    return None
