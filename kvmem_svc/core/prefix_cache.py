"""The prefix cache: which published blocks hold the KV of which tokens.

KV of a token depends on every token before it, so a block is known by a chain: its key is the
hash of the key of the block before it and of its own tokens, and the chain begins with the tenant
and cache_salt (Kwon et al. 2023, §4.4, shared prefixes; the hash chain is that of vLLM's automatic
prefix caching). A key only finds a block: what it stands for is compared before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvmem_svc.core.batch import Column

KEY_BYTES = 16
KEY_DTYPE = np.dtype(f"V{KEY_BYTES}")
# The serial of what no block is before: the beginning of a chain.
ROOT_SERIAL = 0


@dataclass(frozen=True, slots=True)
class Domain:
    """Who shares cached blocks with whom: the requests of one tenant with one cache_salt."""

    tenant: str
    cache_salt: str

    @property
    def root_key(self) -> bytes:
        """The key that a chain begins with."""
        tenant, salt = self.tenant.encode(), self.cache_salt.encode()
        content = len(tenant).to_bytes(4, "little") + tenant + salt
        return blake2b(content, digest_size=KEY_BYTES, person=b"octavo-root").digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block after the one with key `parent`; tokens: its int32 ids as bytes."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Blocks that are held as long as `domain` may find them; None: everybody. blocks: int32[n],
    tokens: int32[n * block_size]."""

    blocks: Column
    tokens: Column
    domain: Domain | None

    def num_leading(self, tokens: Column) -> int:
        """How many of the blocks `tokens` begins with."""
        size = min(self.tokens.size, tokens.size)
        same = self.tokens[:size] == tokens[:size]
        num_same = size if same.all() else int(same.argmin())
        return num_same // (self.tokens.size // self.blocks.size)


@dataclass(slots=True)
class Chain:
    """Where a chain of blocks has come to: the next block goes on from here.

    serial: of the block before, ROOT_SERIAL at the beginning. is_foreign: that one is public, and
    was published in another domain maybe.
    """

    domain: Domain
    key: bytes
    serial: int = ROOT_SERIAL
    is_foreign: bool = False

    @classmethod
    def at_root(cls, domain: Domain) -> Chain:
        return cls(domain, domain.root_key)


