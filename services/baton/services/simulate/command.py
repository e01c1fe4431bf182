"""`baton simulate`: settings in, runs, a table, JSON and a picture out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from baton.rpc.errors import ServiceError
from baton.services import settings
from baton.services.simulate.calibration import read_device
from baton.services.simulate.cell import Cell, policy_factory, run_cells, workload_of
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.cluster.metrics import LatencyLimits, Summary
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.config import SimulateConfig
from baton.services.simulate.output import chaos_line, chaos_table, plot, table, write_json
from baton.worker.scheduling.settings import EngineSettings

_MOST_LINES = 100  # of seeds without problems
_DESCRIPTION = "Runs the shipped router, index, scheduler, block pool and leases under virtual time."


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs what the flags say. Returns an exit code."""
    try:
        (config,) = settings.load("simulate", (SimulateConfig,), argv, environ, _DESCRIPTION)
        cells = cells_of(config)
    except (settings.SettingsError, ServiceError) as error:
        print(f"baton simulate: {error}", file=sys.stderr)
        return 2
    if config.chaos is not None:
        return _chaos(config)
    try:
        summaries = run_cells(cells, config.jobs or os.cpu_count() or 1, _say)
        print(table(summaries))
        _write(config, summaries)
    except ServiceError as error:
        print(f"baton simulate: {error.message}", file=sys.stderr)
        return 1
    return 0


def _chaos(config: SimulateConfig) -> int:
    """Runs the seeds, prints a line for each if they are few, and prints violations."""
    from baton.services.simulate.chaos.runs import run_seeds
    from baton.services.simulate.chaos.simulation import ChaosTotals

    assert config.chaos is not None, "asked for"
    seeds = range(config.chaos, config.chaos + config.chaos_seeds)
    totals = ChaosTotals()
    for report in run_seeds(seeds, config.chaos_seconds, config.jobs or os.cpu_count() or 1):
        totals.add(report)
        if report.problems or len(seeds) <= _MOST_LINES:
            print(chaos_line(report), flush=True)
        for problem in report.problems:
            print(f"    {problem}", flush=True)
        if report.problems:
            print("    faults: " + "; ".join(report.faults), flush=True)
    print(chaos_table(totals))
    print(f"{len(seeds)} seeds, {totals.num_bad} with problems")
    if totals.problem:
        print(f"all seeds together: {totals.problem}")
    print(f"{totals.cpu_seconds / len(seeds):.2f} s of processor time a seed", file=sys.stderr)
    return 1 if totals.num_bad or totals.problem else 0


def cells_of(config: SimulateConfig) -> list[Cell]:
    """Runs what the settings ask for. Raises InvalidRequest."""
    workload_of(config.workload)
    for policy in config.policies:
        policy_factory(policy)
    cluster = cluster_of(config)
    limits = LatencyLimits(config.ttft_limit, config.itl_limit, config.ttft_limit_per_token)
    loads = ("1",) if config.rate else config.loads
    return [
        Cell(
            cluster=cluster,
            workload=config.workload,
            load=float(load),
            seconds=config.seconds,
            seed=config.seed,
            policy=policy,
            limits=limits,
            rate=config.rate,
            max_requests=config.max_requests,
        )
        for policy in config.policies
        for load in loads
    ]


def cluster_of(config: SimulateConfig) -> ClusterSettings:
    """Returns the fleet that the settings describe. Raises InvalidRequest."""
    device = DeviceModel(
        transfer_bytes_per_second=config.transfer_bytes_per_second, kv_bytes_per_token=config.kv_bytes_per_token
    )
    if config.calibration:
        device = read_device(Path(config.calibration), config.calibration_model, device)
    cluster = ClusterSettings(
        roles=config.roles,
        device=device,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        state_blocks=config.state_blocks,
        drafts=config.drafts,
        acceptance=config.acceptance,
        engine=EngineSettings(
            max_num_requests=config.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queue_depth=config.max_queue,
        ),
        max_queue_depth=config.max_queue_depth,
    )
    cluster.validate()
    return cluster


def _say(summary: Summary) -> None:
    print(f"{summary.policy}, load {summary.load:g}: {summary.goodput_per_second:.1f} good/s", file=sys.stderr)


def _write(config: SimulateConfig, summaries: Sequence[Summary]) -> None:
    if config.json:
        write_json(Path(config.json), summaries, {"config": asdict(config)})
    if config.plot:
        plot(Path(config.plot), summaries, f"{config.workload}, {len(config.roles)} workers, seed {config.seed}")
