"""Runs of chaos by seed: draws faults, and reports their effects."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import process_time

from baton.services.simulate.chaos.faults import FAULTS, Fault
from baton.services.simulate.chaos.simulation import CLUSTER, ChaosReport, ChaosSimulation
from baton.services.simulate.chaos.traffic import TRAFFIC
from baton.services.simulate.cluster.silence import silenced
from baton.services.simulate.cluster.simulation import uncollected
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.workloads import generate
from baton.services.simulate.virtual.loop import LoopTimeline

_FIRST_FAULT, _FAULT_GAP = 0.8, 0.5  # seconds; the second on average
_SETTLE_SECONDS = 1.5  # after the last fault, with traffic
# After the traffic and the last disturbance: a publisher whose hello was lost gives its stream up and dials again.
_QUIET_SECONDS = 2.0


def run_seeds(seeds: Sequence[int], seconds: float, num_processes: int) -> Iterator[ChaosReport]:
    """Yields each seed's report, in order. Runs several at a time."""
    if num_processes <= 1 or len(seeds) == 1:
        yield from (run_chaos(seed, seconds) for seed in seeds)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_chaos, seeds, itertools.repeat(seconds), chunksize=min(16, len(seeds)))


@silenced()
def run_chaos(seed: int, seconds: float = 5.0, rate: float = 16.0) -> ChaosReport:
    """Runs one seed's traffic and faults. Equal seeds give equal reports."""
    draws = random.Random(f"chaos {seed}")
    random.seed(seed)  # what the product's own backoffs draw from
    timeline = LoopTimeline()
    began = process_time()
    try:
        gc.collect()  # what the run before left
        with uncollected():
            report = timeline.loop.run_until_complete(_prepare(timeline, draws, seed, seconds, rate))(timeline)
    finally:
        timeline.close()
    report.cpu_seconds = process_time() - began
    return report


async def _prepare(
    timeline: LoopTimeline, draws: random.Random, seed: int, seconds: float, rate: float
) -> Callable[[LoopTimeline], ChaosReport]:
    texts = Texts(CLUSTER.block_size)
    arrivals = generate(TRAFFIC, texts, rate, seconds, seed)
    simulation = ChaosSimulation(timeline, texts.namespace, seed)
    faults: list[str] = []
    time = _FIRST_FAULT
    while time < seconds - _SETTLE_SECONDS:
        timeline.at(time, partial(_inflict, simulation, draws.choice(FAULTS), draws, faults))
        time += draws.expovariate(1 / _FAULT_GAP) + 0.2

    def finish(timeline: LoopTimeline) -> ChaosReport:
        simulation.run(arrivals, 60.0)
        ended = timeline.clock.now
        while timeline.clock.now < (quiet := max(ended, simulation.ends) + _QUIET_SECONDS):
            timeline.run(quiet, lambda: False)
        simulation.router.look(timeline.clock.now)
        return _report(simulation, seed, faults)

    return finish


def _inflict(simulation: ChaosSimulation, fault: Fault, draws: random.Random, faults: list[str]) -> None:
    name, seconds = fault(simulation, draws)
    simulation.disturb(name)
    faults.append(f"{simulation.timeline.clock.now:.2f} s {name}" + (f" for {seconds:.2f} s" if seconds else ""))


def _report(simulation: ChaosSimulation, seed: int, faults: list[str]) -> ChaosReport:
    records = simulation.gateway.records
    report = ChaosReport(seed, faults, len(records), sum(1 for one in records if one.error), simulation.checker.counts)
    report.truth_seconds += [mark.truth_seconds for mark in simulation.checker.marks]
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
