"""The faults. Each one returns its name, and how many seconds it lasts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.services.simulate.cluster.worker import SimWorker

if TYPE_CHECKING:
    from baton.services.simulate.chaos.simulation import ChaosSimulation

Fault = Callable[["ChaosSimulation", random.Random], tuple[str, float]]

_STATE_TIMEOUT_SECONDS = 3.0  # after which a router takes a silent worker for dead


def _some_worker(simulation: ChaosSimulation, draws: random.Random) -> SimWorker:
    return draws.choice([worker for worker in simulation.workers.values() if worker.alive])


def _kill(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    worker, seconds = _some_worker(simulation, draws), draws.uniform(0.1, 1.5)
    alive = [one for one in simulation.workers.values() if one.alive and one.role != "prefill"]
    if alive == [worker]:
        return "nothing: the last decoder is spared", 0.0
    simulation.kill_worker(worker)

    def restart() -> None:
        simulation.disturb(f"restart {worker.worker_id}")
        simulation.start_worker(worker.worker_id, worker.role)

    simulation.timeline.after(seconds, restart)
    return f"kill {worker.worker_id}", seconds


def _reset(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    worker = _some_worker(simulation, draws)
    worker.reset_prefix_cache()
    return f"reset the cache of {worker.worker_id}", 0.0


def _part_worker(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    worker, seconds = _some_worker(simulation, draws), draws.uniform(0.1, 1.5)
    link = simulation.worker_links[worker.worker_id]
    link.is_stalled = True

    def heal() -> None:
        simulation.disturb(f"heal {worker.worker_id}")
        link.heal()

    simulation.timeline.after(seconds, heal)
    return f"part {worker.worker_id} from the kvstore", seconds


def _part_router(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    seconds = draws.uniform(0.1, 1.5)
    simulation.router_link.is_stalled = True
    simulation.blind("router's link", seconds)
    simulation.timeline.after(seconds, simulation.router_link.heal)
    return "part the router from the kvstore", seconds


def _part_states(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    worker, seconds = _some_worker(simulation, draws), draws.uniform(0.2, 3.5)
    router = simulation.router
    router.blocked.add(worker.worker_id)

    def lose() -> None:
        if worker.worker_id in router.blocked and worker.alive:
            router.fleet.lose(worker.address, "no state")

    def heal() -> None:
        router.blocked.discard(worker.worker_id)

    simulation.timeline.after(_STATE_TIMEOUT_SECONDS, lose)
    simulation.timeline.after(seconds, heal)
    return f"part {worker.worker_id} from the router", seconds


def _part_peers(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    one, other = draws.sample(sorted(simulation.workers), 2)
    seconds = draws.uniform(0.1, 1.5)
    simulation.network.partition(one, other)
    simulation.timeline.after(seconds, lambda: simulation.network.partition(one, other, healed=True))
    return f"part {one} from {other}", seconds


def _kill_kvstore(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    if simulation.kvstore.servicer is None:
        return "nothing: the kvstore is down", 0.0
    seconds = draws.uniform(0.1, 1.5)
    simulation.kvstore.kill()
    simulation.blind("kvstore", seconds)
    simulation.timeline.after(seconds, simulation.kvstore.start)
    return "kill the kvstore", seconds


def _break_store(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    kind = draws.choice(("unreachable", "slow", "full", "wiped"))
    store, seconds = simulation.store, draws.uniform(0.2, 2.0)
    if kind == "wiped":
        store.wipe()
        return "wipe the store", 0.0
    if kind == "slow":
        store.seconds = 0.5
    else:
        store.fault = kind

    def mend() -> None:
        store.fault, store.seconds = "", 0.001

    simulation.timeline.after(seconds, mend)
    return f"the store is {kind}", seconds


def _garble(simulation: ChaosSimulation, draws: random.Random) -> tuple[str, float]:
    """Drops, repeats or reorders some messages of one link."""
    links = {"the router": simulation.router_link, **simulation.worker_links}
    name, how = draws.choice(sorted(links)), draws.choice(("drop", "repeat", "swap"))
    link, left = links[name], draws.randint(1, 3)
    held: list[bytes] = []

    def tap(message: bytes) -> list[bytes]:
        nonlocal left
        simulation.disturb(f"{how} a message of {name}")
        if held:
            first = held.pop()
            link.tap = None if not left else link.tap
            return [message, first]
        left -= 1
        if not left and how != "swap":
            link.tap = None
        if how == "drop":
            return []
        if how == "repeat":
            return [message, message]
        held.append(message)
        return []

    link.tap = tap
    return f"{how} messages of {name}", 0.0


FAULTS: tuple[Fault, ...] = (
    _kill,
    _reset,
    _part_worker,
    _part_router,
    _part_states,
    _part_peers,
    _kill_kvstore,
    _break_store,
    _garble,
)
