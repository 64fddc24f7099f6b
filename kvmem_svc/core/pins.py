"""Pins: cached prefixes that are held although no sequence uses them."""

from __future__ import annotations

from dataclasses import dataclass

from kvmem_svc.core.batch import Column
from kvmem_svc.core.prefix_cache import Domain, PinnedPrefix


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A pin. blocks: int32[n], each with a reference of this pin; tokens: what they stand for,
    int32[n * block_size]. ttl_ms 0: until it is let go."""

    pin_id: int
    domain: Domain
    blocks: Column
    tokens: Column
    ttl_ms: int
    is_public: bool

    def prefix(self) -> PinnedPrefix:
        """What lookups go by."""
        return PinnedPrefix(self.blocks, self.tokens, None if self.is_public else self.domain)