@dataclass(slots=True)
class LookupCounters:
    """Sequences that were admitted with a look into the cache, and their tokens: all, and what
    was found."""

    num_lookups: int = 0
    num_hits: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0

    def count(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.num_lookups += 1
        self.num_hits += num_hit_tokens > 0
        self.num_lookup_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens


class PrefixCache:
    """Content of the published blocks, and the index that finds them.

    serials: int64[num_blocks], 0 for a block that is not published, else a number that no other
    publication ever had; parent_serials: that of the block before it, whatever became of it;
    tokens: int32[num_blocks, block_size]; keys: uint8[num_blocks * KEY_BYTES]. Pages of blocks
    never published are not touched.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.serials: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.parent_serials: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.keys: npt.NDArray[np.uint8] = np.zeros(num_blocks * KEY_BYTES, np.uint8)
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_blocks, block_size), np.int32)
        # The same memory: one element of a memoryview takes a third of an array's time.
        self._serials = self.serials.data
        self._parents = self.parent_serials.data
        self._keys = self.keys.data
        self.index: dict[bytes, int] = {}
        # Of the published blocks at the beginning of a chain, or after public ones. The others are
        # in the domain of the block before them.
        self.domains: dict[int, Domain] = {}
        self.enabled = True
        self.num_published = 0
        self.counters = LookupCounters()
        # Prefixes that are found although others may have published them: by everybody, or by a
        # domain that found them when they were public, and pinned them.
        self.pinned: list[PinnedPrefix] = []
        self._last_serial = ROOT_SERIAL

    def is_published(self, blocks: Column) -> npt.NDArray[np.bool_]:
        """bool, one for each of `blocks`."""
        return self.serials[blocks] != 0

    # --- looking up --------------------------------------------------------------------

    def match(self, chain: Chain, tokens: Column) -> list[int]:
        """The published blocks of the longest prefix of `tokens`; `chain` goes on after them."""
        width = 4 * self.block_size
        content = np.ascontiguousarray(tokens, np.int32).tobytes()
        pinned = self._match_pinned(chain.domain, tokens) if self.pinned else []
        found: list[int] = []
        for start in range(0, len(content) - width + 1, width):
            block_tokens = content[start : start + width]
            key = block_key(chain.key, block_tokens)
            block = self.index.get(key)
            if block is not None and self._stands_for(block, chain, block_tokens):
                chain.is_foreign = False
            elif len(found) < len(pinned):
                block = pinned[len(found)]
                chain.is_foreign = True
            else:
                break
            chain.key, chain.serial = key, self._serials[block]
            found.append(block)
        return found

    def _match_pinned(self, domain: Domain, tokens: Column) -> list[int]:
        """The blocks of the pinned prefix that is longest in `tokens`."""
        longest: list[int] = []
        for prefix in self.pinned:
            if prefix.domain is not None and prefix.domain != domain:
                continue
            num_blocks = prefix.num_leading(tokens)
            # Without its serial a block is nothing to go on from.
            usable = self.serials[prefix.blocks[:num_blocks]] != 0
            num_blocks = num_blocks if usable.all() else int(usable.argmin())
            if num_blocks > len(longest):
                longest = prefix.blocks[:num_blocks].tolist()
        return longest

    def _stands_for(self, block: int, chain: Chain, tokens: bytes) -> bool:
        """Whether a published block is the one that goes on from `chain` with `tokens`."""
        if self._parents[block] != chain.serial or self.tokens[block].tobytes() != tokens:
            return False
        if chain.serial == ROOT_SERIAL or chain.is_foreign:
            return self.domains.get(block) == chain.domain
        return block not in self.domains

    # --- publishing --------------------------------------------------------------------

    def publish(
        self, chains: Sequence[Chain], counts: Sequence[int], blocks: Column, tokens: Column
    ) -> list[int]:
        """Enter filled blocks: counts[i] that go on from chains[i] one after the other, which then
        comes after them. blocks: int32[n], tokens: int32[n, block_size], of all chains in order.

        A block whose content another one is published for stays out of the index, and the chain
        goes on from that one. Returns blocks that went out of the index: their key now stands
        for something else.
        """
        # Of those that will stay out it does not matter.
        fresh = self.serials[blocks] == 0
        if fresh.all():
            self.tokens[blocks] = tokens
        else:
            self.tokens[blocks[fresh]] = tokens[fresh]
        content, width = tokens.tobytes(), 4 * self.block_size
        block_ids: list[int] = blocks.tolist()
        replaced: list[int] = []
        index, at = self.index, 0
        for chain, count in zip(chains, counts, strict=True):
            for i in range(at, at + count):
                block_tokens = content[i * width : (i + 1) * width]
                key = block_key(chain.key, block_tokens)
                holder = index.get(key)
                if holder is None or not self._stands_for(holder, chain, block_tokens):
                    if holder is not None and holder != block_ids[i]:
                        replaced.append(holder)
                    holder = block_ids[i]
                    if self._serials[holder]:  # in a chain whose beginning is gone
                        self._forget(holder)
                        self.tokens[holder] = tokens[i]
                    self._enter(chain, key, holder)
                chain.key, chain.serial, chain.is_foreign = key, self._serials[holder], False
            at += count
        return replaced

    def _enter(self, chain: Chain, key: bytes, block: int) -> None:
        """Publish `block` as what comes after `chain`, in place of what `key` stood for."""
        holder = self.index.get(key)
        if holder is not None:
            self._forget(holder)
        self._last_serial += 1
        self._serials[block] = self._last_serial
        self._parents[block] = chain.serial
        self._keys[block * KEY_BYTES : (block + 1) * KEY_BYTES] = key
        if chain.serial == ROOT_SERIAL or chain.is_foreign:
            self.domains[block] = chain.domain
        self.index[key] = block
        self.num_published += 1

    def forget(self, blocks: Column) -> None:
        """These published blocks stand for nothing any more."""
        for block in blocks.tolist():
            self._forget(block)

    def key_of(self, block: int) -> bytes:
        """The key of a published block."""
        return bytes(self._keys[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def _forget(self, block: int) -> None:
        assert self._serials[block], f"block {block} is not published"
        del self.index[self.key_of(block)]
        self.domains.pop(block, None)
        self._serials[block] = 0
