"""One point of a sweep: a policy at a load. A value that another process can run."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.capacity import requests_per_second
from baton.services.simulate.cluster.metrics import LatencyLimits, Record, Summary, summarize
from baton.services.simulate.cluster.policy import AdapterBlindPolicy, BatonPolicy, PolicyFactory, SheddingPolicy
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.silence import silenced
from baton.services.simulate.cluster.simulation import Simulation
from baton.services.simulate.requests.text import Texts
from baton.services.simulate.requests.traces import read_trace
from baton.services.simulate.requests.workloads import WORKLOADS, Arrival, Workload, generate, workload_named

BATON, SHEDDING, ADAPTER_BLIND = "baton", "baton-shed", "baton-adapter-blind"
_OWN: Mapping[str, PolicyFactory] = {
    BATON: BatonPolicy,
    SHEDDING: SheddingPolicy,
    ADAPTER_BLIND: AdapterBlindPolicy,
}
_SAMPLE_SECONDS = 180.0
_MIN_SAMPLE_RATE, _MAX_SAMPLE_RATE = 2.0, 30.0
_WARM_SHARE = 0.3  # of the time, whose arrivals are not counted


@dataclass(frozen=True, slots=True)
class Cell:
    """Everything that a run depends on."""

    cluster: ClusterSettings
    workload: str  # of WORKLOADS, or a path to a trace
    load: float  # 1: what the fleet could serve at best. Of a trace: how many times as fast
    seconds: float
    seed: int = 0
    policy: str = BATON  # or module:attribute, a PolicyFactory
    limits: LatencyLimits = field(default_factory=LatencyLimits)
    rate: float = 0.0  # requests a second, instead of the load
    drain_seconds: float = 60.0
    max_requests: int = 0  # 0: all
    min_requests: int = 0  # of a workload: arrivals continue until this many are expected


@silenced()
def run_cell(cell: Cell) -> Summary:
    """Runs one cell. Raises InvalidRequest for one that cannot be."""
    gc.collect()  # what the run before left
    cell = _long_enough(cell)
    texts = Texts(cell.cluster.block_size)
    arrivals = arrivals_of(cell, texts)
    simulation = Simulation(cell.cluster, policy_factory(cell.policy), texts.namespace, cell.seed)
    cpu = time.process_time()
    run = simulation.run(arrivals, cell.drain_seconds)
    cpu = time.process_time() - cpu
    summary = summary_of(cell, arrivals, run.records)
    extra = {
        "simulated_seconds": run.simulated_seconds,
        "cpu_seconds": cpu,
        "wall_seconds": run.wall_seconds,
        "num_steps": run.num_steps,
        "num_arrivals": len(arrivals),
    }
    return replace(summary, extra=extra)


def summary_of(cell: Cell, arrivals: Sequence[Arrival], records: Sequence[Record]) -> Summary:
    """Returns the figures of a cell's run."""
    last = arrivals[-1].time if arrivals else 0.0
    end = max(min(cell.seconds, last), 1e-9) if cell.seconds else last
    return summarize(
        records,
        cell.limits,
        end * _WARM_SHARE,
        end,
        policy=cell.policy,
        workload=cell.workload,
        num_workers=len(cell.cluster.roles),
        load=cell.load,
        seed=cell.seed,
    )


def run_cells(
    cells: Sequence[Cell],
    num_processes: int,
    on_done: Callable[[Summary], None],
    run: Callable[[Cell], Summary] = run_cell,
) -> list[Summary]:
    """Runs all of them, several at a time; their order is kept."""
    if num_processes <= 1 or len(cells) == 1:
        summaries = []
        for cell in cells:
            summaries.append(run(cell))
            on_done(summaries[-1])
        return summaries
    found: dict[int, Summary] = {}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(run, cell): index for index, cell in enumerate(cells)}
        for future in as_completed(pending):
            found[pending[future]] = summary = future.result()
            on_done(summary)
    return [found[index] for index in range(len(cells))]


def policy_factory(name: str) -> PolicyFactory:
    """Returns the policy of a name. Raises InvalidRequest."""
    if name in _OWN:
        return _OWN[name]
    module, _, attribute = name.partition(":")
    try:
        factory: PolicyFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"policy {name!r} is unknown: it is {', '.join(_OWN)}, or module:attribute of a policy ({error})",
            field="policy",
        ) from error
    return factory


def workload_of(name: str) -> Workload | None:
    """Returns a synthetic workload, or None if the name is a trace's path. Raises InvalidRequest if it is neither."""
    workload = workload_named(name)
    if workload is not None:
        return workload
    if Path(name).suffix in (".jsonl", ".json", ".csv"):
        return None
    raise InvalidRequest(
        f"workload {name!r} is unknown; there are {', '.join(WORKLOADS)}, fixed-PROMPT-OUTPUT-HIT,"
        " and traces as .jsonl or .csv",
        field="workload",
    )


def arrivals_of(cell: Cell, texts: Texts) -> list[Arrival]:
    """Returns a cell's requests. Raises InvalidRequest for an invalid workload."""
    workload = workload_of(cell.workload)
    if workload is None:
        arrivals = read_trace(Path(cell.workload), texts, cell.load, cell.max_requests)
        if cell.seconds:
            arrivals = [arrival for arrival in arrivals if arrival.time < cell.seconds]
        return arrivals
    rate = cell.rate or cell.load * _capacity(cell, workload)
    arrivals = generate(workload, texts, rate, cell.seconds, cell.seed)
    return arrivals[: cell.max_requests] if cell.max_requests else arrivals


def _long_enough(cell: Cell) -> Cell:
    workload = workload_of(cell.workload)
    if workload is None or not cell.min_requests:
        return cell
    rate = cell.rate or cell.load * _capacity(cell, workload)
    return replace(cell, rate=rate, seconds=max(cell.seconds, cell.min_requests / rate))


def _capacity(cell: Cell, workload: Workload) -> float:
    """Returns the fleet's capacity, from a sample of the workload near that rate, because reuse depends on the rate."""
    num_workers = len(cell.cluster.roles)
    rate = 4.0 * num_workers
    for _ in range(2):
        texts = Texts(cell.cluster.block_size)
        sampled = min(max(rate, _MIN_SAMPLE_RATE), _MAX_SAMPLE_RATE)
        sample = generate(workload, texts, sampled, _SAMPLE_SECONDS, cell.seed)
        rate = num_workers * requests_per_second(
            sample, texts, cell.cluster, cell.limits.itl, since=_SAMPLE_SECONDS * 2 / 3
        )
    return rate
