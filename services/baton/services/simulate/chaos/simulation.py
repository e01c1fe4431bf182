"""A small fleet under faults by seed: the real index path, and whether the index stayed true."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.router.index.client import IndexClient
from baton.services.simulate.chaos.checker import BLIND, DISTURBED, STEADY, WIRE_SECONDS, Checker, Counts, Mark, Phantom
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.policy import BatonPolicy, PolicyFactory
from baton.services.simulate.cluster.router import SimRouter
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.simulation import Simulation
from baton.services.simulate.cluster.worker import SimWorker
from baton.services.simulate.virtual.kvstore import VirtualKvstore, VirtualStore
from baton.services.simulate.virtual.loop import LoopTimeline
from baton.services.simulate.virtual.rpc import Link, VirtualChannel
from baton.v1 import kv_pb2, router_pb2
from baton.worker.front.engine_client import EngineClient
from baton.worker.front.publisher import Publisher
from baton.worker.link.frames import Kind
from baton.worker.scheduling.settings import EngineSettings

TRUTH_SECONDS = 1.0  # after any fault, the index has to be right again
_LOOK_SECONDS = 0.02  # between looks at a phantom
_PROBED_PROMPTS = 10  # the last ones, after a fault
_PROBES = (0.03, 0.1, 0.3)  # seconds after it
_STEADY_PHANTOMS = 0.001  # of the believed blocks: an eviction is reported a moment later
_MIN_BELIEVED = 1_000_000  # for such a rate: one eviction in transit can make tens of phantoms

# A slow device: few steps, and each long enough for something to happen in it.
CLUSTER = ClusterSettings(
    roles=("both", "both", "prefill", "decode"),
    device=DeviceModel(base=0.015, per_prefill_token=60e-6),
    block_size=16,
    num_blocks=240,
    max_model_len=4096,
    engine=EngineSettings(max_num_requests=32, max_num_batched_tokens=512),
    exact=True,
)


@dataclass(slots=True)
class ChaosReport:
    """The result of one seed."""

    seed: int
    faults: list[str]
    num_requests: int
    num_failed: int
    counts: dict[str, Counts]
    truth_seconds: list[float] = field(default_factory=list)  # of each disturbance, until the index was right
    problems: list[str] = field(default_factory=list)  # empty: every promise was kept
    cpu_seconds: float = 0.0


@dataclass(slots=True)
class ChaosTotals:
    """The results of all seeds."""

    num_seeds: int = 0
    num_bad: int = 0
    num_faults: int = 0
    num_requests: int = 0
    cpu_seconds: float = 0.0
    counts: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in (STEADY, DISTURBED, BLIND)})
    truth_seconds: list[float] = field(default_factory=list)

    def add(self, report: ChaosReport) -> None:
        self.num_seeds += 1
        self.num_bad += bool(report.problems)
        self.num_faults += len(report.faults)
        self.num_requests += report.num_requests
        self.cpu_seconds += report.cpu_seconds
        self.truth_seconds += report.truth_seconds
        for kind, counts in report.counts.items():
            self.counts[kind].add(counts)

    @property
    def problem(self) -> str:
        """Returns what all results together show to be wrong. Empty if nothing, or if there are too few."""
        steady = self.counts[STEADY]
        if steady.num_believed < _MIN_BELIEVED or steady.phantom_rate <= _STEADY_PHANTOMS:
            return ""
        return f"{100 * steady.phantom_rate:.3f} % of the believed blocks were phantoms in steady times"


class _EngineLoop:
    """The part of an EngineClient that a publisher uses: frames to the engine's loop, and back."""

    def __init__(self, simulation: ChaosSimulation, worker: SimWorker) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self._simulation = simulation
        self._worker = worker
        self._handlers: dict[int, Callable[[int, bytes], None]] = {}
        worker.publish(self._from_engine)

    def on(self, kind: int, handler: Callable[[int, bytes], None]) -> None:
        """Sets the receiver of frames from the engine."""
        self._handlers[kind] = handler

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame to the engine."""
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
        """Does nothing: the kvstore updates the index."""
        self._workers.append(worker)
        self.fleet.add(worker.address)
        self._look_at(worker, now)

    def place(self, request: router_pb2.PlaceRequest, now: float) -> router_pb2.PlaceResponse:
        """Checks, then places."""
        self.look(now)
        self._simulation.check(request.block_hashes, now)
        self.clock.now = now
        return self.policy.place(request)

    def _look_at(self, worker: SimWorker, now: float) -> kv_pb2.KvEventBatch | None:
        return super()._look_at(worker, now) if worker.worker_id not in self.blocked else None


class ChaosSimulation(Simulation):
    """A cluster whose workers publish to a kvstore that the router follows. Make and use it inside its loop."""

    router: _ChaosRouter

    def __init__(self, timeline: LoopTimeline, namespace: bytes, seed: int) -> None:
        self.store = VirtualStore()
        self.router_link = Link()
        self.worker_links: dict[str, Link] = {}
        self._loop_timeline = timeline
        self._publishers: dict[str, asyncio.Task[None]] = {}
        self._disturbed_until = 0.0
        self._right_from = 0.0  # until then something keeps events from the router
        self._ends = 0.0  # when the last disturbance does
        self._prompts: deque[bytes] = deque(maxlen=_PROBED_PROMPTS)
        self._is_following = False
        names = [f"w{number:02d}" for number in range(len(CLUSTER.roles))]
        self.worker_links = {name: Link() for name in names}
        self.kvstore = VirtualKvstore(self.store, [self.router_link, *self.worker_links.values()])
        self.kvstore.start()
        super().__init__(CLUSTER, BatonPolicy, namespace, seed, timeline)
        self.checker = Checker(self.router.fleet, self.router.index, self.workers)
        client = IndexClient(self.router.index, ["kvstore"], dial=lambda _: self._dial(self.router_link))  # type: ignore[arg-type,return-value]
        self._follower = timeline.spawn(client.run())

    def standing(self, now: float) -> str:
        """Returns the state of the index: steady, disturbed or blind."""
        if now < self._right_from:
            return BLIND
        return DISTURBED if now < self._disturbed_until else STEADY

    def disturb(self, name: str) -> None:
        """Marks the begin or end of a fault: the index may be wrong for a second."""
        now = self.timeline.clock.now
        if now >= self._right_from:
            self._mark(name, now)

    def blind(self, name: str, seconds: float) -> None:
        """Marks a time in which events cannot reach the router, which places by what it knew before."""
        now = self.timeline.clock.now
        self._right_from = max(self._right_from, now + seconds)
        for mark in self.checker.marks:
            if now - TRUTH_SECONDS < mark.due_from:
                mark.due_from = max(mark.due_from, self._right_from)
        self._mark(name, self._right_from)

    def check(self, block_hashes: bytes, now: float) -> None:
        """Checks the index before a decision."""
        self._prompts.append(block_hashes)
        standing = self.standing(now)
        phantoms = self.checker.check(standing, block_hashes, now)
        if phantoms and standing == STEADY:
            self.timeline.after(WIRE_SECONDS, lambda: self._confirm(phantoms))
        self._follow()

    def _confirm(self, phantoms: Sequence[Phantom]) -> None:
        """Counts phantoms that were events in flight, unless a fault began meanwhile."""
        now = self.timeline.clock.now
        if self.standing(now) == STEADY:
            self.router.look(now)
            self.checker.confirm(phantoms, now)

    def _mark(self, name: str, time: float) -> None:
        self._ends = max(self._ends, time)
        self._disturbed_until = max(self._disturbed_until, time + TRUTH_SECONDS)
        self.checker.marks.append(Mark(name, time))
        for seconds in _PROBES:
            self.timeline.at(time + seconds, self._probe)

    def _probe(self) -> None:
        now = self.timeline.clock.now
        self.router.look(now)
        self.checker.probe(self._prompts, now)
        self._follow()

    def _follow(self) -> None:
        if self.checker.has_open and not self._is_following:
            self._is_following = True
            self.timeline.after(_LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._is_following = False
        now = self.timeline.clock.now
        self.router.look(now)
        self.checker.follow(now, self._right_from, TRUTH_SECONDS)
        self._follow()

    def start_worker(self, worker_id: str, role: str) -> SimWorker:
        """Adds a worker and its publisher."""
        worker = super().start_worker(worker_id, role)
        link = self.worker_links[worker_id]
        publisher = Publisher(_as_engine(_EngineLoop(self, worker)), ["kvstore"], dial=lambda _: self._dial(link))  # type: ignore[arg-type,return-value]
        self._publishers[worker_id] = self._loop_timeline.spawn(publisher.run())
        return worker

    def kill_worker(self, worker: SimWorker) -> None:
        """Kills a worker and its publisher."""
        self._publishers.pop(worker.worker_id).cancel()
        self.worker_links[worker.worker_id].cut()
        super().kill_worker(worker)

    @property
    def ends(self) -> float:
        """Returns when the last disturbance ends, as far as is known."""
        return self._ends

    def disagreements(self) -> list[str]:
        """Returns the workers whose entries differ from their blocks after everything has settled."""
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


def _as_engine(engine: _EngineLoop) -> EngineClient:
    return engine  # type: ignore[return-value]  # the part of it that a publisher uses
