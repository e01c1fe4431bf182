"""Placements that the workers' states do not show yet, and the prefixes that they are about to cache.

A burst is placed faster than workers report. So each placement counts as load from the moment it is made until the
workers' states can be expected to include it, and its prompt counts as cached where it is about to be computed. Until
its outcome is reported it counts for its tenant. Placements of other routers count like own ones.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.requests.prompt_sketch import Sketch
from baton.rpc.block_hash import HASH_BYTES

# A state received this long after a placement shows it: submit, one engine step, and the worker's report interval.
_SETTLE_SECONDS = 0.25
# A placement without an outcome expires after this time, with the prefix that it was to cache.
_FORGET_SECONDS = 120.0
_PREFIXES_PER_WORKER = 4
# Ends that are remembered: those of the seconds that a router takes to find its stream to another dead, and dial again.
_MAX_ENDED = 20_000
OWN = 0  # the origin of this router's placements


class Share(NamedTuple):
    """The load of one placement on one worker."""

    worker_id: str
    num_requests: int  # that will decode there: each choice is one; 0: it only prefills
    num_prefill_tokens: int
    num_blocks: int


class Placed(NamedTuple):
    """A placement as routers exchange it."""

    placement_id: int
    shares: tuple[Share, ...]
    sketch: Sketch
    tenant: str = ""
    weight: float = 1.0  # the tenant's
    num_tokens: int = 0  # prompt tokens to compute and output tokens expected
    priority: int = 0
    origin: int = OWN  # the router that made it


@dataclass(slots=True)
class PendingLoad:
    """All of one worker's shares that its state may not show yet, and what it shows no longer rightly."""

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_unseen_tokens: int = 0  # those of them that were placed after the worker's last state: it cannot show them
    num_blocks: int = 0
    num_placements: int = 0
    num_unseen_requests: int = 0  # placed after the worker's last state
    num_ended_requests: int = 0  # ended since the worker's last state, which shows them
    num_open_requests: int = 0  # all without an outcome, shown or not


NO_LOAD = PendingLoad()


@dataclass(slots=True)
class TenantLoad:
    """A tenant's load in the fleet."""

    weight: float
    num_tokens: int = 0
    num_placements: int = 0


@dataclass(slots=True)
class _Placement:
    placed: Placed
    at: float
    unsettled: dict[str, Share]  # by worker; what its state does not show yet


@dataclass(slots=True)
class _WorkerPending:
    load: PendingLoad = field(default_factory=PendingLoad)
    heard: float = -math.inf  # when its last state was received
    placements: OrderedDict[int, _Placement] = field(default_factory=OrderedDict)  # unsettled, oldest first
    priorities: dict[int, int] = field(default_factory=dict)  # of placements not reported on: how many of each


