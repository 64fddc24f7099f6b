"""What every candidate of every request must be, whatever happens around it."""

from __future__ import annotations

from scheduler_svc.core.sequence import Request
from simulator.prefix_tree import PrefixTree
from simulator.worker import solo_run


class SoloRuns:
    """What every candidate must be, computed once."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._known: dict[tuple[Request, int], tuple[int, ...]] = {}

    def of(self, request: Request, candidate: int) -> tuple[int, ...]:
        key = (request, candidate)
        if key not in self._known:
            self._known[key] = solo_run(request, candidate, self._tree)
        return self._known[key]

    def num_blocks_needed(self, request: Request, block_size: int) -> int:
        """The most blocks the request can need at a time, alone in the pool.

        The last token drawn needs no slot; candidates share the prompt's full blocks.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        num_shared = num_prompt_tokens // block_size
        return num_shared + sum(
            -(-(num_prompt_tokens + len(self.of(request, i)) - 1) // block_size) - num_shared
            for i in range(request.params.n)
        )
