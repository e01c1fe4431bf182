"""Small simulated clusters and their records."""

from __future__ import annotations

from baton.services.simulate.cluster.policy import BatonPolicy
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.simulation import Simulation
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import WORKLOADS, generate


def make_simulation(texts: Texts, factory=BatonPolicy, roles=("both",) * 3, **values) -> Simulation:
    return Simulation(ClusterSettings(roles=roles, block_size=texts.block_size, **values), factory, texts.namespace)


def run(workload="chat", rate=8.0, seconds=3.0, seed=1, factory=BatonPolicy, **values):
    """Returns the records of one run as text, which is equal for equal runs."""
    texts = Texts(values.pop("block_size", 64))
    arrivals = generate(WORKLOADS[workload], texts, rate, seconds, seed)
    simulation = make_simulation(texts, factory, **values)
    simulation.run(arrivals, 60.0)
    return simulation


def transcript(simulation: Simulation) -> list[str]:
    return [repr(record) for record in simulation.gateway.records]