class InFlight:
    """Counts placements in and out."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantLoad] = {}
        self._priorities: Counter[int] = Counter()
        # The latest reported ones, oldest first. A placement and its end may arrive from other routers in any order.
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._placements: OrderedDict[int, _Placement] = OrderedDict()  # oldest first
        self._workers: dict[str, _WorkerPending] = {}
        # First block -> worker -> last block -> the last prompts placed there.
        self._prefixes: dict[bytes, dict[str, OrderedDict[bytes, tuple[int, Sketch]]]] = {}
        self._watchers: list[set[str]] = []

    def __len__(self) -> int:
        """Returns the number of placements without an outcome."""
        return len(self._placements)

    def watch(self) -> set[str]:
        """Returns a set to which workers are added when their load changes. Its reader may clear it."""
        changed: set[str] = set()
        self._watchers.append(changed)
        return changed

    def unwatch(self, changed: set[str]) -> None:
        """Stops adding workers to a set of `watch`."""
        self._watchers = [one for one in self._watchers if one is not changed]

    def all(self) -> Iterator[tuple[Placed, float]]:
        """Yields every placement with the time at which it was made."""
        return ((one.placed, one.at) for one in self._placements.values())

    def ended(self) -> Iterable[int]:
        """Yields the latest ended placements, known or not."""
        return self._ended.keys()

    def begin(self, placed: Placed, at: float) -> None:
        """Counts a placement that was made then. One that is known already, or has ended, is ignored."""
        if placed.placement_id in self._placements or placed.placement_id in self._ended:
            return
        placement = _Placement(placed, at, {share.worker_id: share for share in placed.shares})
        self._placements[placed.placement_id] = placement
        for share in placed.shares:
            pending = self._workers.get(share.worker_id)
            if pending is None:
                pending = self._workers[share.worker_id] = _WorkerPending()
            pending.placements[placed.placement_id] = placement
            pending.priorities[placed.priority] = pending.priorities.get(placed.priority, 0) + 1
            self._add(pending.load, share, 1)
            pending.load.num_open_requests += share.num_requests
            if at >= pending.heard:
                pending.load.num_unseen_requests += share.num_requests
                pending.load.num_unseen_tokens += share.num_prefill_tokens
            if placed.sketch.hashes:
                self._remember_prefix(placed, share.worker_id)
        self._priorities[placed.priority] += 1
        tenant = self.tenants.get(placed.tenant)
        if tenant is None:
            tenant = self.tenants[placed.tenant] = TenantLoad(placed.weight)
        tenant.weight = placed.weight
        tenant.num_tokens += placed.num_tokens
        tenant.num_placements += 1

    def end(self, placement_id: int) -> Placed | None:
        """Ends a placement that has an outcome or never began. Returns None if it is unknown or expired."""
        self._ended[placement_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return self._drop(placement_id)

    def _drop(self, placement_id: int) -> Placed | None:
        placement = self._placements.pop(placement_id, None)
        if placement is None:
            return None
        placed = placement.placed
        for share in placed.shares:
            self._settle(share.worker_id, placement)
            self._uncount(share, placement)
            self._forget_prefix(placed, share.worker_id)
        self._priorities[placed.priority] -= 1
        if not self._priorities[placed.priority]:
            del self._priorities[placed.priority]
        tenant = self.tenants[placed.tenant]
        tenant.num_tokens -= placed.num_tokens
        tenant.num_placements -= 1
        if not tenant.num_placements:
            del self.tenants[placed.tenant]
        return placed

    def end_all_of(self, origin: int) -> int:
        """Drops the placements of a lost router, whose outcomes will not arrive. Returns their number."""
        gone = [one.placed.placement_id for one in self._placements.values() if one.placed.origin == origin]
        for placement_id in gone:
            self._drop(placement_id)
        return len(gone)

    def on_state(self, worker_id: str, received: float) -> None:
        """Takes a worker's state: it includes every placement that is old enough."""
        pending = self._workers.get(worker_id)
        limit = received - _SETTLE_SECONDS
        while pending is not None and pending.placements:
            oldest = next(iter(pending.placements.values()))
            if oldest.at > limit:
                break
            self._settle(worker_id, oldest)
        if pending is not None:
            pending.heard = received
            pending.load.num_unseen_requests = pending.load.num_ended_requests = 0
            pending.load.num_unseen_tokens = 0

    def lose(self, worker_id: str) -> None:
        """Drops all placements on a dead worker."""
        pending = self._workers.pop(worker_id, None)
        if pending is not None:
            for placement in pending.placements.values():
                placement.unsettled.pop(worker_id, None)
        self.forget_prefixes(worker_id)

    def forget_prefixes(self, worker_id: str) -> None:
        """Drops the expected prefixes of a worker whose cache was reset."""
        for workers in self._prefixes.values():
            workers.pop(worker_id, None)

    def expire(self, now: float) -> None:
        """Drops expired placements."""
        limit = now - _FORGET_SECONDS
        while self._placements:
            placement_id, oldest = next(iter(self._placements.items()))
            if oldest.at > limit:
                break
            self._drop(placement_id)

    def load(self, worker_id: str) -> PendingLoad:
        """Returns the load in flight to a worker."""
        pending = self._workers.get(worker_id)
        return pending.load if pending is not None else NO_LOAD

    def has_less_urgent(self, priority: int) -> bool:
        """Returns whether a request of this priority overtakes any."""
        return any(other > priority for other in self._priorities)

    def share_ahead(self, worker_id: str, priority: int) -> float:
        """Returns the part of a worker's requests, in [0, 1], that a new one of this priority does not overtake."""
        pending = self._workers.get(worker_id)
        if pending is None:
            return 1.0
        counts = pending.priorities
        if not counts or (len(counts) == 1 and priority in counts):
            return 1.0
        overtaken = sum([count for other, count in counts.items() if other > priority])
        return 1.0 - overtaken / sum(counts.values()) if overtaken else 1.0

    def expected_prefixes(self, block_hashes: bytes) -> Mapping[str, int]:
        """Returns how many of a prompt's first blocks each worker is about to hold."""
        workers = self._prefixes.get(block_hashes[:HASH_BYTES])
        if not workers:
            return {}
        return {
            worker_id: max([sketch.common_blocks(block_hashes) for _, sketch in prompts.values()])
            for worker_id, prompts in workers.items()
            if prompts
        }

    def _settle(self, worker_id: str, placement: _Placement) -> None:
        pending = self._workers.get(worker_id)
        share = placement.unsettled.pop(worker_id, None)
        if pending is not None and share is not None:
            pending.placements.pop(placement.placed.placement_id, None)
            self._add(pending.load, share, -1)
            if placement.at >= pending.heard:
                pending.load.num_unseen_requests -= share.num_requests
                pending.load.num_unseen_tokens -= share.num_prefill_tokens

    def _add(self, load: PendingLoad, share: Share, sign: int) -> None:
        load.num_requests += sign * share.num_requests
        load.num_prefill_tokens += sign * share.num_prefill_tokens
        load.num_blocks += sign * share.num_blocks
        load.num_placements += sign
        self._mark_changed(share.worker_id)

    def _mark_changed(self, worker_id: str) -> None:
        for changed in self._watchers:
            changed.add(worker_id)

    def _uncount(self, share: Share, placement: _Placement) -> None:
        worker_id, priority = share.worker_id, placement.placed.priority
        pending = self._workers.get(worker_id)
        if pending is None or priority not in pending.priorities:
            return
        pending.load.num_open_requests -= share.num_requests
        if placement.at < pending.heard:
            pending.load.num_ended_requests += share.num_requests
        if share.num_requests:
            self._mark_changed(worker_id)
        pending.priorities[priority] -= 1
        if not pending.priorities[priority]:
            del pending.priorities[priority]
            if not pending.priorities and not pending.placements:
                del self._workers[worker_id]

    def _remember_prefix(self, placed: Placed, worker_id: str) -> None:
        prompts = self._prefixes.setdefault(placed.sketch.first_block, {}).setdefault(worker_id, OrderedDict())
        last = placed.sketch.last_block
        prompts[last] = (placed.placement_id, placed.sketch)
        prompts.move_to_end(last)
        if len(prompts) > _PREFIXES_PER_WORKER:
            prompts.popitem(last=False)

    def _forget_prefix(self, placed: Placed, worker_id: str) -> None:
        first, last = placed.sketch.first_block, placed.sketch.last_block
        workers = self._prefixes.get(first)
        if workers is None:
            return
        prompts = workers.get(worker_id)
        if prompts is not None:
            known = prompts.get(last)
            if known is not None and known[0] == placed.placement_id:
                del prompts[last]
            if not prompts:
                del workers[worker_id]
        if not workers:
            del self._prefixes[first]
