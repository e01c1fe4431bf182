"""The router of a simulation: the shipped fleet and prefix index, fed with what has reached it by each decision."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.fleet.fleet import Fleet
from baton.router.index.prefix_index import PrefixIndex
from baton.services.simulate.cluster.policy import Policy, PolicyFactory, RouterParts
from baton.services.simulate.cluster.worker import SimWorker
from baton.services.simulate.virtual.timeline import Clock
from baton.v1 import kv_pb2, router_pb2
from baton.worker.kv.cache_events import StoredEvent


class SimRouter:
    """Places by a policy. Workers are looked at when a decision needs them, in the order of their names."""

    def __init__(self, factory: PolicyFactory, seed: int, max_queue_depth: int) -> None:
        self.clock = Clock()
        self.fleet = Fleet(self.clock)
        self.index = PrefixIndex()
        self._workers: list[SimWorker] = []
        self._sequences: dict[str, int] = {}
        self.policy: Policy = factory(RouterParts(self.fleet, self.index, self.clock, seed, max_queue_depth))

    def add(self, worker: SimWorker, now: float) -> None:
        """Adds a worker with an empty cache."""
        self._workers.append(worker)
        self.fleet.add(worker.address)
        self._sequences[worker.worker_id] = 0
        self.index.receive(
            kv_pb2.KvSnapshot(
                worker_id=worker.worker_id,
                epoch=worker.engine.epoch,
                barrier=0,
                tier=kv_pb2.KV_TIER_DEVICE,
                first=True,
                last=True,
            )
        )
        first = self._look_at(worker, now)
        self._apply([first] if first is not None else [])

    def place(self, request: router_pb2.PlaceRequest, now: float) -> router_pb2.PlaceResponse:
        """Returns the policy's answer with all events delivered by now. Raises a ServiceError if it refuses."""
        self.look(now)
        self.clock.now = now
        return self.policy.place(request)

    def look(self, now: float) -> None:
        """Takes all states that have arrived."""
        batches = []
        for worker in self._workers:
            if worker.observable_at <= now and worker.alive:
                batch = self._look_at(worker, now)
                if batch is not None:
                    batches.append(batch)
        self._apply(batches)

    def lose(self, worker: SimWorker, problem: str) -> None:
        """Takes the end of a worker's stream of states."""
        self._workers.remove(worker)
        self.fleet.lose(worker.address, problem)

    def _look_at(self, worker: SimWorker, now: float) -> kv_pb2.KvEventBatch | None:
        """Takes a worker's states. Returns the cache events among them, or None."""
        worker.observe(now)
        for arrived, state in worker.take_reports(now):
            self.clock.now = arrived
            self.fleet.update(worker.address, state)
        events = worker.take_events(now)
        if not events:
            return None
        sequence = self._sequences[worker.worker_id] = self._sequences[worker.worker_id] + 1
        batch = kv_pb2.KvEventBatch(worker_id=worker.worker_id, epoch=worker.engine.epoch, sequence=sequence)
        for event in events:
            kind = batch.events.add()
            entry = kind.stored if isinstance(event, StoredEvent) else kind.removed
            entry.block_hashes = event.block_hashes
            entry.tier = kv_pb2.KV_TIER_DEVICE
        return batch

    def _apply(self, batches: Sequence[kv_pb2.KvEventBatch]) -> None:
        dropped = self.index.apply_all(batches) if batches else {}
        assert not dropped, f"the events of workers {', '.join(dropped)} are in order"
