"""The workers that a router knows: whether each is alive, its last state, and cordons. Does no I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from baton.router.fleet.rates import RateModel
from baton.router.fleet.served_models import Models, find_mismatches, served_models
from baton.router.fleet.worker_view import WorkerView, view_of
from baton.rpc.errors import NotFound
from baton.v1 import types_pb2, worker_pb2

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Worker:
    """One address and the last state received from it."""

    address: str
    state: worker_pb2.WorkerState | None = None
    view: WorkerView | None = None  # None: dead
    problem: str = "no state was received yet"
    alive_since: float = 0.0  # monotonic seconds
    terminating: bool = False  # as discovery reports: no new requests, and its end is no failure
    rates: RateModel = field(default_factory=RateModel)

    @property
    def alive(self) -> bool:
        """Whether the worker reports a valid state."""
        return self.view is not None

    @property
    def counted(self) -> bool:
        """Whether the fleet counts it: a worker that terminates counts until it has ended."""
        return self.alive or not self.terminating

    @property
    def worker_id(self) -> str:
        """The worker's id, or empty before its first state."""
        return self.state.worker_id if self.state is not None else ""


class Cordon(NamedTuple):
    """A worker's cordon by an operator, or its end."""

    worker_id: str
    cordoned: bool
    stamp_us: int  # when, since 1970; the newest one counts


class FleetListener(Protocol):
    """Receives what happens to workers."""

    def on_state(self, view: WorkerView, is_new: bool) -> None:
        """Called with a live worker's state; `is_new`: the first one of this life or epoch."""

    def on_lost(self, worker_id: str) -> None:
        """Called after a worker died."""

    def on_models(self) -> None:
        """Called after the served models changed."""


