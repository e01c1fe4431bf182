"""Which adapters are on their way to which workers: placed there, and not yet in their states. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_REMEMBER_SECONDS = 10.0  # by then a worker has loaded it and says so


class PlacedAdapters:
    """The last placement of each adapter on each worker."""

    def __init__(self) -> None:
        self._at: dict[str, dict[str, float]] = {}  # worker -> adapter -> when

    def remember(self, adapter: str, worker_ids: Iterable[str], now: float) -> None:
        """Records a request for an adapter on these workers."""
        for worker_id in worker_ids:
            placed = self._at.setdefault(worker_id, {})
            placed[adapter] = now
            for old in [name for name, at in placed.items() if now - at > _REMEMBER_SECONDS]:
                del placed[old]

    def is_placed(self, adapter: str, worker_id: str, now: float) -> bool:
        """Returns whether the worker is loading the adapter, or has just loaded it."""
        at = self._at.get(worker_id, {}).get(adapter)
        return at is not None and now - at <= _REMEMBER_SECONDS

    def lose(self, worker_id: str) -> None:
        """Forgets a dead worker."""
        self._at.pop(worker_id, None)
