"""Faults by seed: a small fleet under the real index path, what was broken, and whether the index told the truth."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from baton.router.index_client import IndexClient
from baton.services.simulate.checker import BLIND, DISTURBED, STEADY, Checker
from baton.services.simulate.faults import FAULTS, Fault
from baton.services.simulate.policy import BatonPolicy, PolicyFactory
from baton.services.simulate.router import SimRouter
from baton.services.simulate.settings import ClusterSettings
from baton.services.simulate.silence import silenced
from baton.services.simulate.simulation import Simulation
from baton.services.simulate.text import Texts
from baton.services.simulate.virtual_kvstore import VirtualKvstore, VirtualStore
from baton.services.simulate.virtual_loop import LoopTimeline
from baton.services.simulate.virtual_rpc import Link, VirtualChannel
from baton.services.simulate.worker import SimWorker
from baton.services.simulate.workloads import WORKLOADS, generate
from baton.v1 import kv_pb2, router_pb2
from baton.worker.engine_host import EngineHost
from baton.worker.link import Kind
from baton.worker.publisher import Publisher
from baton.worker.settings import EngineSettings

TRUTH_SECONDS = 1.0  # after any fault, the index has to be right again
_SETTLE_SECONDS = 6.0  # after the last fault, with traffic; and after the traffic
_STEADY_PHANTOMS = 0.03  # of small pools under pressure: what is evicted is told a moment later

CLUSTER = ClusterSettings(
    roles=("both", "both", "prefill", "decode"),
    num_blocks=1200,
    max_model_len=65_536,
    engine=EngineSettings(max_num_requests=32, max_num_batched_tokens=2048),
    coast=False,
    exact=True,
)


@dataclass(slots=True)
class ChaosReport:
    """What one seed brought."""

    seed: int
    faults: list[str]
    num_requests: int
    num_failed: int
    checker: Checker
    problems: list[str] = field(default_factory=list)  # empty: every promise was kept


class _Host:
    """What a publisher needs of an engine's host: frames to the engine's loop, and back."""

    def __init__(self, simulation: ChaosSimulation, worker: SimWorker) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self._simulation = simulation
        self._worker = worker
        self._handlers: dict[int, Callable[[int, bytes], None]] = {}
        worker.publish(self._from_engine)

    def on(self, kind: int, handler: Callable[[int, bytes], None]) -> None:
        """Who is told of frames from the engine."""
        self._handlers[kind] = handler

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """A frame to the engine."""
        self._worker.publish_frame(Kind(kind), channel)

    def _from_engine(self, kind: int, channel: int, payload: bytes) -> None:
        if self._worker.alive:
            self._simulation.timeline.at(
                self._worker.clock.now, lambda: self._handlers[kind](channel, payload) if self._worker.alive else None
            )


class _ChaosRouter(SimRouter):
    """Its index follows the kvstore; every decision is checked."""

    def __init__(self, simulation: ChaosSimulation, factory: PolicyFactory, seed: int, max_queue_depth: int) -> None:
        super().__init__(factory, seed, max_queue_depth)
        self.blocked: set[str] = set()  # workers whose states do not arrive
        self._simulation = simulation

    def add(self, worker: SimWorker, now: float) -> None:
        """The index is told by the kvstore."""
        self._workers.append(worker)
        self.fleet.add(worker.address)
        self._look_at(worker, now)

    def place(self, request: router_pb2.PlaceRequest, now: float) -> router_pb2.PlaceResponse:
        """Checks, then places."""
        self.look(now)
        simulation = self._simulation
        checker, kind = simulation.checker, simulation.standing(now)
        for worker, prompt in checker.check(kind, request.block_hashes, self.fleet, self.index, simulation.workers):
            simulation.timeline.after(TRUTH_SECONDS, partial(self._check_again, worker, prompt))
        self.clock.now = now
        return self.policy.place(request)

    def _check_again(self, worker: SimWorker, prompt: bytes) -> None:
        now = self._simulation.timeline.clock.now
        self.look(now)
        is_known = any(view.worker_id == worker.worker_id for view in self.fleet.alive())
        if is_known and self._simulation.standing(now) == STEADY:
            self._simulation.checker.check_again(now, worker, prompt, self.index)

    def _look_at(self, worker: SimWorker, now: float) -> kv_pb2.KvEventBatch | None:
        return super()._look_at(worker, now) if worker.worker_id not in self.blocked else None


class ChaosSimulation(Simulation):
    """A cluster whose workers publish to a kvstore that the router follows. Make and use it inside its loop."""

    router: _ChaosRouter

    def __init__(self, timeline: LoopTimeline, namespace: bytes, seed: int) -> None:
        self.checker = Checker()
        self.store = VirtualStore()
        self.router_link = Link()
        self.worker_links: dict[str, Link] = {}
        self._loop_timeline = timeline
        self._publishers: dict[str, asyncio.Task[None]] = {}
        self._disturbed_until = 0.0
        self._blind: dict[str, float] = {}  # what keeps events from the router, and until when
        names = [f"w{number:02d}" for number in range(len(CLUSTER.roles))]
        self.worker_links = {name: Link() for name in names}
        self.kvstore = VirtualKvstore(self.store, [self.router_link, *self.worker_links.values()])
        self.kvstore.start()
        super().__init__(CLUSTER, BatonPolicy, namespace, seed, timeline)
        client = IndexClient(self.router.index, ["kvstore"], dial=lambda _: self._dial(self.router_link))  # type: ignore[arg-type,return-value]
        self._follower = timeline.spawn(client.run())

    def standing(self, now: float) -> str:
        """How things stand for the index."""
        if any(now < until for until in self._blind.values()):
            return BLIND
        return DISTURBED if now < self._disturbed_until else STEADY

    def disturb(self) -> None:
        """A fault begins: the index may be wrong for a second."""
        self._disturbed_until = max(self._disturbed_until, self.timeline.clock.now + TRUTH_SECONDS)

    def blind(self, cause: str, seconds: float) -> None:
        """Events cannot reach the router meanwhile; it places by what it knew."""
        self._blind[cause] = self.timeline.clock.now + seconds + TRUTH_SECONDS

    def start_worker(self, worker_id: str, role: str) -> SimWorker:
        """A worker, and its publisher."""
        worker = super().start_worker(worker_id, role)
        link = self.worker_links[worker_id]
        publisher = Publisher(_as_host(_Host(self, worker)), ["kvstore"], dial=lambda _: self._dial(link))  # type: ignore[arg-type,return-value]
        self._publishers[worker_id] = self._loop_timeline.spawn(publisher.run())
        return worker

    def kill_worker(self, worker: SimWorker) -> None:
        """With its publisher."""
        self._publishers.pop(worker.worker_id).cancel()
        self.worker_links[worker.worker_id].cut()
        super().kill_worker(worker)

    def disagreements(self) -> list[str]:
        """Workers whose entries are not their blocks, after everything has settled."""
        problems = []
        for name, worker in self.workers.items():
            known, held = self.router.index.num_blocks(name), len(worker.engine.cached_hashes()) // 16
            if worker.alive and known != held:
                problems.append(f"{name} holds {held} blocks, the router's index has {known}")
        return problems

    def _make_router(self, factory: PolicyFactory, seed: int) -> _ChaosRouter:
        return _ChaosRouter(self, factory, seed, self.settings.max_queue_depth)

    def _dial(self, link: Link) -> VirtualChannel:
        return VirtualChannel(link, self.kvstore.servicer)


def _as_host(host: _Host) -> EngineHost:
    return host  # type: ignore[return-value]  # the part of it that a publisher uses


def run_seeds(seeds: Sequence[int], seconds: float, num_processes: int) -> Iterator[ChaosReport]:
    """Each seed's report, in order; several at a time."""
    if num_processes <= 1 or len(seeds) == 1:
        yield from (run_chaos(seed, seconds) for seed in seeds)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_chaos, seeds, itertools.repeat(seconds))


