"""Measures what tracing costs: CPU of gateway, router and workers for the same requests with and without traces.

baton bench tracing [--requests 240] [--rounds 16] [--tokens 128] [--seed 0] [--json FILE]

The stack has a collector and simulated workers. Rounds run in pairs, one traced and one untraced, whose order
alternates. The client's trace context selects tracing. CPU is that of every process of the services until the round's
spans are exported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from support.network.otlp_collector import Collector, collecting
from support.processes.stack import MODEL_NAME, Service, Stack, processes_of_session, scheduled_seconds, start_stack

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

Costs = dict[str, float]  # by service

_MOST_PERCENT = 3.0
_EXPORT_SECONDS = 3.0  # spans are exported every 2 s
_CLIENTS = 32
_WORDS = ("the", "a", "dog", "river", "story", "long", "little", "tell", "me", "about", "with", "who", "went", "ball")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 1 if tracing costs too much."""
    options = _options(argv)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        collector = cleanup.enter_context(collecting())
        extra = {"worker": ("--sim-eos-every", "0")}
        stack = start_stack(folder, cleanup, extra, executor="sim", otlp_endpoint=collector.address, trace_sampling=0)
        random_of = random.Random(options.seed)
        _round(stack, options, random_of, traced=True)  # warm
        costs: dict[bool, list[Costs]] = {False: [], True: []}
        for number in range(options.rounds):
            for traced in (number % 2 == 0, number % 2 == 1):
                costs[traced].append(_round(stack, options, random_of, traced))
    return _report(options, costs, collector)


def _round(stack: Stack, options: argparse.Namespace, random_of: random.Random, traced: bool) -> Costs:
    """Returns the CPU milliseconds per request, by service."""
    bodies = [
        {"model": MODEL_NAME, "prompt": " ".join(random_of.choices(_WORDS, k=300)), "stream": True,
         "max_tokens": options.tokens}
        for _ in range(options.requests)
    ]  # fmt: skip
    contexts = [
        f"00-{random_of.getrandbits(128) or 1:032x}-{random_of.getrandbits(64) or 1:016x}-0{traced:d}" for _ in bodies
    ]
    before = _cpu_seconds(stack)
    with ThreadPoolExecutor(_CLIENTS) as pool:
        statuses = set(pool.map(lambda body, context: _ask(stack.rest, body, context), bodies, contexts))
    time.sleep(_EXPORT_SECONDS)
    assert statuses == {200}, statuses
    after = _cpu_seconds(stack)
    return {name: 1000 * (after[name] - before[name]) / options.requests for name in after}


def _ask(address: str, body: dict[str, object], traceparent: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        headers = {"content-type": "application/json", "traceparent": traceparent}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def _cpu_seconds(stack: Stack) -> Costs:
    return {name: _cpu_of(service) for name, service in stack.services.items()}


def _cpu_of(service: Service) -> float:
    assert service.process is not None
    return sum(map(scheduled_seconds, processes_of_session(service.process.pid)))


def _report(options: argparse.Namespace, costs: dict[bool, list[Costs]], collector: Collector) -> int:
    names = list(costs[True][0])
    rows = [_row(name, [[one[name] for one in costs[traced]] for traced in (False, True)]) for name in names]
    totals = [[sum(one.values()) for one in costs[traced]] for traced in (False, True)]
    rows.append(_row(f"all, {options.tokens} tokens a request", totals, f"<= {_MOST_PERCENT:.0f} %"))
    print(facts_line(machine_facts(("grpcio", "protobuf", "uvloop"))))
    header = ("", "untraced ms CPU/request", "traced", "tracing adds (quartiles)", "wanted")
    print(render_table(header, rows, markdown=True))
    num_traced = (options.rounds + 1) * options.requests
    print(f"{len(collector.spans) / num_traced:.1f} spans a request; {options.rounds} pairs of {options.requests}, "
          f"seed {options.seed}")  # fmt: skip
    write_json(options.json, {"untraced": costs[False], "traced": costs[True]})
    return 1 if _added(totals) > _MOST_PERCENT else 0


def _row(name: str, costs: list[list[float]], wanted: str = "") -> list[str]:
    off, on = map(median, costs)
    low, _, high = quantiles(_pairs(costs), n=4)
    return [name, f"{off:.3f}", f"{on:.3f}", f"{_added(costs):+.1f} % ({low:+.1f} to {high:+.1f})", wanted]


def _added(costs: list[list[float]]) -> float:
    """Returns the percentage of the median pair, because a slow moment of the machine spoils only one pair."""
    return median(_pairs(costs))


def _pairs(costs: list[list[float]]) -> list[float]:
    return [100 * (traced - plain) / plain for plain, traced in zip(*costs, strict=True)]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton bench tracing", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=240, help="requests per round")
    parser.add_argument("--rounds", type=int, default=16, help="pairs of rounds")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
