"""Tenants: who has how much. Each that has anything has a number, for columns of them."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_CAPACITY = 8


@dataclass(frozen=True, slots=True)
class Quota:
    """What each tenant may have at most: blocks in use, of which shared ones count once, and
    sequences that wait or run; a request of n candidates has n from its arrival on, so that none
    is refused once it runs. 0: no limit."""

    max_blocks: int = 0
    max_sequences: int = 0


@dataclass(slots=True)
class Tenant:
    """num_records: requests that are not confirmed; num_sequences: of those, live ones and such
    as they may still be forked into."""

    name: str
    num_records: int = 0
    num_sequences: int = 0


class Tenants:
    """Tenants by number. The numbers of those that have nothing any more are given again, when
    there is no other one left."""

    def __init__(self) -> None:
        self.entries: list[Tenant | None] = [None] * FIRST_CAPACITY
        self.numbers: dict[str, int] = {}
        self._free = list(range(FIRST_CAPACITY - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """Numbers are below it."""
        return len(self.entries)

    def tenant(self, number: int) -> Tenant:
        entry = self.entries[number]
        assert entry is not None, f"there is no tenant {number}"
        return entry

    def number_of(self, name: str, num_blocks_of: list[int]) -> int:
        """The number of a tenant, a new one if need be. num_blocks_of: by number."""
        number = self.numbers.get(name)
        if number is None:
            if not self._free:
                self._make_room(num_blocks_of)
            number = self._free.pop()
            self.entries[number] = Tenant(name)
            self.numbers[name] = number
        return number

    def _make_room(self, num_blocks_of: list[int]) -> None:
        """Take numbers back; if those are few there are to be more of them."""
        for number in range(self.capacity - 1, -1, -1):
            if not self._has_anything(number, num_blocks_of):
                del self.numbers[self.tenant(number).name]
                self.entries[number] = None
                self._free.append(number)
        if len(self._free) < self.capacity // 2:
            larger = 2 * self.capacity
            self._free = [*range(larger - 1, self.capacity - 1, -1), *self._free]
            self.entries += [None] * (larger - self.capacity)

    def _has_anything(self, number: int, num_blocks_of: list[int]) -> bool:
        return bool(self.tenant(number).num_records or num_blocks_of[number])

    def num_active(self, num_blocks_of: list[int]) -> int:
        """Tenants that have something."""
        return sum(self._has_anything(number, num_blocks_of) for number in self.numbers.values())
