"""How long workers may be silent: longer, for a while, where one that was left for its silence turned out to live.

A machine with too much to do holds up workers that are well, and moving their requests gives it more to do still. One
that is really gone never comes back in the same life, so that nobody waits longer for it.
"""

from __future__ import annotations

_MOST = 4
_REMEMBER_SECONDS = 60.0


class Patience:
    """Of one gateway, for each life of each worker."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, int], tuple[int, float]] = {}  # the multiple from then on, and when

    def lost(self, worker_id: str, epoch: int, now: float) -> None:
        """A worker that had said something fell silent."""
        multiple = min(_MOST, 2 * self.of(worker_id, epoch, now))
        self._lost = {key: entry for key, entry in self._lost.items() if now < entry[1] + _REMEMBER_SECONDS}
        self._lost[worker_id, epoch] = multiple, now

    def of(self, worker_id: str, epoch: int, now: float) -> int:
        """So many times the usual silence."""
        multiple, at = self._lost.get((worker_id, epoch), (1, now))
        return multiple if now < at + _REMEMBER_SECONDS else 1