@silenced()
def run_chaos(seed: int, seconds: float = 30.0, rate: float = 14.0) -> ChaosReport:
    """One seed's traffic and faults. Equal seeds give equal reports."""
    draws = random.Random(f"chaos {seed}")
    random.seed(seed)  # what the product's own backoffs draw from
    timeline = LoopTimeline()
    try:
        return timeline.loop.run_until_complete(_prepare(timeline, draws, seed, seconds, rate))(timeline)
    finally:
        timeline.close()


async def _prepare(
    timeline: LoopTimeline, draws: random.Random, seed: int, seconds: float, rate: float
) -> Callable[[LoopTimeline], ChaosReport]:
    texts = Texts(CLUSTER.block_size)
    workload = WORKLOADS[draws.choice(("chat", "agents", "rag"))]
    arrivals = generate(workload, texts, rate, seconds + _SETTLE_SECONDS, seed)
    simulation = ChaosSimulation(timeline, texts.namespace, seed)
    simulation.disturb()
    faults: list[str] = []
    time = 1.0
    while (time := time + draws.expovariate(0.5) + 0.2) < seconds - 4.0:
        timeline.at(time, partial(_inflict, simulation, draws.choice(FAULTS), draws, faults))

    def finish(timeline: LoopTimeline) -> ChaosReport:
        simulation.run(arrivals, 60.0)
        settled = timeline.clock.now + _SETTLE_SECONDS
        timeline.run(settled, lambda: False)
        simulation.router.look(timeline.clock.now)
        return _report(simulation, seed, faults)

    return finish


def _inflict(simulation: ChaosSimulation, fault: Fault, draws: random.Random, faults: list[str]) -> None:
    simulation.disturb()
    name, seconds = fault(simulation, draws)
    faults.append(f"{simulation.timeline.clock.now:.2f} s {name}" + (f" for {seconds:.2f} s" if seconds else ""))


def _report(simulation: ChaosSimulation, seed: int, faults: list[str]) -> ChaosReport:
    records = simulation.gateway.records
    report = ChaosReport(seed, faults, len(records), sum(1 for one in records if one.error), simulation.checker)
    steady = simulation.checker.counts[STEADY]
    if steady.phantom_rate > _STEADY_PHANTOMS:
        report.problems.append(
            f"{100 * steady.phantom_rate:.3f} % of the believed blocks were phantoms in steady times"
        )
    report.problems += simulation.checker.late[:5]
    report.problems += simulation.disagreements()
    unfinished = sum(1 for one in records if one.finished < 0 and not one.error)
    if unfinished:
        report.problems.append(f"{unfinished} requests never ended")
    for name, worker in simulation.workers.items():
        audit = worker.engine.audit()
        if worker.alive and (audit.num_held_blocks or audit.num_leased_blocks):
            report.problems.append(f"{name} still has {audit.num_held_blocks} held, {audit.num_leased_blocks} leased")
    return report
