"""Prefixes of tokens by number: what a KV slot was computed from."""

from __future__ import annotations

import hashlib
import struct

VOCAB = 50


class PrefixTree:
    """Token prefixes by number; 0 is the empty one. Equal numbers, equal tokens."""

    def __init__(self) -> None:
        self.parents = [0]
        self.lengths = [0]
        self._tokens = [-1]
        self._digests = [b"\0" * 8]
        self._children: dict[tuple[int, int], int] = {}

    def extend(self, prefix: int, token: int) -> int:
        known = self._children.get((prefix, token))
        if known is not None:
            return known
        new = self._children[prefix, token] = len(self.parents)
        self.parents.append(prefix)
        self.lengths.append(self.lengths[prefix] + 1)
        self._tokens.append(token)
        key = self._digests[prefix] + struct.pack("<i", token)
        self._digests.append(hashlib.blake2b(key, digest_size=8).digest())
        return new

    def of(self, tokens: tuple[int, ...]) -> int:
        prefix = 0
        for token in tokens:
            prefix = self.extend(prefix, token)
        return prefix

    def tokens(self, prefix: int) -> list[int]:
        """The tokens of a prefix, for messages."""
        reversed_tokens = []
        while prefix:
            reversed_tokens.append(self._tokens[prefix])
            prefix = self.parents[prefix]
        return reversed_tokens[::-1]

    def last_token(self, prefix: int) -> int:
        """-1 for the empty prefix."""
        return self._tokens[prefix]

    def next_token(self, prefix: int, seed: int, sample_index: int) -> int:
        """Depends on everything a real draw depends on; about one in VOCAB is the eos."""
        key = self._digests[prefix] + struct.pack("<QI", seed, sample_index)
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") % VOCAB
