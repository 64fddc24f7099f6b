"""API keys: made here, checked by the scheduler."""

from __future__ import annotations

import hashlib
import secrets

from octavo.errors import InvalidArgumentError

KEY_BYTES = 32


def new_key_lines(tenant: str) -> tuple[str, str]:
    """A new key, and the line by which a scheduler knows it without having it.

    Raises InvalidArgumentError for a name that would not be one word.
    """
    if tenant.split() != [tenant] or tenant.startswith("#"):
        raise InvalidArgumentError(
            f"{tenant!r} is no name for a tenant: it must be one word", reason="INVALID_PARAMETER"
        )
    key = secrets.token_urlsafe(KEY_BYTES)
    return key, f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
