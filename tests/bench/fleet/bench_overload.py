"""Sends three times as many requests as a fleet can serve. Measures goodput, and how fast the rest is refused.

baton bench overload [--workers N] [--seconds S] [--factor 3] [--seed N] [--json PATH]
    [--router-flags="--shed"]

A gateway, a router, a kvstore and simulated workers run as processes. The device is so slow that the other services are
not the bottleneck. Arrivals are Poisson in an open loop, with equal loads by three tenants of weights 1:2:4. Loads
around the fleet's capacity come first, and the best goodput of them is the peak. The overload follows.

goodput    complete answers a second within both objectives, TTFT and mean ITL
rejection  at the client, from the request's last byte to the status line; at the gateway, from arrival to refusal
share      of output tokens, by tenant
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.fleet.overload_client import Seen, Tenant, offer
from support.processes.stack import Stack, metric, start_stack

from baton.gateway.access.keys.api_key import digest_of, id_of, new_key
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_PLACES = 8  # rows of each worker's batch
_STEP_SECONDS = 0.1
_NUM_TOKENS = (8, 24)  # of an answer, drawn uniformly
_MEAN_TOKENS = sum(_NUM_TOKENS) / 2
_TTFT, _ITL = 1.0, 0.15  # seconds
_AROUND = (0.7, 0.85, 1.0, 1.15)  # shares of the capacity, to find the peak
_SKIPPED = 4.0  # seconds at the start of a load that do not count
_TENANTS = tuple(
    Tenant(name, weight, new_key()[0]) for name, weight in (("small", 1.0), ("middle", 2.0), ("large", 4.0))
)
_OPERATOR = new_key()[0]
_REFUSED = (429, 503)
_SAMPLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Phase:
    """The results of one load, without its first seconds."""

    factor: float  # of the capacity
    seen: list[Seen]
    seconds: float
    deepest: int  # requests that waited at one worker
    refusals: list[tuple[float, float]]  # at the gateway: upper bound in seconds, count

    @property
    def goodput(self) -> float:
        """Good answers a second."""
        return len([one for one in self.seen if one.is_good(_TTFT, _ITL)]) / self.seconds


def write_keys(path: Path) -> None:
    """Writes the file of the tenants' keys for gateways."""
    keys = [{"id": id_of(one.key), "tenant": one.name, "sha256": digest_of(one.key).hex()} for one in _TENANTS]
    keys.append({"id": id_of(_OPERATOR), "sha256": digest_of(_OPERATOR).hex(), "scopes": ["admin"]})
    tenants = {one.name: {"weight": one.weight} for one in _TENANTS}
    path.write_text(json.dumps({"keys": keys, "tenants": tenants}))


async def _deepest(stack: Stack, stop: asyncio.Event) -> int:
    deepest = 0
    while not stop.is_set():
        loads = await asyncio.to_thread(lambda: [stack.stats(worker).state.load for worker in stack.workers])
        deepest = max(deepest, *(load.queue_depth for load in loads))
        try:
            async with asyncio.timeout(_SAMPLE_SECONDS):
                await stop.wait()
        except TimeoutError:
            continue
    return deepest


def _refusals(stack: Stack) -> dict[float, float]:
    """Returns the gateway's histogram of refusals: bounds and counts."""
    request = urllib.request.Request(f"{stack.url}/metrics", headers={"authorization": f"Bearer {_OPERATOR}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    name = "baton_gateway_rejection_seconds_bucket"
    bounds = [line.split('le="')[1].split('"')[0] for line in text.splitlines() if line.startswith(name)]
    return {float(bound): metric(text, name, le=bound) for bound in bounds}


async def run(stack: Stack, factor: float, capacity: float, seconds: float, rng: random.Random) -> Phase:
    """Runs one load for a time, and waits for its end."""
    stop = asyncio.Event()
    watching = asyncio.create_task(_deepest(stack, stop))
    before = await asyncio.to_thread(_refusals, stack)
    began = time.monotonic()
    port = int(stack.rest.rpartition(":")[2])
    everything = await offer(port, _TENANTS, factor * capacity, seconds + _SKIPPED, _NUM_TOKENS, rng)
    after = await asyncio.to_thread(_refusals, stack)
    stop.set()
    seen = [one for one in everything if one.sent >= began + _SKIPPED]
    refusals = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    return Phase(factor, seen, seconds, await watching, refusals)


def _at(values: Sequence[float], part: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))] if ranked else float("nan")


def _bound_at(refusals: Sequence[tuple[float, float]], part: float) -> str:
    total = refusals[-1][1] if refusals else 0.0
    if not total:
        return "-"
    return f"<= {1000 * next(bound for bound, count in refusals if count >= part * total):g}"


def _shares(seen: Sequence[Seen]) -> dict[str, float]:
    counts = Counter({one.name: 0 for one in _TENANTS})
    for one in seen:
        counts[one.tenant] += len(one.tokens)
    total = sum(counts.values()) or 1
    return {name: count / total for name, count in counts.items()}


