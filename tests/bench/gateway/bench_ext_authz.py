"""Measures what Envoy's ext_authz Check costs: the time it adds to a request, and CPU, at a steady rate.

baton bench ext_authz [--rate 500] [--seconds 2] [--rounds 10] [--json PATH]

A real Envoy with the shipped configuration and TLS calls a real gateway, whose limits are in a real Redis. Envoy itself
answers authorized requests, so that nothing else is measured. Requests are due at regular times, whether or not earlier
ones are complete, and a request's time begins when it is due. The cases take turns. `best` is the lowest figure of all
rounds. Envoy measures a Check in whole milliseconds, rounded down, so that the share below 2 ms is exact. It is
reported for the median round with quartiles, because a shared machine is not equally fast in all rounds. Client, Envoy,
gateway and Redis share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import ssl
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.gateway.access_rig import key_file
from support.network import envoy
from support.network.envoy_rig import HOSTS, Access, start_gateway, trusting
from support.network.tls_rig import make_certs
from support.processes.ports import free_ports
from support.processes.stack import RedisServer, wait_until

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

CONNECTIONS = 16
PATH = "/v1/chat/completions"
UNASKED = "/unasked"
LIMITS = {
    "requests_per_minute": 1 << 40,
    "input_tokens_per_minute": 1 << 40,
    "output_tokens_per_minute": 1 << 40,
    "concurrent_requests": 1 << 20,
    "tokens_per_month": 1 << 50,
}
WARM_UP_SECONDS = 1.0
_FLUSH_SECONDS = 0.25  # interval at which Envoy merges its histograms
_MOST_MS = 2  # bound for 99 % of Checks


@dataclass(frozen=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    key: str
    expected: int = 200

    @property
    def request(self) -> bytes:
        """Returns the request, without a body, because Envoy would close the connection after an earlier answer."""
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.key}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: 0\r\n\r\n".encode()


@dataclass
class Taken:
    """The measurements of one case."""

    rounds: list[list[float]] = field(default_factory=list)  # milliseconds of each request, in ascending order
    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds, by process

    def best(self, share: float) -> float:
        """Returns the lowest percentile of all rounds, in milliseconds, because other programs disturb some rounds."""
        return min(percentile(one, share) for one in self.rounds)

    def percentile(self, share: float) -> float:
        """Returns the percentile over all rounds together."""
        return percentile(sorted(one for round_ in self.rounds for one in round_), share)

    def microseconds_of(self, process: str) -> float:
        """Returns the CPU per request."""
        return self.cpu[process] / sum(map(len, self.rounds)) * 1e6


def percentile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a case in a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as cleanup:
        front, cases, processes = start(Path(name), cleanup)
        context = trusting_http1(front)
        runs = measure(front, context, cases, processes, options.rate, options.seconds, options.rounds)
        taken, checks = uvloop.run(runs)
    report(taken, checks, options)


def start(folder: Path, cleanup: ExitStack) -> tuple[envoy.Envoy, list[Case], dict[str, psutil.Process]]:
    """Starts Redis, a gateway and Envoy. Returns Envoy, the cases, and the measured processes."""
    redis = RedisServer(folder, *free_ports(1))
    redis.start()
    cleanup.callback(redis.stop)
    path, (free, limited) = key_file(
        folder, [{"tenant": "free"}, {"tenant": "limited"}], {"free": {}, "limited": LIMITS}
    )
    access = Access(make_certs(folder / "certs", hosts=HOSTS), path, {})
    addresses, gateway = start_gateway(folder, cleanup, access, "--redis-url", redis.url, "--limit-timeout-ms", "5000")
    front = cleanup.enter_context(envoy.running(folder / "envoy", addresses, answering(envoy.moved(addresses))))
    wait_until(lambda: front.stats()["cluster.ext_authz.membership_healthy"], "Envoy can ask", 30)
    cases = [
        Case("not asked about", UNASKED, free),
        Case("a wrong key", PATH, free[:-1] + ("a" if free[-1] != "a" else "b"), 401),
        Case("a key, no limits", PATH, free),
        Case("a key, five limits in Redis", PATH, limited),
    ]
    assert gateway.process is not None
    assert front.process is not None
    pids = {"gateway": gateway.process.pid, "Envoy": front.process.pid}
    return front, cases, {name: psutil.Process(pid) for name, pid in pids.items()}


def answering(settings: dict[str, Any]) -> dict[str, Any]:
    """Adds routes that Envoy answers itself, one of them without a Check."""
    settings["stats_flush_interval"] = f"{_FLUSH_SECONDS}s"
    (host,) = envoy.manager_of(settings)["route_config"]["virtual_hosts"]
    answer = {"direct_response": {"status": 200, "body": {"inline_string": "{}"}}}
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute"
    host["routes"] = [
        {
            "match": {"prefix": UNASKED},
            **answer,
            "typed_per_filter_config": {"envoy.filters.http.ext_authz": {"@type": kind, "disabled": True}},
        },
        {"match": {"prefix": "/"}, **answer},
    ]
    return settings


def trusting_http1(front: envoy.Envoy) -> ssl.SSLContext:
    """Returns the TLS context of the client's connections."""
    context = trusting(Access(front.addresses.certificates, Path(), {}))
    context.set_alpn_protocols(["http/1.1"])
    return context


