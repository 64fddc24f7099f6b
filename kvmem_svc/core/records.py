"""Request records: what is kept of a request from its arrival until it is confirmed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmem_svc.core.batch import Column, FinishReason
from kvmem_svc.core.prefix_cache import Domain


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """What stays of a sequence whose blocks are gone. token_ids: int32, prompt included."""

    sequence_id: int
    request_id: str
    candidate: int
    token_ids: Column
    num_prompt_tokens: int
    num_computed_tokens: int
    table_version: int
    finish_reason: FinishReason
    scheduler_state: bytes


@dataclass(slots=True)
class RequestRecord:
    """A request. `live` and `finished` hold its sequences by candidate number."""

    request_id: str
    arrival_number: int
    num_candidates: int
    num_prompt_tokens: int
    tenant: str
    request_spec: bytes
    request_digest: bytes
    cache_salt: str = ""
    tenant_number: int = 0
    live: dict[int, int] = field(default_factory=dict)
    finished: dict[int, FinishedSequence] = field(default_factory=dict)

    @property
    def domain(self) -> Domain:
        """Where its prefixes are cached."""
        return Domain(self.tenant, self.cache_salt)

    @property
    def num_seats(self) -> int:
        """Sequences that live, or that may still be forked off one that does."""
        return len(self.live) + len(self.free_candidates()) if self.live else 0

    def free_candidates(self) -> list[int]:
        """Numbers a new child may take, lowest first.

        A number is taken while its sequence lives, or has finished with a reason. A sequence
        freed without one was pruned (a beam that lost): its number is free again.
        """
        return [
            number
            for number in range(self.num_candidates)
            if number not in self.live and not self._has_result(number)
        ]

    def _has_result(self, candidate: int) -> bool:
        finished = self.finished.get(candidate)
        return finished is not None and finished.finish_reason != FinishReason.UNSPECIFIED
