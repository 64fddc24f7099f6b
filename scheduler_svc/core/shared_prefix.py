"""Who computes a prefix that somebody else is about to ask for.

Two requests with one prompt, admitted in the same step, would both compute it. The later one
waits until the first has, and finds it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.sequence import SequenceGroup

# Tenant, cache_salt and first block of a prompt: who has another key shares nothing.
_Key = tuple[str, str, tuple[int, ...]]


class PrefixesUnderWay:
    """Prompts that running groups are still computing, by how they begin."""

    def __init__(self, running: Iterable[SequenceGroup], block_size: int) -> None:
        self._block_size = block_size
        self._by_beginning: dict[_Key, list[SequenceGroup]] = {}
        for group in running:
            self.add(group)

    def add(self, group: SequenceGroup) -> None:
        """The group runs, or will from this step on."""
        prompt = group.request.prompt_token_ids
        num_full = len(prompt) // self._block_size * self._block_size
        if num_full and group.live and group.live[0].num_computed_tokens < num_full:
            self._by_beginning.setdefault(self._key(group), []).append(group)

    def will_serve(self, group: SequenceGroup) -> bool:
        """Whether whole blocks of the group's prompt will be in the cache once they are computed
        by somebody else, and are not yet."""
        if not self._by_beginning or len(group.request.prompt_token_ids) < self._block_size:
            return False
        return any(
            self._num_shared_tokens(group, leader) > leader.live[0].num_computed_tokens
            for leader in self._by_beginning.get(self._key(group), ())
        )

    def _key(self, group: SequenceGroup) -> _Key:
        request = group.request
        return request.tenant, request.cache_salt, request.prompt_token_ids[: self._block_size]

    def _num_shared_tokens(self, group: SequenceGroup, leader: SequenceGroup) -> int:
        """Of the longest common prefix, in whole blocks; found by halving."""
        mine, theirs = group.request.prompt_token_ids, leader.request.prompt_token_ids
        same, end = 1, min(len(mine), len(theirs)) // self._block_size
        while same < end:
            middle = (same + end + 1) // 2
            begin, stop = same * self._block_size, middle * self._block_size
            if mine[begin:stop] == theirs[begin:stop]:
                same = middle
            else:
                end = middle - 1
        return same * self._block_size