def figures_of(phase: Phase, peak: float) -> dict[str, Any]:
    """Returns the figures of one load."""
    admitted = [one for one in phase.seen if one.tokens]
    refused = [one for one in phase.seen if one.status in _REFUSED]
    waits = [one.head - one.sent for one in refused]
    return {
        "load": phase.factor,
        "requests": len(phase.seen),
        "goodput": phase.goodput,
        "of peak": phase.goodput / peak if peak else 0.0,
        "admitted": len(admitted),
        "ttft kept": statistics.mean(one.first <= _TTFT for one in admitted) if admitted else 0.0,
        "itl kept": statistics.mean(one.between <= _ITL for one in admitted) if admitted else 0.0,
        "429": len([one for one in refused if one.status == 429]),
        "503": len([one for one in refused if one.status == 503]),
        "without Retry-After": len([one for one in refused if not one.retry_after]),
        "other failures": len([one for one in phase.seen if one.status not in (*_REFUSED, 200) or not one.status])
        + len([one for one in phase.seen if one.status == 200 and not one.ended]),
        "client p50": _at(waits, 0.5),
        "client p99": _at(waits, 0.99),
        "gateway p50": _bound_at(phase.refusals, 0.5),
        "gateway p99": _bound_at(phase.refusals, 0.99),
        "deepest queue": phase.deepest,
        "shares": _shares(phase.seen),
    }


def show(found: list[dict[str, Any]], options: argparse.Namespace, capacity: float) -> None:
    """Prints the tables."""
    print(f"{facts_line(machine_facts(('grpcio',)))}, seed {options.seed}")
    print(
        f"{options.workers} workers of {_PLACES} places, steps of {1000 * _STEP_SECONDS:.0f} ms, {_NUM_TOKENS[0]} to "
        f"{_NUM_TOKENS[1]} tokens: {capacity:.1f} requests/s; TTFT {1000 * _TTFT:.0f} ms, ITL {1000 * _ITL:.0f} ms\n"
    )
    header = ("load", "requests", "goodput/s", "of peak", "TTFT kept", "ITL kept", "429", "503", "no Retry-After",
              "other failures", "deepest queue")  # fmt: skip
    rows = [
        [
            f"{one['load']:g}x", str(one["requests"]), f"{one['goodput']:.1f}", f"{one['of peak']:.0%}",
            f"{one['ttft kept']:.1%}", f"{one['itl kept']:.1%}", str(one["429"]), str(one["503"]),
            str(one["without Retry-After"]), str(one["other failures"]), str(one["deepest queue"]),
        ]
        for one in found
    ]  # fmt: skip
    print(render_table(header, rows, markdown=True), end="\n\n")
    last = found[-1]
    print(
        render_table(
            ("rejection, ms", "p50", "p99"),
            [
                ["at the client", f"{1000 * last['client p50']:.1f}", f"{1000 * last['client p99']:.1f}"],
                ["at the gateway", last["gateway p50"], last["gateway p99"]],
            ],
            markdown=True,
        ),
        end="\n\n",
    )
    weights = sum(one.weight for one in _TENANTS)
    shares = [[one.name, f"{one.weight / weights:.1%}", f"{last['shares'][one.name]:.1%}"] for one in _TENANTS]
    print(render_table(("tenant", "weight's share", "share"), shares, markdown=True))


async def measure(stack: Stack, options: argparse.Namespace, capacity: float) -> list[dict[str, Any]]:
    """Runs the loads one after the other."""
    rng = random.Random(options.seed)
    await offer(int(stack.rest.rpartition(":")[2]), _TENANTS, capacity / 2, 6.0, _NUM_TOKENS, rng)  # rates are learnt
    phases = [await run(stack, factor, capacity, options.seconds, rng) for factor in _AROUND]
    peak = max(phase.goodput for phase in phases)
    phases.append(await run(stack, options.factor, capacity, 2 * options.seconds, rng))
    return [figures_of(phase, peak) for phase in phases]


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router-flags", default="--shed", help="flags of the router")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    capacity = options.workers * _PLACES / (_MEAN_TOKENS * _STEP_SECONDS)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        write_keys(folder / "keys.json")
        worker = ("--max-num-requests", str(_PLACES), "--sim-step-seconds", str(_STEP_SECONDS))
        router = ("--ttft-objective-ms", f"{1000 * _TTFT:.0f}", "--itl-objective-ms", f"{1000 * _ITL:.0f}")
        stack = start_stack(
            folder,
            cleanup,
            extra={"worker": worker, "router": (*router, *options.router_flags.split())},
            executor="sim",
            decode_workers=options.workers,
            prefill_workers=0,
            api_keys=str(folder / "keys.json"),
        )
        found = asyncio.run(measure(stack, options, capacity))
    show(found, options, capacity)
    write_json(options.json, {"seed": options.seed, "loads": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
