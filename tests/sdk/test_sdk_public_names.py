"""What other people's code may rely on: the public names, and a cheap `import octavo`."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import octavo
from octavo import errors
from octavo.service.errors import REASONS

PUBLIC_NAMES = [
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


CONSTRUCTOR = ["address", "tracer", "connect_timeout_s", "api_key"]
REQUEST_OPTIONS = ["params", "request_id", "timeout_s", "detach_ttl_s", "cache_salt", "priority"]
METHODS = {
    "generate": ["prompt", *REQUEST_OPTIONS],
    "stream": ["prompt", *REQUEST_OPTIONS],
    "chat": ["messages", *REQUEST_OPTIONS],
    "stream_chat": ["messages", *REQUEST_OPTIONS],
    "abort": ["request_id", "timeout_s"],
    "health": ["timeout_s"],
    "model": ["timeout_s"],
    "tokenize": ["text", "timeout_s"],
    "list_requests": ["timeout_s"],
}


def parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]


@pytest.mark.parametrize("client_class", [octavo.Client, octavo.AsyncClient])
def test_what_the_clients_take_is_frozen(client_class: type) -> None:
    assert parameters(client_class) == CONSTRUCTOR
    assert {name: parameters(getattr(client_class, name)) for name in METHODS} == METHODS


def test_the_defaults_of_waiting_are_frozen() -> None:
    defaults = inspect.signature(octavo.Client.stream).parameters
    assert (defaults["timeout_s"].default, defaults["detach_ttl_s"].default) == (600.0, 10.0)
    assert inspect.signature(octavo.Client).parameters["connect_timeout_s"].default == 5.0


def test_the_public_names_are_frozen() -> None:
    assert sorted(octavo.__all__) == PUBLIC_NAMES
    assert all(getattr(octavo, name).__name__ == name for name in PUBLIC_NAMES)


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    drawn = {
        line.replace("└──", "").replace("├──", "").split()[0]
        for line in (errors.__doc__ or "").splitlines()
        if "──" in line
    }
    assert drawn == {name for name in classes if name.endswith("Error")}
    assert all(issubclass(classes[name], errors.OctavoError) for name in drawn)
    assert all(classes[name].__bases__ == (errors.OctavoError,) for name in drawn - {"OctavoError"})


def test_every_reason_of_the_servers_has_a_class() -> None:
    for reason in REASONS.values():
        assert issubclass(errors.class_of_code(reason.code), errors.OctavoError)


def test_an_error_survives_pickling() -> None:
    error = errors.OverloadedError("full", reason="QUEUE_FULL", retry_after_ms=7)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.reason, again.retry_after_ms) == (
        errors.OverloadedError,
        "full",
        "QUEUE_FULL",
        7,
    )
    assert str(again) == "full [QUEUE_FULL]"


def test_the_types_show_nothing_of_the_wire() -> None:
    types = importlib.import_module("octavo.types")
    source = inspect.getsource(types)
    assert "pb2" not in source
    assert "google" not in source


def test_import_octavo_loads_neither_grpc_nor_numpy() -> None:
    script = (
        "import sys, octavo; print([m for m in ('grpc', 'google.protobuf', 'numpy', 'rich',"
        " 'typer', 'opentelemetry') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert out.strip() == "[]"
