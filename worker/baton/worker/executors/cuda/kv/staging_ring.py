"""A ring of staging memory, and runs of adjacent slots. Knows no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.worker.core import HostSlot


class StagingRing:
    """A ring of entries that are freed in the order of their allocation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._first = 0  # the next entry
        self._taken = 0

    @property
    def num_free(self) -> int:
        """Number of free entries."""
        return self.size - self._taken

    def take(self, count: int) -> list[tuple[int, int]]:
        """Allocates `count` entries. Returns them as (first, count) of one or two spans."""
        assert count <= self.num_free, f"{count} entries are needed, {self.num_free} are free"
        before_end = min(count, self.size - self._first)
        spans = [(self._first, before_end), (0, count - before_end)]
        self._first = (self._first + count) % self.size
        self._taken += count
        return [span for span in spans if span[1]]

    def put_back(self, count: int) -> None:
        """Frees the entries that were allocated first."""
        assert count <= self._taken, f"{count} entries are freed, {self._taken} were allocated"
        self._taken -= count

    def undo(self, count: int) -> None:
        """Frees the entries that were allocated last."""
        self.put_back(count)
        self._first = (self._first - count) % self.size


def runs(slots: Sequence[HostSlot]) -> Iterator[tuple[int, HostSlot, int]]:
    """Yields the runs of adjacent slots in sorted slots: (index of the first, its slot, count)."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield start, slots[start], index - start
            start = index
