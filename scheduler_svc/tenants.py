"""Tenants: whose a request is, and what its id is called inside.

A tenant is an identity that the API key proves; without authentication everybody is `default`.
Inside, in the memory service and the worker, an id is unique among all tenants: it begins with
its tenant's name and a slash. Those of `default` stay as they are, unless they have a slash, and
with it might be taken for another tenant's. So two tenants may use the same id, and neither can
name a request of the other.
"""

from __future__ import annotations

import re
from typing import Final

from octavo.service.errors import ServiceError
from scheduler_svc.core.sequence import Request

DEFAULT_TENANT: Final = "default"
# No slash; the rest keeps names readable in logs and on a terminal.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE: Final = (
    "1 to 64 letters, digits, '.', '_' and '-', the first of them a letter or a digit"
)
# Of an id with its tenant: what the memory service takes.
MAX_INNER_ID_BYTES: Final = 256


def inner_id(tenant: str, request_id: str) -> str:
    """What the request that `tenant` calls `request_id` is called inside."""
    if tenant == DEFAULT_TENANT and "/" not in request_id:
        return request_id
    return f"{tenant}/{request_id}"


def checked_inner_id(tenant: str, request_id: str) -> str:
    """`inner_id`. Raises ServiceError INVALID_PARAMETER for an id that is too long."""
    inner = inner_id(tenant, request_id)
    num_bytes, num_inner_bytes = len(request_id.encode()), len(inner.encode())
    if num_inner_bytes > MAX_INNER_ID_BYTES:
        allowed = MAX_INNER_ID_BYTES - (num_inner_bytes - num_bytes)
        raise ServiceError(
            "INVALID_PARAMETER",
            f"request_id has {num_bytes} bytes; at most {allowed} are allowed",
        )
    return inner


def outer_id(request: Request) -> str:
    """What its caller calls the request."""
    prefix = f"{request.tenant}/"
    if request.tenant == DEFAULT_TENANT and "/" not in request.request_id:
        return request.request_id
    return request.request_id.removeprefix(prefix)
