"""Sends a day's requests in an hour, with faults. Measures leaks and growth.

python tests/chaos/soak.py [--requests N] [--seconds N] [--seed N] [--clients N] [--json PATH]

Short requests at the rate that the machine allows, while services are killed, stopped and restarted, Redis is taken
away, clocks jump and disks are full. The first gateway, router, decode and prefill worker, the kvstore and Redis are
never killed: their memory is compared, after a warm-up, with that at the end (of Redis: what it held at most by then
with what it holds in the end).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import report
from chaos.audit import audit, memory_of
from chaos.disturb import in_thread
from chaos.fleet.actors import hurt
from chaos.fleet.faults import Fault, plan
from chaos.fleet.fleet import Fleet, Shape, running_fleet
from chaos.report import Row
from chaos.streams.short_requests import ShortRequests
from support.processes.stack import MODEL_NAME

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_SHAPE = Shape(
    decode=3,
    prefill=2,
    places=32,
    worker_flags=("--sim-slowness", "0", "--num-blocks", "1500", "--log-level", "warning"),
    gateway_flags=("--log-level", "warning"),
)
_FAULTS = (
    Fault.FRONT_KILLED,
    Fault.ENGINE_KILLED,
    Fault.FRONT_STOPPED,
    Fault.ENGINE_STOPPED,
    Fault.PREFILL_KILLED,
    Fault.WORKER_RESTARTED,
    Fault.GATEWAY_KILLED,
    Fault.GATEWAY_RESTARTED,
    Fault.ROUTER_KILLED,
    Fault.REDIS_STOPPED,
    Fault.REDIS_WIPED,
    Fault.REDIS_FULL,
    Fault.CLOCK_JUMPS,
    Fault.DISK_FULL,
)
_FAULT_SECONDS = 8.0  # between two
_WARM_PART = 0.2  # of the requests, at least _WARM_REQUESTS
_WARM_REQUESTS = 10_000
_MAX_GROWTH = 0.05
_SPARED = ("gateway-0", "router-0", "kvstore", "decode-0", "prefill-0", "redis")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long a soak is."""

    requests: int
    seed: int
    clients: int = 48
    seconds: float = 4 * 3600.0  # at most


@dataclass
class Soaked:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    warm: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    end: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def growths(self) -> dict[str, float]:
        """Of the services that are never hurt. Raises AssertionError where one did not live all the time."""
        died = [name for name in _SPARED if name in self.warm and self.warm[name][0] != self.end[name][0]]
        assert not died, f"{died} were started anew, though nobody hurt them"
        return {name: self.end[name][1] / self.warm[name][1] - 1 for name in _SPARED if name in self.warm}


async def soak(fleet: Fleet, options: SoakOptions) -> Soaked:
    """Until all requests are answered, or the time is over."""
    result = Soaked()
    began = time.monotonic()
    load = ShortRequests(fleet.rest, fleet.api_key, MODEL_NAME, options.requests, options.clients)
    stop = asyncio.Event()
    answered = asyncio.create_task(load.wait())
    breaking = asyncio.create_task(_break(fleet, options.seed, result, stop))
    warm_at = min(options.requests // 2, max(_WARM_REQUESTS, round(_WARM_PART * options.requests)))
    while not (answered.done() or breaking.done()) and time.monotonic() < began + options.seconds:
        await asyncio.wait((answered, breaking), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        if not result.warm and load.num_done >= warm_at:
            result.warm = await in_thread(fleet, partial(memory_of, fleet, True))
    result.seconds = time.monotonic() - began
    stop.set()
    await breaking  # what is broken is mended
    load.close()
    await asyncio.wait((answered,))
    result.counts, result.problems = load.counts, load.problems
    result.end = await in_thread(fleet, partial(memory_of, fleet, False))
    return result


async def _break(fleet: Fleet, seed: int, result: Soaked, stop: asyncio.Event) -> None:
    """Injects one fault after the other until `stop` is set. Spares the first service of each kind."""
    sizes = {kind: count - 1 for kind, count in fleet.shape.sizes().items()}
    for number in itertools.count(seed):
        for planned in plan(number, len(_FAULTS), _FAULTS, sizes):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAULT_SECONDS):
                    await stop.wait()
                    return
            mend = await in_thread(fleet, partial(hurt, fleet, replace(planned, target=planned.target + 1)))
            await asyncio.sleep(planned.lasting_seconds)
            await in_thread(fleet, mend)
            result.faults[planned.fault.value] += 1


def rows_of(result: Soaked, problems: tuple[str, ...], num_leaked: int) -> list[Row]:
    """What a soak must reach."""
    bad = result.counts["failed"] + result.counts["wrong"]
    growths = result.growths()
    worst = max(growths, key=lambda name: growths[name], default="")
    grown = f"{growths[worst]:+.1%} ({worst})" if worst else "not measured"
    done = result.counts.total() - result.counts["asked again"]
    return [
        Row(f"soak: of {done} requests, failed or wrong", str(bad), "0", bad == 0),
        Row(f"leaked blocks after {result.faults.total()} faults", str(num_leaked), "0", num_leaked == 0),
        Row(
            "growth of memory of any service after warm-up",
            grown,
            "<= 5 %",
            bool(worst) and growths[worst] <= _MAX_GROWTH,
        ),
        Row("other problems of the audit", str(len(problems)), "0", not problems),
    ]


def run(options: SoakOptions) -> tuple[list[Row], str]:
    """One fleet, one soak."""
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as folder, running_fleet(Path(folder), _SHAPE) as fleet:
        result = asyncio.run(soak(fleet, options))
        found = audit(fleet, Fault.GATEWAY_KILLED.value in result.faults)
    growths = result.growths()
    memory = [
        [name, f"{result.warm[name][1] / 2**20:.1f}", f"{result.end[name][1] / 2**20:.1f}", f"{growth:+.1%}"]
        for name, growth in growths.items()
    ]
    rate = (result.counts.total() - result.counts["asked again"]) / result.seconds
    lines = [
        f"soak: {result.seconds:.0f} s, {rate:.0f} requests/s, a million would take {1e6 / rate / 60:.0f} min",
        ", ".join(f"{name} {count}" for name, count in sorted(result.counts.items())),
        "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(result.faults.items())),
        render_table(("memory, MiB", "warm", "end", "growth"), memory),
        *report.first_of(result.problems),
        *report.first_of(found.problems),
    ]
    return rows_of(result, found.problems, found.num_leaked_blocks), "\n".join(lines)


def main() -> int:
    """Soaks and prints. 1: something was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=4 * 3600.0, help="at most")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, text = run(SoakOptions(options.requests, options.seed, options.clients, options.seconds))
    print(f"{text}\n\n{facts_line(machine_facts(('grpcio',)))}, seed {options.seed}\n")
    print(report.table(rows))
    write_json(options.json, {"seed": options.seed, "rows": [[row.what, row.found, row.good] for row in rows]})
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
