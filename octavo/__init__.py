"""Octavo: PagedAttention serving, split into services. This package is the client SDK.

    from octavo import Client, SamplingParams

    with Client("unix:/run/octavo/scheduler.sock") as client:
        print(client.generate("The capital of France is", SamplingParams(max_tokens=8)).text)

The names below are the public ones; they load on first use, since the services import
`octavo.v1` and `octavo.service` from here and need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.client import AsyncClient, Client
    from octavo.errors import (
        AlreadyExistsError,
        DeadlineExceededError,
        InvalidArgumentError,
        NotFoundError,
        OctavoError,
        OverloadedError,
        RpcError,
        UnauthenticatedError,
        UnavailableError,
    )
    from octavo.types import (
        Candidate,
        CandidateChunk,
        Chunk,
        FinishReason,
        Generation,
        Health,
        Message,
        ModelDescription,
        PoolGeometry,
        RequestSummary,
        SamplingParams,
    )

_HOME = {
    "AsyncClient": "octavo.client",
    "Client": "octavo.client",
    "AlreadyExistsError": "octavo.errors",
    "DeadlineExceededError": "octavo.errors",
    "InvalidArgumentError": "octavo.errors",
    "NotFoundError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "OverloadedError": "octavo.errors",
    "RpcError": "octavo.errors",
    "UnauthenticatedError": "octavo.errors",
    "UnavailableError": "octavo.errors",
    "Candidate": "octavo.types",
    "CandidateChunk": "octavo.types",
    "Chunk": "octavo.types",
    "FinishReason": "octavo.types",
    "Generation": "octavo.types",
    "Health": "octavo.types",
    "Message": "octavo.types",
    "ModelDescription": "octavo.types",
    "PoolGeometry": "octavo.types",
    "RequestSummary": "octavo.types",
    "SamplingParams": "octavo.types",
}

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "Candidate",
    "CandidateChunk",
    "Chunk",
    "Client",
    "DeadlineExceededError",
    "FinishReason",
    "Generation",
    "Health",
    "InvalidArgumentError",
    "Message",
    "ModelDescription",
    "NotFoundError",
    "OctavoError",
    "OverloadedError",
    "PoolGeometry",
    "RequestSummary",
    "RpcError",
    "SamplingParams",
    "UnauthenticatedError",
    "UnavailableError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
