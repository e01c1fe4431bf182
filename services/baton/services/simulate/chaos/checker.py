"""Compares what the router believes of caches with the workers' own pools, and how long it takes to be right again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.router.fleet.fleet import Fleet
from baton.router.index.prefix_index import PrefixIndex
from baton.rpc.block_hash import HASH_BYTES
from baton.services.simulate.cluster.worker import SimWorker
from baton.worker.core import BlockHash

WIRE_SECONDS = 0.01  # phantoms gone by then were events in transit

STEADY, DISTURBED, BLIND = "steady", "disturbed", "blind"


@dataclass(slots=True)
class Counts:
    """Prompt blocks, over all decisions and workers."""

    num_decisions: int = 0
    num_believed: int = 0
    num_held: int = 0
    num_phantom: int = 0  # believed, and not held
    num_missed: int = 0  # held, and not believed

    @property
    def phantom_rate(self) -> float:
        """The share of phantoms among the believed blocks."""
        return self.num_phantom / self.num_believed if self.num_believed else 0.0

    @property
    def miss_rate(self) -> float:
        """The share of unknown blocks among the held ones."""
        return self.num_missed / self.num_held if self.num_held else 0.0

    def add(self, other: Counts) -> None:
        """Adds the counts of another run."""
        self.num_decisions += other.num_decisions
        self.num_believed += other.num_believed
        self.num_held += other.num_held
        self.num_phantom += other.num_phantom
        self.num_missed += other.num_missed


@dataclass(frozen=True, slots=True)
class Phantom:
    """A prompt of which the router believes too much: up to the first block that the worker lacks."""

    worker_id: str
    block_hashes: bytes


@dataclass(slots=True)
class Mark:
    """A fault, from when on the index has to become right: its end, where it keeps events from the router."""

    name: str
    due_from: float
    truth_seconds: float = 0.0  # from then to the last phantom that was seen, and stayed


@dataclass(slots=True)
class Checker:
    """Counts by how things stood: steady; disturbed, within a second of a fault; or blind, without the index.

    A phantom that is still there at the next check was no event in transit: it counts for the faults before it, and
    where there are none, in steady times, it should not be.
    """

    fleet: Fleet
    index: PrefixIndex
    workers: Mapping[str, SimWorker]
    counts: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in (STEADY, DISTURBED, BLIND)})
    late: list[str] = field(default_factory=list)  # phantoms that stayed for longer than they may
    marks: list[Mark] = field(default_factory=list)
    _open: dict[Phantom, float] = field(default_factory=dict)  # since when each was seen

    @property
    def has_open(self) -> bool:
        """Whether there is something to look at again."""
        return bool(self._open)

    def check(self, kind: str, block_hashes: bytes, now: float) -> list[Phantom]:
        """Checks one decision's prompt against every worker that could get it. Returns the phantoms."""
        phantoms: list[Phantom] = []
        counts = self.counts[kind]
        counts.num_decisions += 1
        believed = self.index.lookup(block_hashes)
        hashes = _split(block_hashes)
        for view in self.fleet.alive():
            worker = self.workers[view.worker_id]
            belief = believed.get(view.worker_id, 0) if self.index.epoch(view.worker_id) == view.epoch else 0
            truth = num_held(worker, hashes) if worker.alive else 0
            counts.num_believed += belief
            counts.num_held += truth
            counts.num_phantom += max(0, belief - truth)
            counts.num_missed += max(0, truth - belief)
            if belief > truth:
                phantoms.append(Phantom(view.worker_id, block_hashes[: (truth + 1) * HASH_BYTES]))
                self._open.setdefault(phantoms[-1], now)
        return phantoms

    def confirm(self, phantoms: Iterable[Phantom], now: float) -> None:
        """Returns phantoms of steady times, once events in flight have arrived. There should be none."""
        alive = self._epochs()
        self.late += [f"{_words(one, now)}, in steady times" for one in phantoms if self._is_believed(one, alive)]

    def probe(self, prompts: Iterable[bytes], now: float) -> None:
        """Looks for phantoms in prompts of earlier requests. Does not count them."""
        for block_hashes in prompts:
            believed = self.index.lookup(block_hashes)
            hashes = _split(block_hashes)
            for view in self.fleet.alive():
                belief = believed.get(view.worker_id, 0)
                if not belief or self.index.epoch(view.worker_id) != view.epoch:
                    continue
                worker = self.workers[view.worker_id]
                truth = num_held(worker, hashes) if worker.alive else 0
                if belief > truth:
                    self._open.setdefault(Phantom(view.worker_id, block_hashes[: (truth + 1) * HASH_BYTES]), now)

    def follow(self, now: float, right_from: float, truth_seconds: float) -> None:
        """Checks the open phantoms again. `right_from`: since when events reach the router undisturbed."""
        alive = self._epochs()
        for phantom, since in list(self._open.items()):
            if not self._is_believed(phantom, alive):
                del self._open[phantom]
                continue
            if now < right_from:
                continue
            if now - since >= WIRE_SECONDS:
                self._blame(max(since, right_from), now)
            if now - max(since, right_from) > truth_seconds:
                del self._open[phantom]
                self.late.append(_words(phantom, now))

    def _blame(self, since: float, now: float) -> None:
        """Extends the last fault before a phantom was seen, which is not over yet."""
        before = [mark for mark in self.marks if mark.due_from <= since]
        if before:
            last = max(before, key=lambda mark: mark.due_from)
            last.truth_seconds = now - last.due_from

    def _epochs(self) -> dict[str, int]:
        return {view.worker_id: view.epoch for view in self.fleet.alive()}

    def _is_believed(self, phantom: Phantom, alive: Mapping[str, int]) -> bool:
        name, count = phantom.worker_id, len(phantom.block_hashes) // HASH_BYTES
        if name not in alive or self.index.epoch(name) != alive[name]:
            return False
        if self.index.lookup(phantom.block_hashes).get(name, 0) < count:
            return False
        worker = self.workers[name]
        return not worker.alive or num_held(worker, _split(phantom.block_hashes)) < count


def num_held(worker: SimWorker, hashes: list[BlockHash]) -> int:
    """Blocks of a prompt that the worker's pool would find now."""
    return len(worker.engine._scheduler.pool.lookup(hashes))


def _words(phantom: Phantom, now: float) -> str:
    count = len(phantom.block_hashes) // HASH_BYTES
    return f"{now:.3f} s: {phantom.worker_id} lacks block {count} of a prompt, and is believed"


def _split(block_hashes: bytes) -> list[BlockHash]:
    return [BlockHash(block_hashes[i : i + HASH_BYTES]) for i in range(0, len(block_hashes), HASH_BYTES)]
