"""Injects faults into a fleet of real processes by a seed, and prints the effect on clients.

python tests/chaos/run.py [--seed N] [--kills N] [--faults N] [--cpu-kills N] [--soak-requests N] [--parts LIST]
    [--json PATH]

Gateways, routers, a kvstore, Redis, prefill and decode workers. Streams (greedy, seeded, two choices, JSON schema,
tool calls, log-probabilities, penalties) are compared with the undisturbed run, event for event; afterwards pools,
index and counts are audited.

kills    workers killed and stopped (front or engine), simulated engines, at 70 % of the batch places
cpu      the same with the CPU engine
storm    every kind of fault: services, connections, Redis, pools, clocks, disks
rolling  every service restarted one by one under load
overload tests/bench/fleet/bench_overload.py: three times what the fleet can serve
soak     tests/chaos/soak.py: short requests with faults on, what leaks and what grows
gap      the longest wait between two events of a stream that a fault hit: of those that ran, one part in as many as
         there are decode workers, the longest
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import report, soak
from chaos.audit import Audit, audit
from chaos.disturb import Disturbed, disturb
from chaos.fleet.faults import EVERYTHING, KILLS, Fault, plan
from chaos.fleet.fleet import Shape, running_fleet
from chaos.overload import overload
from chaos.report import Row
from chaos.rolling import roll
from chaos.soak import SoakOptions
from chaos.streams.client import Client

from baton.services.bench.report import facts_line, machine_facts, write_json

# With four workers, 70 % are 94 % of what a death leaves, and streams wait for places; with six, 84 %.
_SIM = Shape(decode=6, worker_flags=("--sim-step-seconds", "0.03"))
_CPU = Shape(executor="cpu", decode=3, places=4)
_STORM = replace(_SIM, proxied=True, gateway_flags=("--resumable-streams",))
_LOAD = 0.7
_STORM_LOAD = 0.5
_TOKENS = 200
_CPU_TOKENS = 100

Part = Callable[[argparse.Namespace], tuple[list[Row], str]]


def _run(
    shape: Shape, options: argparse.Namespace, kinds: tuple[Fault, ...], count: int, load: float, tokens: int
) -> tuple[Disturbed, Audit]:
    """One fleet, one plan. What was seen, and the audit."""
    planned = plan(options.seed, count, kinds, shape.sizes())
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder, running_fleet(Path(folder), shape) as fleet:
        resumes = "--resumable-streams" in shape.gateway_flags
        client = Client(fleet.rest, fleet.api_key, resumes)
        with _kept_logs(options, fleet.folder):
            disturbed = asyncio.run(disturb(fleet, client, planned, load, tokens, options.verbose))
            found = audit(fleet, any(one.fault is Fault.GATEWAY_KILLED for one in planned))
    return disturbed, found


@contextlib.contextmanager
def _kept_logs(options: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Copies the services' logs to a folder, also after a failed run."""
    try:
        yield
    finally:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.log"):
                (options.logs / path.name).write_bytes(path.read_bytes())


def _text(name: str, disturbed: Disturbed, found: Audit) -> str:
    return "\n".join([report.details(name, disturbed), *report.first_of(found.problems)])


def kills(options: argparse.Namespace) -> tuple[list[Row], str]:
    """Workers killed, simulated engines."""
    disturbed, found = _run(_SIM, options, KILLS, options.kills, _LOAD, _TOKENS)
    rows = [
        report.completion_row(f"{options.kills} kills at {_LOAD:.0%} load: streams complete and identical", disturbed),
        report.gap_row("gap of streams that were hit, p99, simulated fleet", disturbed, 1.0),
        report.audit_row("blocks leaked after the kills, other problems", found),
    ]
    return rows, _text("kills", disturbed, found)


def cpu(options: argparse.Namespace) -> tuple[list[Row], str]:
    """Workers killed, CPU engine."""
    disturbed, found = _run(_CPU, options, KILLS, options.cpu_kills, _LOAD, _CPU_TOKENS)
    what = f"{options.cpu_kills} kills, CPU engine: streams complete and identical"
    rows = [
        report.completion_row(what, disturbed),
        report.gap_row("gap of streams that were hit, p99, CPU engine", disturbed, 2.0),
        report.audit_row("blocks leaked after these kills, other problems", found),
    ]
    return rows, _text("CPU engine", disturbed, found)


def storm(options: argparse.Namespace) -> tuple[list[Row], str]:
    """Everything goes wrong."""
    disturbed, found = _run(_STORM, options, EVERYTHING, options.faults, _STORM_LOAD, _TOKENS)
    what = f"{options.faults} faults of {len(EVERYTHING)} kinds: streams complete and identical"
    rows = [
        report.completion_row(what, disturbed),
        report.audit_row("blocks leaked after the storm, other problems", found),
    ]
    return rows, _text("storm", disturbed, found)


def rolling(options: argparse.Namespace) -> tuple[list[Row], str]:
    """An upgrade."""
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder, running_fleet(Path(folder), _SIM) as fleet:
        client = Client(fleet.rest, fleet.api_key)
        with _kept_logs(options, fleet.folder):
            disturbed = asyncio.run(roll(fleet, client, _LOAD, _TOKENS))
            found = audit(fleet, reports_lost=False)
    rows = [
        report.restart_row("rolling restart of everything under load: failed requests", disturbed),
        report.audit_row("blocks leaked after it, other problems", found),
    ]
    return rows, _text("rolling", disturbed, found)


def soaked(options: argparse.Namespace) -> tuple[list[Row], str]:
    """A day's requests."""
    return soak.run(SoakOptions(options.soak_requests, options.seed))


PARTS: dict[str, Part] = {
    "kills": kills,
    "cpu": cpu,
    "rolling": rolling,
    "overload": overload,
    "storm": storm,
    "soak": soaked,
}


def main() -> int:
    """Runs the parts and prints the table. 1: something was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--cpu-kills", type=int, default=50)
    parser.add_argument("--faults", type=int, default=105)
    parser.add_argument("--soak-requests", type=int, default=1_000_000)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="print each fault")
    parser.add_argument("--logs", type=Path, help="where the services' logs are copied to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.parts.split(","):
        part_rows, text = PARTS[name](options)
        print(f"{text}\n", flush=True)
        rows += part_rows
    print(f"{facts_line(machine_facts(('grpcio',)))}, seed {options.seed}\n")
    print(report.table(rows))
    write_json(options.json, {"seed": options.seed, "rows": [[row.what, row.found, row.good] for row in rows]})
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
