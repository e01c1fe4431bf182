"""A cache of workers' snapshots without a request's part. Makes a snapshot again only if its worker changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.router.fleet.rates import Rates
from baton.router.fleet.worker_view import WorkerView
from baton.router.placement.worker_snapshot import WorkerSnapshot

_FRESH_SECONDS = 0.01  # for which a backlog is believed: it shrinks by itself

Make = Callable[[WorkerView, Rates, float], WorkerSnapshot]  # worker, what it is taken to be like, now


class SnapshotCache:
    """One model's workers. `changed`: those whose load has become another one; the cache empties it."""

    def __init__(self, make: Make, changed: set[str]) -> None:
        self.changed = changed
        self.snapshots: list[WorkerSnapshot] = []  # in the order of the views
        self.indices: dict[str, int] = {}  # by worker
        self._make = make
        self._views: Sequence[WorkerView] = ()
        self._fallback: Rates | None = None
        self._backlogs: dict[str, float] = {}  # by worker, where prompts are computed: when that was looked at

    def update(self, views: Sequence[WorkerView], fallback: Rates, now: float) -> None:
        """Updates the snapshots. `views` must be a new sequence if any of its views is new."""
        if views is not self._views or fallback is not self._fallback:
            self._take(views, fallback, now)
        changed = self.changed
        for worker_id, at in self._backlogs.items():
            if now - at >= _FRESH_SECONDS:
                changed.add(worker_id)
        for worker_id in changed:
            index = self.indices.get(worker_id)
            if index is None:
                continue
            self.snapshots[index] = self._made(views[index], fallback, now)
        changed.clear()

    def _take(self, views: Sequence[WorkerView], fallback: Rates, now: float) -> None:
        before, self._views = self._views, views
        indices = {view.worker_id: index for index, view in enumerate(views)}
        if fallback is self._fallback and indices == self.indices:
            self.changed.update([view.worker_id for view, old in zip(views, before, strict=True) if view is not old])
            return
        self._fallback, self.indices = fallback, indices
        self._backlogs.clear()
        self.changed.clear()
        self.snapshots = [self._made(view, fallback, now) for view in views]

    def _made(self, view: WorkerView, fallback: Rates, now: float) -> WorkerSnapshot:
        snapshot = self._make(view, fallback, now)
        if snapshot.backlog_seconds:
            self._backlogs[view.worker_id] = now
        else:
            self._backlogs.pop(view.worker_id, None)
        return snapshot
