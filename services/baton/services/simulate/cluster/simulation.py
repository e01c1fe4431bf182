"""A run: a cluster, its arrivals, and the records that come of them. Equal inputs give equal records, bit by bit."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.services.simulate.cluster.gateway import SimGateway
from baton.services.simulate.cluster.metrics import Record
from baton.services.simulate.cluster.network import Network
from baton.services.simulate.cluster.policy import PolicyFactory
from baton.services.simulate.cluster.router import SimRouter
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.worker import SimWorker
from baton.services.simulate.requests.workloads import Arrival
from baton.services.simulate.virtual.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run."""

    records: Sequence[Record]
    simulated_seconds: float
    wall_seconds: float
    num_steps: int
    num_events: int


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection: a run makes hardly any cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Simulation:
    """Workers, one router and its policy, and the gateways, on one timeline."""

    def __init__(
        self,
        settings: ClusterSettings,
        factory: PolicyFactory,
        namespace: bytes,
        seed: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        settings.validate()
        self.settings = settings
        self.timeline = timeline or Timeline()
        self.network = Network(self.timeline, settings.delays.peer)
        self.router = self._make_router(factory, seed)
        self.workers: dict[str, SimWorker] = {}
        self.gateway = SimGateway(self.timeline, settings, self.router, self.workers, namespace)
        self._num_epochs = 0
        self._is_coming = False
        for number, role in enumerate(settings.roles):
            self.start_worker(f"w{number:02d}", role)

    def _make_router(self, factory: PolicyFactory, seed: int) -> SimRouter:
        return SimRouter(factory, seed, self.settings.max_queue_depth)

    def start_worker(self, worker_id: str, role: str) -> SimWorker:
        """Adds a new worker."""
        self._num_epochs += 1000
        worker = SimWorker(
            worker_id,
            role,
            self.settings,
            self.network,
            self._num_epochs,
            self.gateway.on_outputs,
            self.gateway.on_refused,
        )
        self.workers[worker_id] = worker
        self.router.add(worker, self.timeline.clock.now)
        return worker

    def kill_worker(self, worker: SimWorker) -> None:
        """Kills a worker without a shutdown: its streams end at once."""
        worker.kill()
        self.network.leave(worker)
        self.router.lose(worker, "its stream ended")
        self.gateway.lose(worker)

    def run(self, arrivals: Iterable[Arrival], drain_seconds: float) -> Run:
        """Runs until every request has ended, or until a time after the last arrival."""
        began = time.perf_counter()
        self._is_coming = True
        self._expect(iter(arrivals))
        with uncollected():
            self.timeline.run(float("inf"), lambda: not self._is_coming)
            last = self.timeline.clock.now
            self.timeline.run(last + drain_seconds, lambda: self.gateway.num_open == 0)
        return Run(
            self.gateway.records,
            self.timeline.clock.now,
            time.perf_counter() - began,
            sum(worker.engine.counters().num_steps for worker in self.workers.values()),
            self.timeline.num_events,
        )

    def _expect(self, coming: Iterator[Arrival]) -> None:
        arrival = next(coming, None)
        if arrival is None:
            self._is_coming = False
            return

        def arrive() -> None:
            self.gateway.arrive(arrival)
            self._expect(coming)

        self.timeline.at(arrival.time, arrive)
