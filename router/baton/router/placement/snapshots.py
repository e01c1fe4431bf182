"""The fleet as one request meets it: usable workers and their snapshots. Does no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from baton.router.fleet.fleet import Fleet
from baton.router.fleet.rates import Rates
from baton.router.fleet.worker_view import WorkerView
from baton.router.index.prefix_index import HeldPrefix, PrefixIndex
from baton.router.placement import filter as filters
from baton.router.placement.explain import Decisions
from baton.router.placement.learnt import Learnt
from baton.router.placement.snapshot_cache import SnapshotCache
from baton.router.placement.worker_snapshot import WorkerSnapshot, snapshot_of
from baton.router.requests.in_flight import InFlight
from baton.router.requests.placed_adapters import PlacedAdapters
from baton.router.requests.sessions import LastPlace, Sessions
from baton.rpc.errors import NotFound, Unavailable
from baton.v1 import router_pb2, types_pb2

_NO_WORKER_RETRY_MS = 1000
_NOTHING_HELD = HeldPrefix(0, 0)


class Usable(NamedTuple):
    """The workers that may take a request of a model."""

    views: list[WorkerView]
    refused: Mapping[str, str]  # worker id -> why
    num_decodes: int  # that requests can be submitted to
    has_prefills: bool  # workers for prompts alone


class Snapshots:
    """Makes workers' snapshots. The parts that do not depend on a request are cached for each state."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        in_flight: InFlight,
        learnt: Learnt,
        sessions: Sessions,
        adapters: PlacedAdapters,
        decisions: Decisions,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._in_flight = in_flight
        self._learnt = learnt
        self._sessions = sessions
        self._adapters = adapters
        self._decisions = decisions
        self._caches: dict[str, SnapshotCache] = {}  # by model
        self._usable: dict[str, tuple[int, types_pb2.ModelInfo, Usable]] = {}

    def forget_models(self) -> None:
        """Drops the caches of all models."""
        self._usable.clear()
        for cache in self._caches.values():
            self._in_flight.unwatch(cache.changed)
        self._caches.clear()

    def usable(self, request: router_pb2.PlaceRequest, model: types_pb2.ModelInfo) -> Usable:
        """Returns the usable workers, cached for each state of the fleet. Raises Unavailable if none can decode."""
        excluded = self._still_excluded(request)
        known = self._usable.get(model.name)
        if not excluded and known is not None and known[0] == self._fleet.version and known[1] is model:
            usable = known[2]
        else:
            views, refused = filters.usable(self._fleet.alive(), model, excluded)
            has_prefills = any(view.can_prefill_for_others and not view.mixes_phases for view in views)
            usable = Usable(views, refused, sum([view.can_decode for view in views]), has_prefills)
            if not excluded:
                self._usable[model.name] = (self._fleet.version, model, usable)
        if request.worker_id:
            return _only(request.worker_id, usable, model)
        if not usable.num_decodes:
            reasons = "; ".join(f"{worker_id} {reason}" for worker_id, reason in sorted(usable.refused.items()))
            raise Unavailable(
                f"no worker can decode for model {model.name!r} now: {reasons}",
                phase=types_pb2.PHASE_PLACEMENT,
                retry_after_ms=_NO_WORKER_RETRY_MS,
            )
        return usable

    def of(
        self,
        request: router_pb2.PlaceRequest,
        hashes: bytes,
        model: types_pb2.ModelInfo,
        views: Sequence[WorkerView],
        now: float,
    ) -> list[WorkerSnapshot]:
        """Returns the workers' snapshots for a request with these block hashes."""
        held = self._index.find(hashes) if hashes else {}
        coming = self._in_flight.expected_prefixes(hashes)
        session = self._sessions.find(request.session_id, now) if request.session_id else None
        fallback = self._learnt.fleet_rates(model.digest, views, now)
        most = (request.num_prompt_tokens - 1) // model.block_size  # the last token is always computed
        if request.adapter or request.worker_id or self._in_flight.has_less_urgent(request.priority):
            return [self._snapshot(view, request, hashes, held, coming, session, most, fallback, now) for view in views]
        cache = self._cache(model.name)
        cache.update(views, fallback, now)
        snapshots = cache.snapshots.copy()
        special = held.keys() | coming.keys() if coming else held.keys()
        if session is not None:
            special = {*special, session.worker_id}
        for worker_id in special:
            index = cache.indices.get(worker_id)
            if index is not None:
                num_tokens, num_host_tokens = self._cached_tokens(views[index], held, coming, session, most, hashes)
                is_preferred = session is not None and session.worker_id == worker_id
                snapshots[index] = snapshots[index].with_prefix(num_tokens, num_host_tokens, is_preferred)
        return snapshots

    def _snapshot(
        self,
        view: WorkerView,
        request: router_pb2.PlaceRequest,
        hashes: bytes,
        held: Mapping[str, HeldPrefix],
        coming: Mapping[str, int],
        session: LastPlace | None,
        most: int,
        fallback: Rates,
        now: float,
    ) -> WorkerSnapshot:
        worker_id = view.worker_id
        is_preferred = session is not None and session.worker_id == worker_id
        has_adapter = bool(request.adapter) and self._adapters.is_placed(request.adapter, worker_id, now)
        num_tokens, num_host_tokens = self._cached_tokens(view, held, coming, session, most, hashes)
        share_ahead = self._in_flight.share_ahead(worker_id, request.priority)
        rates, load = self._learnt.rates(view, fallback), self._in_flight.load(worker_id)
        return snapshot_of(
            view,
            load,
            rates,
            num_tokens,
            num_host_tokens,
            share_ahead,
            is_preferred,
            has_adapter,
            *self._learnt.given(worker_id, now),
            now - view.received,
        )

    def _cache(self, model: str) -> SnapshotCache:
        cache = self._caches.get(model)
        if cache is None:
            cache = self._caches[model] = SnapshotCache(self._plain_snapshot, self._in_flight.watch())
        return cache

    def _plain_snapshot(self, view: WorkerView, fallback: Rates, now: float) -> WorkerSnapshot:
        load, rates = self._in_flight.load(view.worker_id), self._learnt.rates(view, fallback)
        stalled_part, given_seconds = self._learnt.given(view.worker_id, now)
        age_seconds = now - view.received
        return snapshot_of(
            view, load, rates, 0, stalled_part=stalled_part, given_seconds=given_seconds, age_seconds=age_seconds
        )

    def _cached_tokens(
        self,
        view: WorkerView,
        held: Mapping[str, HeldPrefix],
        coming: Mapping[str, int],
        session: LastPlace | None,
        most: int,
        block_hashes: bytes,
    ) -> tuple[int, int]:
        """Returns a worker's cached or soon cached tokens of the prompt, and how many are in host memory only."""
        num_blocks, num_host_blocks = self._held_blocks(view, held, coming, session, most, block_hashes)
        num_blocks = min(most, num_blocks)
        return num_blocks * view.block_size, min(num_host_blocks, num_blocks) * view.block_size

    def _held_blocks(
        self,
        view: WorkerView,
        held: Mapping[str, HeldPrefix],
        coming: Mapping[str, int],
        session: LastPlace | None,
        most: int,
        block_hashes: bytes,
    ) -> tuple[int, int]:
        """Returns the first blocks that a worker holds or will soon hold, and how many of them in host memory only."""
        worker_id = view.worker_id
        epoch = self._index.epoch(worker_id)
        found = held.get(worker_id, _NOTHING_HELD) if epoch == view.epoch else _NOTHING_HELD
        if view.window and found is not _NOTHING_HELD:
            found = self._index.usable(worker_id, found, block_hashes, most, view.block_size, view.window)
        soon = coming.get(worker_id, 0)
        if epoch is None and session is not None and (session.worker_id, session.epoch) == (worker_id, view.epoch):
            # The index has no entries of this worker: assume that it holds the session's last prompt.
            soon = max(soon, session.sketch.common_blocks(block_hashes))
        num_blocks = found.device + found.host
        if soon <= found.device:
            return num_blocks, found.host
        # What others bring to the device before this one must not be brought twice.
        return max(num_blocks, soon), max(0, num_blocks - soon)

    def _still_excluded(self, request: router_pb2.PlaceRequest) -> Collection[str]:
        """Returns the excluded workers, without those that restarted after they were given the request."""
        if not request.excluded_worker_ids:
            return ()
        last = self._decisions.last_of(request.request_id)
        excluded = set(request.excluded_worker_ids)
        if last is None:
            return excluded
        for worker_id in request.excluded_worker_ids:
            worker = self._fleet.find(worker_id)
            if worker is not None and worker.alive and worker.alive_since > last.placed:
                excluded.discard(worker_id)
        return excluded


def _only(worker_id: str, usable: Usable, model: types_pb2.ModelInfo) -> Usable:
    """Returns the workers for a request that only one worker may decode. Raises NotFound, Unavailable."""
    views = [view for view in usable.views if view.worker_id == worker_id or not view.can_decode]
    if any(view.worker_id == worker_id and view.can_decode for view in views):
        return usable._replace(views=views, num_decodes=1)
    if worker_id in usable.refused:
        raise Unavailable(
            f"worker {worker_id!r} {usable.refused[worker_id]}",
            field="worker_id",
            phase=types_pb2.PHASE_PLACEMENT,
            worker_id=worker_id,
            retry_after_ms=_NO_WORKER_RETRY_MS,
        )
    names = ", ".join(sorted(view.worker_id for view in usable.views if view.can_decode)) or "none"
    raise NotFound(
        f"worker_id is {worker_id!r}; the live workers that decode for model {model.name!r} are: {names}",
        field="worker_id",
    )
