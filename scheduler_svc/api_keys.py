"""Who calls: the API keys of the tenants, from a file.

One key a line, after the name of its tenant: the key itself, or `sha256:` and the hexadecimal
digest of it. Empty lines and those that begin with `#` are skipped. A tenant may have several
keys, so that one can be replaced while the other still works.

    acme    sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    another kWq3vX9mT2bR8nLs
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo.service.errors import ServiceError
from scheduler_svc.tenants import DEFAULT_TENANT, NAME_PATTERN, NAME_RULE

METADATA_KEY: Final = "authorization"
SCHEME: Final = "bearer"
DIGEST_PREFIX: Final = "sha256:"
# Shorter ones can be guessed. What `octavo new-key` makes has 43.
MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 256
MAX_KEYS: Final = 4096
MAX_FILE_BYTES: Final = 4 << 20
_DIGEST_PATTERN: Final = re.compile(r"[0-9a-f]{64}")

Metadata = Sequence[tuple[str, str | bytes]]


class ApiKeysError(Exception):
    """The file of keys cannot be used; a sentence for a person, without any key in it."""


class ApiKeys:
    """Which tenant each key is of. Keys are kept and compared as digests only."""

    def __init__(self, tenant_of_digest: dict[bytes, str]) -> None:
        """tenant_of_digest: by the SHA-256 digest of the key."""
        # They are looked up under digests that nobody outside can foresee, so that the time
        # which that takes says nothing about a key.
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._veiled(d): tenant for d, tenant in tenant_of_digest.items()}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, metadata: Metadata) -> str:
        """The tenant that calls, by the metadata of the call. Raises ServiceError
        UNAUTHENTICATED."""
        said = [value for key, value in metadata if key == METADATA_KEY]
        if not said:
            raise _refusal("this server asks for an API key, and the call has none")
        if len(said) > 1:
            raise _refusal(f"the call has {len(said)} entries {METADATA_KEY!r} in its metadata")
        (value,) = said
        scheme, _, key = (value if isinstance(value, str) else value.decode("latin-1")).partition(
            " "
        )
        if scheme.lower() != SCHEME or not key:
            raise _refusal(f"the metadata {METADATA_KEY!r} of the call is not 'Bearer KEY'")
        tenant = self._tenants.get(self._veiled(_digest_of(key.strip())))
        if tenant is None:
            raise _refusal("the API key of the call is not one of this server's")
        return tenant

    def _veiled(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class NoApiKeys:
    """Without authentication: everybody is the same tenant."""

    def tenant_of(self, metadata: Metadata) -> str:
        """`default`, whatever the caller says."""
        del metadata
        return DEFAULT_TENANT


def _refusal(message: str) -> ServiceError:
    return ServiceError(
        "UNAUTHENTICATED", f"{message}: send the metadata 'authorization: Bearer KEY'"
    )


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def load_api_keys(path: Path) -> ApiKeys:
    """Raises ApiKeysError, naming the line, when the file or its permissions will not do."""
    try:
        with path.open("rb") as file:
            # Of the file that is read, whatever has the name by now.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ApiKeysError(
                    f"{path} may be used by others than its owner (mode {mode:04o});"
                    f" it must be 0600: chmod 600 {path}"
                )
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ApiKeysError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ApiKeysError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return ApiKeys(parse_api_keys(content.decode()))
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiKeysError(f"{path}: {error}") from None


def parse_api_keys(text: str) -> dict[bytes, str]:
    """The tenant of each key, by the key's SHA-256 digest. Raises ValueError, naming the line."""
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ValueError(f"line {number} has {len(words)} words; it must be TENANT KEY")
        tenant, key = words
        if not NAME_PATTERN.fullmatch(tenant):
            # Not shown: where the two words are the wrong way round it is the key.
            raise ValueError(f"line {number}: the first word is no name for a tenant: {NAME_RULE}")
        digest = _digest_in(key, number)
        if digest in tenants:
            raise ValueError(f"line {number} has a key that stands in a line before")
        tenants[digest] = tenant
    if not 1 <= len(tenants) <= MAX_KEYS:
        raise ValueError(f"there are {len(tenants)} keys; there must be 1 to {MAX_KEYS}")
    return tenants


def _digest_in(word: str, number: int) -> bytes:
    if word.startswith(DIGEST_PREFIX):
        digest = word.removeprefix(DIGEST_PREFIX).lower()
        if not _DIGEST_PATTERN.fullmatch(digest):
            raise ValueError(f"line {number}: after {DIGEST_PREFIX} there must be 64 hex digits")
        return bytes.fromhex(digest)
    if not MIN_KEY_CHARS <= len(word) <= MAX_KEY_CHARS or not word.isascii():
        raise ValueError(
            f"line {number}: a key of {len(word)} characters; it must have {MIN_KEY_CHARS} to"
            f" {MAX_KEY_CHARS} of ASCII"
        )
    return _digest_of(word)
