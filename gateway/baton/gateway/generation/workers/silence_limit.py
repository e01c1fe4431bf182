"""How long workers may be silent. The limit rises for a while after a worker that was given up turned out to be alive.

An overloaded machine delays healthy workers, and moving their requests adds to the load. A worker that is really gone
never returns with the same epoch, so nothing waits longer for it.
"""

from __future__ import annotations

_MOST = 4
_REMEMBER_SECONDS = 60.0


class SilenceLimits:
    """The multiples of the usual silence limit by worker and epoch."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, int], tuple[int, float]] = {}  # multiple and time of the last loss

    def lost(self, worker_id: str, epoch: int, now: float) -> None:
        """Records that a worker fell silent after it had sent something."""
        multiple = min(_MOST, 2 * self.of(worker_id, epoch, now))
        self._lost = {key: entry for key, entry in self._lost.items() if now < entry[1] + _REMEMBER_SECONDS}
        self._lost[worker_id, epoch] = multiple, now

    def of(self, worker_id: str, epoch: int, now: float) -> int:
        """Returns the multiple of the usual silence limit."""
        multiple, at = self._lost.get((worker_id, epoch), (1, now))
        return multiple if now < at + _REMEMBER_SECONDS else 1
