"""Places in a ring of staging memory, and which slots are neighbours. Knows no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.worker.core import HostSlot


class StagingRing:
    """Places are given back in the order in which they were taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._first = 0  # the next to be taken
        self._taken = 0

    @property
    def room(self) -> int:
        """Free places."""
        return self.size - self._taken

    def take(self, count: int) -> list[tuple[int, int]]:
        """`count` free places, as (first, count) of one or two stretches."""
        assert count <= self.room, f"{count} places are wanted, {self.room} are free"
        before_end = min(count, self.size - self._first)
        stretches = [(self._first, before_end), (0, count - before_end)]
        self._first = (self._first + count) % self.size
        self._taken += count
        return [stretch for stretch in stretches if stretch[1]]

    def put_back(self, count: int) -> None:
        """The places taken first are free again."""
        assert count <= self._taken, f"{count} places are put back, {self._taken} were taken"
        self._taken -= count

    def undo(self, count: int) -> None:
        """The places taken last are free again."""
        self.put_back(count)
        self._first = (self._first - count) % self.size


def runs(slots: Sequence[HostSlot]) -> Iterator[tuple[int, HostSlot, int]]:
    """Stretches of neighbours among growing slots: (index of the first, its slot, how many)."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, slots[start], index - start
            start = index