class Fleet:
    """Every worker, by address. Iterates over those that count."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.models: Models = {}
        self.version = 0  # another one after every change
        self._listeners: list[FleetListener] = []
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._alive: dict[str, Worker] = {}  # by worker id
        self._wall_clock = wall_clock
        self._cordons: dict[str, Cordon] = {}
        self._reported: set[str] = set()  # mismatches that the log has

    def __iter__(self) -> Iterator[Worker]:
        # Metrics are read in another thread: list() copies without letting this one change the workers.
        return iter([worker for worker in list(self._workers.values()) if worker.counted])

    def listen(self, listener: FleetListener) -> None:
        """Adds a listener."""
        self._listeners.append(listener)

    def alive(self) -> list[WorkerView]:
        """Returns the views of all live workers."""
        return [worker.view for worker in self._workers.values() if worker.view is not None]

    def find(self, worker_id: str) -> Worker | None:
        """Returns a worker by id, preferring a live one."""
        alive = self._alive.get(worker_id)
        if alive is not None:
            return alive
        return next((worker for worker in self._workers.values() if worker.worker_id == worker_id), None)

    def add(self, address: str) -> None:
        """Takes an address that discovery names."""
        self._workers.setdefault(address, Worker(address))

    def remove(self, address: str) -> None:
        """Drops an address that discovery no longer names: it counts no more."""
        self.lose(address, "no longer among the discovered addresses", logging.INFO)
        del self._workers[address]

    def set_terminating(self, address: str, terminating: bool) -> None:
        """Marks a worker that discovery reports as terminating: it takes no new requests, and its end is no failure."""
        worker = self._workers[address]
        if worker.terminating == terminating:
            return
        worker.terminating = terminating
        self.version += 1
        if worker.view is not None and worker.state is not None:
            _log.info("worker %s at %s %s", worker.worker_id, address, "terminates" if terminating else "serves again")
            worker.view = replace(worker.view, draining=worker.state.draining or terminating)

    def update(self, address: str, state: worker_pb2.WorkerState) -> None:
        """Takes a worker's state."""
        worker = self._workers[address]
        problem = self._what_is_wrong(worker, state)
        if problem:
            self.lose(address, problem, logging.ERROR)
            worker.state = state
            return
        before, known = worker.view, None if worker.state is None else worker.state.model
        now = self._clock()
        is_new = before is None or (before.worker_id, before.epoch) != (state.worker_id, state.epoch)
        if is_new:
            worker.alive_since = now
            _log.info("worker %s at %s is alive, epoch %d", state.worker_id, address, state.epoch)
        self.version += 1
        worker.state = state
        worker.rates.observe(state.load)
        cordoned = self.is_cordoned(state.worker_id)
        worker.view = view = view_of(state, address, cordoned, now, worker.rates.speeds(), worker.terminating)
        if is_new:
            if before is not None:
                self._alive.pop(before.worker_id, None)
            self._alive[view.worker_id] = worker
        if before is None:
            worker.problem = ""
        if before is None or _identity(before) != _identity(view) or known != state.model:
            self._refresh_models()
        for listener in self._listeners:
            listener.on_state(view, is_new)

    def lose(self, address: str, problem: str, level: int | None = None) -> None:
        """Marks a worker as dead at once."""
        worker = self._workers[address]
        was_alive = worker.alive
        worker_id = worker.view.worker_id if worker.view is not None else worker.worker_id
        if worker.problem != problem:
            chosen = level or _loss_level(was_alive, worker.terminating)
            _log.log(chosen, "worker %s at %s: %s", worker_id or "unknown", address, problem)
        self.version += 1
        if worker.view is not None:
            self._alive.pop(worker.view.worker_id, None)
        worker.view = None
        worker.problem = problem
        worker.rates = RateModel()
        if was_alive:
            self._refresh_models()
            for listener in self._listeners:
                listener.on_lost(worker_id)

    def suspect(self, worker_id: str, epoch: int) -> bool:
        """Marks a worker that a gateway lost: others are preferred until its next state.

        Returns False if that is known.
        """
        worker = self._alive.get(worker_id)
        if worker is None or worker.view is None or worker.view.epoch != epoch or worker.view.stalled:
            return False
        _log.info("worker %s failed a gateway", worker_id)
        self.version += 1
        worker.view = replace(worker.view, stalled=True)
        return True

    def cordon(self, worker_id: str, cordoned: bool) -> Cordon:
        """Takes a worker out of placement, or puts it back; it stays so over restarts. NotFound: unknown."""
        if self.find(worker_id) is None:
            known = ", ".join(sorted(w.worker_id for w in self if w.worker_id)) or "none"
            raise NotFound(f"no worker {worker_id!r}; known are: {known}", field="worker_id")
        before = self._cordons.get(worker_id)
        stamp_us = int(self._wall_clock() * 1e6)
        cordon = Cordon(worker_id, cordoned, max(stamp_us, before.stamp_us + 1) if before is not None else stamp_us)
        self.take_cordon(cordon)
        return cordon

    def take_cordon(self, cordon: Cordon) -> None:
        """Takes a cordon from this router or another. Ignores it if a newer one is known."""
        before = self._cordons.get(cordon.worker_id)
        if before is not None and before.stamp_us >= cordon.stamp_us:
            return
        self._cordons[cordon.worker_id] = cordon
        worker = self.find(cordon.worker_id)
        if worker is not None and worker.view is not None:
            self.version += 1
            worker.view = replace(worker.view, cordoned=cordon.cordoned)

    def cordons(self) -> list[Cordon]:
        """Yields the last cordon of each worker."""
        return list(self._cordons.values())

    def is_cordoned(self, worker_id: str) -> bool:
        """Returns whether an operator took it out of placement."""
        cordon = self._cordons.get(worker_id)
        return cordon is not None and cordon.cordoned

    def _what_is_wrong(self, worker: Worker, state: worker_pb2.WorkerState) -> str:
        if not state.worker_id:
            return "its state names no worker_id"
        if not state.model.name or not state.model.digest or not state.model.block_size:
            return "its state names no model"
        if state.role == types_pb2.WORKER_ROLE_UNSPECIFIED:
            return "its state names no role"
        other = self._alive.get(state.worker_id)
        if other is not None and other is not worker:
            return f"its id {state.worker_id!r} is also that of the worker at {other.address}"
        return ""

    def _refresh_models(self) -> None:
        live = [worker for worker in self._workers.values() if worker.view is not None]
        infos = [
            (worker.view, worker.state.model) for worker in live if worker.view is not None and worker.state is not None
        ]
        models = served_models(infos, self.models)
        mismatches = find_mismatches([view for view, _ in infos], models)
        for worker in live:
            worker.problem = mismatches.get(worker.worker_id, "")
            if worker.problem and worker.problem not in self._reported:
                self._reported.add(worker.problem)
                _log.error("worker %s at %s: %s", worker.worker_id, worker.address, worker.problem)
        if models != self.models:
            self.models = models
            self.version += 1
            for listener in self._listeners:
                listener.on_models()


def _loss_level(was_alive: bool, terminating: bool) -> int:
    """Returns how loudly a loss is logged."""
    if terminating:
        # Refused connections are expected after a worker's end, until discovery drops the address.
        return logging.INFO if was_alive else logging.DEBUG
    return logging.WARNING if was_alive else logging.INFO


def _identity(view: WorkerView) -> tuple[object, ...]:
    return view.worker_id, view.role, view.model_name, view.model_digest, view.layout
