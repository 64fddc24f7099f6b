"""Who goes first and who gives way.

Among the requests of a tenant: first come, first served (paper §4.5), where a request of priority p
counts as having come p * ARRIVALS_PER_PRIORITY requests earlier. So priorities age: whoever waits
is overtaken by so many later ones at most for each step of priority they have more. Arrivals are
numbered by the memory service, so that another scheduler goes on in the same order.

Among tenants: whoever has fewest sequences running is next.

An admission that does not fit holds up those behind it, whatever their size, until enough of those
that run have ended: at the latest when all of them have.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from scheduler_svc.core.sequence import SequenceGroup

ARRIVALS_PER_PRIORITY = 32


class Policy(Protocol):
    """The order of admission, and the victim when blocks run out."""

    def admission_order(
        self, waiting: SequenceOf[SequenceGroup], running: SequenceOf[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        """Of those that wait, whoever is next, supposing that those before it were admitted."""
        ...

    def running_order(self, running: SequenceOf[SequenceGroup]) -> list[SequenceGroup]: ...

    def victim(self, running: SequenceOf[SequenceGroup]) -> SequenceGroup: ...


class FairTurns:
    """The order above. Whoever's turn comes last is preempted first.

    A preempted group keeps its turn, and the one whose turn is first is never preempted while
    there is another: it always runs, so progress is guaranteed.
    """

    def admission_order(
        self, waiting: SequenceOf[SequenceGroup], running: SequenceOf[SequenceGroup]
    ) -> Iterator[SequenceGroup]:
        queues: dict[str, list[SequenceGroup]] = defaultdict(list)
        for group in sorted(waiting, key=turn, reverse=True):
            queues[group.request.tenant].append(group)
        num_running: dict[str, int] = defaultdict(int)
        for group in running if len(queues) > 1 else ():
            num_running[group.request.tenant] += group.num_seats
        heads = [(num_running[tenant], turn(queue[-1]), tenant) for tenant, queue in queues.items()]
        heapq.heapify(heads)
        while heads:
            count, _, tenant = heads[0]
            queue = queues[tenant]
            group = queue.pop()
            yield group
            if queue:
                heapq.heapreplace(heads, (count + group.num_seats, turn(queue[-1]), tenant))
            else:
                heapq.heappop(heads)

    def running_order(self, running: SequenceOf[SequenceGroup]) -> list[SequenceGroup]:
        return sorted(running, key=turn)

    def victim(self, running: SequenceOf[SequenceGroup]) -> SequenceGroup:
        return max(running, key=turn)


def turn(group: SequenceGroup) -> tuple[int, int]:
    """Sorts by whose turn comes first; no two are equal."""
    number = group.arrival_number
    return number - group.request.priority * ARRIVALS_PER_PRIORITY, number
