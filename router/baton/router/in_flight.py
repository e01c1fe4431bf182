"""Placements that the workers' own states do not show yet, and the prefixes they are about to cache.

A burst is placed faster than workers report. So each placement counts as load from the moment it is made until its
workers' states can be expected to show it, and its prompt counts as cached where it is about to be computed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.rpc.block_hash import HASH_BYTES

# A state received this long after a placement shows it: submit, one engine step, and the worker's report interval.
_SETTLE_SECONDS = 0.25
# A placement nobody reports on is forgotten, and so is the prefix that it was to leave.
_FORGET_SECONDS = 30.0
_PREFIXES_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Share:
    """What one placement means for one worker."""

    worker_id: str
    num_requests: int  # that will decode there: 1 or 0
    num_prefill_tokens: int
    num_blocks: int


@dataclass(slots=True)
class PendingLoad:
    """All of one worker's shares that its state does not show."""

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0
    num_placements: int = 0


NO_LOAD = PendingLoad()


@dataclass(slots=True)
class _Placement:
    placement_id: int
    placed: float
    shares: dict[str, Share]  # by worker; what its state does not show yet
    first_block: bytes
    worker_ids: tuple[str, ...]


@dataclass(slots=True)
class _WorkerPending:
    load: PendingLoad = field(default_factory=PendingLoad)
    placements: OrderedDict[int, _Placement] = field(default_factory=OrderedDict)  # unsettled, oldest first


class InFlight:
    """Counts placements in and out."""

    def __init__(self) -> None:
        self._placements: OrderedDict[int, _Placement] = OrderedDict()  # oldest first
        self._workers: dict[str, _WorkerPending] = {}
        # First block -> worker -> the last prompts placed there.
        self._prefixes: dict[bytes, dict[str, OrderedDict[bytes, int]]] = {}

    def __len__(self) -> int:
        """Placements that nobody has reported on yet."""
        return len(self._placements)

    def begin(self, placement_id: int, now: float, shares: tuple[Share, ...], block_hashes: bytes) -> None:
        """Counts a placement."""
        placement = _Placement(
            placement_id,
            now,
            {share.worker_id: share for share in shares},
            block_hashes[:HASH_BYTES],
            tuple(share.worker_id for share in shares),
        )
        self._placements[placement_id] = placement
        for share in shares:
            pending = self._workers.setdefault(share.worker_id, _WorkerPending())
            pending.placements[placement_id] = placement
            _add(pending.load, share, 1)
            if block_hashes:
                self._remember_prefix(placement, share.worker_id, block_hashes)

    def end(self, placement_id: int) -> bool:
        """The request ended, or never began. False: not known, or forgotten."""
        placement = self._placements.pop(placement_id, None)
        if placement is None:
            return False
        for worker_id in placement.worker_ids:
            self._settle(worker_id, placement)
            self._forget_prefix(placement, worker_id)
        return True

    def hear(self, worker_id: str, received: float) -> None:
        """A worker's state was received: it shows every placement that is old enough."""
        pending = self._workers.get(worker_id)
        if pending is None:
            return
        limit = received - _SETTLE_SECONDS
        for placement in list(itertools.takewhile(lambda p: p.placed <= limit, pending.placements.values())):
            self._settle(worker_id, placement)

    def lose(self, worker_id: str) -> None:
        """A worker died: nothing is on its way to it any more."""
        pending = self._workers.pop(worker_id, None)
        if pending is not None:
            for placement in pending.placements.values():
                placement.shares.pop(worker_id, None)
        for workers in self._prefixes.values():
            workers.pop(worker_id, None)

    def expire(self, now: float) -> None:
        """Forgets placements that nobody reported on."""
        limit = now - _FORGET_SECONDS
        for placement in list(itertools.takewhile(lambda p: p.placed <= limit, self._placements.values())):
            self.end(placement.placement_id)

    def load(self, worker_id: str) -> PendingLoad:
        """What a worker has coming."""
        pending = self._workers.get(worker_id)
        return pending.load if pending is not None else NO_LOAD

    def expected_prefixes(self, block_hashes: bytes) -> Mapping[str, int]:
        """How many of a prompt's first blocks each worker is about to hold."""
        workers = self._prefixes.get(block_hashes[:HASH_BYTES])
        if not workers:
            return {}
        return {
            worker_id: max(_common_blocks(block_hashes, prompt) for prompt in prompts)
            for worker_id, prompts in workers.items()
            if prompts
        }

    def _settle(self, worker_id: str, placement: _Placement) -> None:
        pending = self._workers.get(worker_id)
        share = placement.shares.pop(worker_id, None)
        if pending is None or share is None:
            return
        pending.placements.pop(placement.placement_id, None)
        _add(pending.load, share, -1)
        if not pending.placements:
            del self._workers[worker_id]

    def _remember_prefix(self, placement: _Placement, worker_id: str, block_hashes: bytes) -> None:
        prompts = self._prefixes.setdefault(placement.first_block, {}).setdefault(worker_id, OrderedDict())
        prompts[block_hashes] = placement.placement_id
        prompts.move_to_end(block_hashes)
        if len(prompts) > _PREFIXES_PER_WORKER:
            prompts.popitem(last=False)

    def _forget_prefix(self, placement: _Placement, worker_id: str) -> None:
        workers = self._prefixes.get(placement.first_block, {})
        prompts = workers.get(worker_id, OrderedDict())
        for block_hashes, placement_id in list(prompts.items()):
            if placement_id == placement.placement_id:
                del prompts[block_hashes]
        if not prompts:
            workers.pop(worker_id, None)
        if not workers:
            self._prefixes.pop(placement.first_block, None)


def _add(load: PendingLoad, share: Share, sign: int) -> None:
    load.num_requests += sign * share.num_requests
    load.num_prefill_tokens += sign * share.num_prefill_tokens
    load.num_blocks += sign * share.num_blocks
    load.num_placements += sign


def _common_blocks(one: bytes, other: bytes) -> int:
    """Blocks that two prompts begin with. Hashes are chained: once they differ, they differ to the end."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if one[end - HASH_BYTES : end] == other[end - HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low
