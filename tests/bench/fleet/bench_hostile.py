"""Sends hostile requests to a real fleet. Measures their CPU, retained memory, and stalls of the gateway.

baton bench hostile [--cases N] [--case N [--repeat N]] [--seconds S] [--seed N] [--family NAME]
    [--siege S [--slowest N]] [--json PATH]

A gateway, a router, a kvstore and a worker run as processes, with API keys and limits. A seeded search varies bodies,
prompts, grammars, schemas and ways of sending, up to the gateway's body limit. `--case N` repeats one case. Exits with
1 if a bound is exceeded.

CPU      of all processes, including helpers and reaped children, minus an idle fleet's: until the first token, and
         after the client has left. Answers without streaming are only judged by stall and memory
stays    growth of the resident memory of all processes, up to a second later. If it is too much, the growth caused by
         the same request sent again, up to three times: full caches and heaps do not grow again, but leaks do
stall    the slowest answer to a probe of GET /health, or the gateway's CPU in that time if that is less
neighbour  another tenant's TTFT while 16 clients attack within the limits of docs/guides, divided by the TTFT without
         them. The clients only get the CPU that the fleet leaves, as if they were on other machines. The floor is the
         same ratio with programs that compute on every CPU in place of the clients
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from attack.cases.corpus import FAMILIES, make_case
from attack.fleet import Attacked, Cost
from attack.siege import besiege
from attack.verdict import as_json, misses, rows, show
from support.network.otlp_collector import collecting

from baton.services.bench.report import facts_line, machine_facts, write_json

_WARM_SEED = 1_000_003  # the cases of the warm-up differ from those of the search
_WARM_CASES = 48
_SIEGE_CASES = 64


def _numbers(options: argparse.Namespace) -> list[int]:
    if options.case:
        return [number for number in options.case for _ in range(options.repeat)]
    names = tuple(FAMILIES)
    return [n for n in range(options.start, options.cases) if options.family in ("", names[n % len(names)])]


def search(fleet: Attacked, options: argparse.Namespace) -> list[Cost]:
    """Sends every case. Prints those that exceed a bound as they are found."""
    costs: list[Cost] = []
    until = time.monotonic() + options.seconds
    for number in _numbers(options):
        if time.monotonic() > until:
            print(f"stopped before case {number}: time is up")
            break
        cost = fleet.cost(make_case(options.seed, number))
        costs.append(cost)
        wrong = misses(cost)
        if wrong or options.case or options.verbose:
            figures = f"{cost.cpu:.2f} CPU-s, {cost.grown / 1e6:.1f} MB, {1000 * cost.stall:.0f} ms"
            print(f"{cost.case.name}: {cost.answer.status}, {figures}; {', '.join(wrong) or 'kept'}", flush=True)
            if options.case:
                parts = ", ".join(f"{name} {cpu:.2f}" for name, cpu in cost.parts.items())
                print(f"    CPU-s: {parts}; {cost.answer.text!r}")
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0, help="the first case")
    parser.add_argument("--case", type=int, action="append", help="only this one; may be repeated")
    parser.add_argument("--repeat", type=int, default=1, help="how many times to send each --case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no further case is sent")
    parser.add_argument("--family", default="", choices=("", *FAMILIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--executor", choices=("cpu", "sim"), default="sim")
    parser.add_argument("--siege", type=float, default=30.0, help="seconds of load by 16 attackers; 0: none")
    parser.add_argument("--slowest", type=int, default=0, help="trace, and print the stages of this many TTFTs")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cases < 1:
        parser.error(f"--cases {options.cases}: must be at least 1; the siege draws from them")
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        collector = cleanup.enter_context(collecting()) if options.slowest else None
        fleet = Attacked(folder, cleanup, options.executor, collector)
        fleet.warm_up([make_case(_WARM_SEED, number) for number in range(_WARM_CASES)])
        idle = fleet.rest()
        costs = search(fleet, options)
        siege = None
        if options.siege and not options.case:
            drawn = random.Random(options.seed).sample(range(options.cases), min(_SIEGE_CASES, options.cases))
            siege = besiege(fleet, drawn, options.siege, options.seed, options.slowest)
        table = rows(costs, siege)
    print(f"\n{facts_line(machine_facts(('grpcio',)))}, seed {options.seed}, {len(costs)} cases, idle {idle:.1%}\n")
    print(show(costs, table))
    write_json(options.json, {"seed": options.seed, "cases": [as_json(one) for one in costs]})
    return 0 if all(row.good for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
