"""What was used in the last minute, in cells of a quarter second. The Lua scripts do the same in Redis.

A request counts at the moment it was admitted, with what it reserved; when it ends, its cell is corrected to what it
used. So in no minute more than the limit is admitted, and a tenant that always wants more gets all but 0.4 % of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

CELL_MS = 250
CELLS = 240  # a minute; one more is kept, so that the oldest is out whole

REQUESTS, INPUT, OUTPUT = range(3)


class Window:
    """Three sums: requests, input tokens, output tokens. Times in milliseconds, of any clock that does not go back."""

    __slots__ = ("_cells", "totals")

    def __init__(self) -> None:
        self._cells: deque[list[int]] = deque()  # cell number and the three, the oldest first
        self.totals = [0, 0, 0]

    def advance(self, now_ms: float) -> int:
        """Forgets what is older than a minute. Returns the cell of now."""
        now = int(now_ms // CELL_MS)
        oldest = now - CELLS
        cells, totals = self._cells, self.totals
        while cells and cells[0][0] < oldest:
            gone = cells.popleft()
            for kind in range(3):
                totals[kind] -= gone[kind + 1]
        return now

    def add(self, now_ms: float, amounts: Sequence[int]) -> int:
        """Counts now. Returns the cell, for `correct`."""
        now = self.advance(now_ms)
        if not self._cells or self._cells[-1][0] != now:
            self._cells.append([now, 0, 0, 0])
        cell, totals = self._cells[-1], self.totals
        for kind in range(3):
            cell[kind + 1] += amounts[kind]
            totals[kind] += amounts[kind]
        return now

    def correct(self, cell: int, now_ms: float, changes: Sequence[int]) -> None:
        """What was counted in a cell was less, or more, than that. What it was more counts now."""
        more = [max(0, change) for change in changes]
        if any(more):
            self.add(now_ms, more)
        self.advance(now_ms)
        found = self._find(cell)
        if found is None:
            return
        for kind in range(3):
            given_back = min(max(0, -changes[kind]), found[kind + 1])
            found[kind + 1] -= given_back
            self.totals[kind] -= given_back

    def wait_ms(self, kind: int, needed: int, now_ms: float) -> int:
        """Milliseconds until `needed` of one kind are forgotten; a whole minute where they never are."""
        freed = 0
        for cell in self._cells:
            freed += cell[kind + 1]
            if freed >= needed:
                return max(1, int((cell[0] + CELLS + 1) * CELL_MS - now_ms))
        return CELLS * CELL_MS

    def surely(self, kind: int, now_ms: float, slack_ms: int) -> int:
        """What counts now, and still would on a clock that is `slack_ms` ahead."""
        oldest = int((now_ms + slack_ms) // CELL_MS) - CELLS
        total = self.totals[kind]
        for cell in self._cells:
            if cell[0] >= oldest:
                break
            total -= cell[kind + 1]
        return total

    def reset_ms(self, now_ms: float) -> int:
        """Milliseconds until nothing counts any more."""
        return max(0, int((self._cells[-1][0] + CELLS + 1) * CELL_MS - now_ms)) if self._cells else 0

    def clear(self) -> None:
        """Forgets everything."""
        self._cells.clear()
        self.totals = [0, 0, 0]

    def _find(self, number: int) -> list[int] | None:
        # Most corrections are of recent cells.
        for cell in reversed(self._cells):
            if cell[0] <= number:
                return cell if cell[0] == number else None
        return None
