"""Compares what the router believes of caches with the workers' own pools, at every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.router.fleet import Fleet
from baton.router.prefix_index import PrefixIndex
from baton.rpc.block_hash import HASH_BYTES
from baton.services.simulate.worker import SimWorker
from baton.worker.core import BlockHash

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
        """Of the believed blocks."""
        return self.num_phantom / self.num_believed if self.num_believed else 0.0

    @property
    def miss_rate(self) -> float:
        """Of the held blocks."""
        return self.num_missed / self.num_held if self.num_held else 0.0


@dataclass(slots=True)
class Checker:
    """Counts by how things stood: steady; disturbed, within a second of a fault; or blind, without the index."""

    counts: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in (STEADY, DISTURBED, BLIND)})
    late: list[str] = field(default_factory=list)  # phantoms that stayed for a second though nothing was disturbed

    def check(
        self,
        kind: str,
        block_hashes: bytes,
        fleet: Fleet,
        index: PrefixIndex,
        workers: Mapping[str, SimWorker],
    ) -> list[tuple[SimWorker, bytes]]:
        """One decision's prompt against every worker that could get it.

        Returns each worker of which too much is believed, with the prompt up to the first block that it lacks.
        """
        counts = self.counts[kind]
        counts.num_decisions += 1
        believed = index.lookup(block_hashes)
        hashes = [BlockHash(block_hashes[i : i + HASH_BYTES]) for i in range(0, len(block_hashes), HASH_BYTES)]
        phantoms = []
        for view in fleet.alive():
            worker = workers[view.worker_id]
            belief = believed.get(view.worker_id, 0) if index.epoch(view.worker_id) == view.epoch else 0
            truth = num_held(worker, hashes) if worker.alive else 0
            counts.num_believed += belief
            counts.num_held += truth
            counts.num_phantom += max(0, belief - truth)
            counts.num_missed += max(0, truth - belief)
            if belief > truth:
                phantoms.append((worker, block_hashes[: (truth + 1) * HASH_BYTES]))
        return phantoms

    def check_again(self, now: float, worker: SimWorker, block_hashes: bytes, index: PrefixIndex) -> None:
        """A phantom of a second ago: it must be gone, from the index or from being one."""
        count = len(block_hashes) // HASH_BYTES
        if (
            index.lookup(block_hashes).get(worker.worker_id, 0) < count
            or index.epoch(worker.worker_id) != worker.engine.epoch
        ):
            return
        hashes = [BlockHash(block_hashes[i : i + HASH_BYTES]) for i in range(0, len(block_hashes), HASH_BYTES)]
        held = num_held(worker, hashes) if worker.alive else 0
        if held < count:
            self.late.append(f"{now:.3f} s: {worker.worker_id} holds {held} blocks of a prompt, believed are {count}")


def num_held(worker: SimWorker, hashes: list[BlockHash]) -> int:
    """Blocks of a prompt that the worker's pool would find now."""
    return len(worker.engine._scheduler.pool.lookup(hashes))
