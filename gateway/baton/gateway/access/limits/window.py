"""Usage of the last minute, in cells of 250 ms. The Lua scripts do the same in Redis.

A request is counted when it is admitted, with its reserved amount; when it ends, its cell is corrected to the actual
usage. No minute exceeds the limit, and a saturating tenant reaches 99.6 % of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

CELL_MS = 250
CELLS = 240  # one minute; one more cell is kept until the oldest has fully expired

REQUESTS, INPUT, OUTPUT = range(3)


class Window:
    """Sums of requests, input tokens and output tokens. Times are in milliseconds of a clock that never goes back."""

    __slots__ = ("_cells", "totals")

    def __init__(self) -> None:
        self._cells: deque[list[int]] = deque()  # cell number and three sums, oldest first
        self.totals = [0, 0, 0]

    def advance(self, now_ms: float) -> int:
        """Drops cells older than a minute. Returns the current cell number."""
        now = int(now_ms // CELL_MS)
        oldest = now - CELLS
        cells, totals = self._cells, self.totals
        while cells and cells[0][0] < oldest:
            gone = cells.popleft()
            for kind in range(3):
                totals[kind] -= gone[kind + 1]
        return now

    def add(self, now_ms: float, amounts: Sequence[int]) -> int:
        """Adds to the current cell. Returns its number for `correct`."""
        now = self.advance(now_ms)
        if not self._cells or self._cells[-1][0] != now:
            self._cells.append([now, 0, 0, 0])
        cell, totals = self._cells[-1], self.totals
        for kind in range(3):
            cell[kind + 1] += amounts[kind]
            totals[kind] += amounts[kind]
        return now

    def correct(self, cell: int, now_ms: float, changes: Sequence[int]) -> None:
        """Corrects the amounts of a cell. Reductions change that cell; increases are added to the current one."""
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
        """Returns the milliseconds until `needed` of one kind expire, at most a whole minute."""
        freed = 0
        for cell in self._cells:
            freed += cell[kind + 1]
            if freed >= needed:
                return max(1, int((cell[0] + CELLS + 1) * CELL_MS - now_ms))
        return CELLS * CELL_MS

    def certain_total(self, kind: int, now_ms: float, slack_ms: int) -> int:
        """Returns the total that still counts on a clock `slack_ms` ahead."""
        oldest = int((now_ms + slack_ms) // CELL_MS) - CELLS
        total = self.totals[kind]
        for cell in self._cells:
            if cell[0] >= oldest:
                break
            total -= cell[kind + 1]
        return total

    def reset_ms(self, now_ms: float) -> int:
        """Returns the milliseconds until all usage has expired."""
        return max(0, int((self._cells[-1][0] + CELLS + 1) * CELL_MS - now_ms)) if self._cells else 0

    def clear(self) -> None:
        self._cells.clear()
        self.totals = [0, 0, 0]

    def _find(self, number: int) -> list[int] | None:
        # Most corrections concern recent cells.
        for cell in reversed(self._cells):
            if cell[0] <= number:
                return cell if cell[0] == number else None
        return None
