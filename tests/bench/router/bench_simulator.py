"""Measures the simulator's speed: simulated seconds per CPU second, by request rate.

baton bench simulator [--rates 2,4,8,16] [--workers 8] [--jobs 2]
Each core runs one process with a different seed. The speed is that of all processes together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name)
    for name in ("tests", "proto", "services", "router", "worker", "kvstore")
)

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.services.simulate.cell import BATON, Cell, run_cells
from baton.services.simulate.cluster.metrics import Summary
from baton.services.simulate.cluster.settings import ClusterSettings

_HEADER = (
    "requests/s",
    "requests",
    "simulated s",
    "CPU s",
    "ms a request",
    "x real time, a core",
    "x real time, all cores",
    "by the clock",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="baton bench simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="2,4,8,16", help="requests per second, per process")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated arrivals per process")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    facts = machine_facts(("numpy", "protobuf"))
    print(facts_line(facts))
    rows: list[tuple[str, ...]] = []
    records: list[dict[str, object]] = []
    for rate in (float(word) for word in options.rates.split(",")):
        summaries, seconds = _run(options, rate)
        rows.append(_row(rate, summaries, seconds))
        records += [summary.as_dict() for summary in summaries]
    print(render_table(_HEADER, rows, markdown=True))
    print(f"\n{options.workload}, {options.workers} workers, {options.jobs} processes, seeds from {options.seed}")
    write_json(options.json, {"facts": facts, "runs": records})
    return 0


def _run(options: argparse.Namespace, rate: float) -> tuple[list[Summary], float]:
    """Runs one process per seed. Returns the summaries, and the seconds of the slowest process."""
    cluster = ClusterSettings(roles=("decode",) * options.workers)
    cells = [
        Cell(cluster, options.workload, 1.0, options.seconds, options.seed + number, BATON, rate=rate)
        for number in range(options.jobs)
    ]
    began = time.perf_counter()
    summaries = run_cells(cells, options.jobs, lambda summary: None)
    return summaries, min(time.perf_counter() - began, max(one.extra["wall_seconds"] for one in summaries))


def _row(rate: float, summaries: Sequence[Summary], seconds: float) -> tuple[str, ...]:
    simulated = sum(one.extra["simulated_seconds"] for one in summaries)
    cpu = sum(one.extra["cpu_seconds"] for one in summaries)
    count = sum(one.extra["num_arrivals"] for one in summaries)
    return (
        f"{rate:g}",
        str(count),
        f"{simulated:.0f}",
        f"{cpu:.2f}",
        f"{1000 * cpu / max(1, count):.2f}",
        f"{simulated / cpu:.0f}",
        f"{len(summaries) * simulated / cpu:.0f}",
        f"{simulated / seconds:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main())