async def measure(
    front: envoy.Envoy,
    context: ssl.SSLContext,
    cases: list[Case],
    processes: Mapping[str, psutil.Process],
    rate: float,
    seconds: float,
    rounds: int,
) -> tuple[dict[str, Taken], list[Counter[float]]]:
    """Measures every case, round by round. Returns the cases' results, and Envoy's histogram of Checks per round."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await Connection.open(front.addresses.edge, context))
    taken: dict[str, Taken] = {case.name: Taken() for case in cases}
    for case in cases:
        await send(case, free, rate, WARM_UP_SECONDS)
    checks, seen = [], await check_milliseconds(front)
    for _ in range(rounds):
        for case in cases:
            before = {name: cpu_of(process) for name, process in processes.items()}
            taken[case.name].rounds.append(sorted(await send(case, free, rate, seconds)))
            for name, process in processes.items():
                taken[case.name].cpu[name] += cpu_of(process) - before[name]
        now = await check_milliseconds(front)
        checks.append(now - seen)
        seen = now
    while not free.empty():
        free.get_nowait().writer.close()
    return taken, checks


async def send(case: Case, free: asyncio.Queue[Connection], rate: float, seconds: float) -> list[float]:
    """Sends requests. Returns the milliseconds from the time when each was due to its answer."""
    clock = time.perf_counter  # uvloop's clock has whole milliseconds
    begin, count = clock() + 0.01, int(rate * seconds)
    milliseconds: list[float] = []

    async def one(due: float) -> None:
        connection = await free.get()
        status = await connection.ask(case.request)
        milliseconds.append((clock() - due) * 1000)
        free.put_nowait(connection)
        assert status == case.expected, f"{case.name} was answered with {status}"

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            due = begin + number / rate
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(due))
    return milliseconds


@dataclass
class Connection:
    """A connection of the client, which sends one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int, context: ssl.SSLContext) -> Connection:
        """Connects to this machine."""
        return cls(*await asyncio.open_connection("localhost", port, ssl=context))

    async def ask(self, request: bytes) -> int:
        """Sends a request and reads the whole answer. Returns the status."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(int(length.partition(b":")[2]))
        return int(head[9:12])


def cpu_of(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def check_milliseconds(front: envoy.Envoy) -> Counter[float]:
    """Returns Envoy's histogram of all Checks so far, in whole milliseconds, rounded down."""
    await asyncio.sleep(2 * _FLUSH_SECONDS)
    told = front.ask_admin("/stats?histogram_buckets=detailed&filter=^cluster.ext_authz.upstream_rq_time$")
    totals = re.search(r"totals=(.*)", told)
    if totals is None:
        return Counter()
    return Counter({float(lower): int(count) for lower, count in re.findall(r"([\d.]+),[\d.]+:\s*(\d+)", totals[1])})


def share_within(checks: Counter[float], milliseconds: int) -> float:
    """Returns the share of Checks that took less."""
    return sum(count for lower, count in checks.items() if lower < milliseconds) / checks.total()


def report(taken: Mapping[str, Taken], checks: list[Counter[float]], options: argparse.Namespace) -> None:
    facts = machine_facts(("grpcio", "uvloop"))
    rows = []
    for name, one in taken.items():
        milliseconds = [one.best(0.5), one.best(0.99), one.percentile(0.5), one.percentile(0.99)]
        cpu = [one.microseconds_of(process) for process in ("gateway", "Envoy")]
        rows.append([name, *(f"{value:.2f}" for value in milliseconds), *(f"{value:.0f}" for value in cpu)])
    print(facts_line(facts))
    columns = ["case", "p50 ms, best", "p99 ms, best", "p50 ms", "p99 ms", "gateway's CPU us", "Envoy's CPU us"]
    print(render_table(columns, rows))
    shares = sorted(share_within(one, _MOST_MS) for one in checks)
    within = statistics.median(shares)
    low, high = percentile(shares, 0.25), percentile(shares, 0.75)
    every = share_within(sum(checks, Counter()), _MOST_MS)
    print(f"Checks that took less than {_MOST_MS} ms, as Envoy saw it (wanted: 99 %):", end=" ")
    print(f"{within:.2%} in the median round (quartiles {low:.2%}, {high:.2%}), {every:.2%} of all")
    if options.json:
        document = {"machine": facts, "rate": options.rate, "columns": columns, "rows": rows, "within": shares}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
