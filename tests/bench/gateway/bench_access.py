"""Measures what keys and limits cost the gateway: CPU per request, with a real Redis and one round trip each.

baton bench access [--requests 20000] [--concurrent 32] [--json PATH]

A request is identified by its headers, admitted by five limits, which are written as headers, and settled with less
than it reserved. CPU is that of this whole process, including the event loop and the kernel's work for it. Redis is a
separate process. The best run is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.gateway.access_rig import key_file
from support.processes.ports import free_ports
from support.redis.program import redis_program

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.factory import open_gate
from baton.gateway.access.gate import Gate, Permit
from baton.gateway.access.identity import Scope
from baton.gateway.access.settings import AccessSettings
from baton.gateway.core import Delta, Generation, GenerationRequest, Sink, Usage
from baton.gateway.serving.tenancy import AdmittedGenerator
from baton.rpc.errors import ServiceError
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.v1 import types_pb2

LIMITS = {
    "requests_per_minute": 1 << 40,
    "input_tokens_per_minute": 1 << 40,
    "output_tokens_per_minute": 1 << 40,
    "concurrent_requests": 1 << 20,
    "tokens_per_month": 1 << 50,
}
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = uvloop.run(measure(options.requests, options.concurrent))
    facts = machine_facts(("redis", "hiredis", "uvloop"))
    print(facts_line(facts))
    print(render_table(["case", "us of CPU a request"], [[row["case"], f"{row['microseconds']:.1f}"] for row in rows]))
    if options.json:
        write_json(options.json, {"machine": facts, "rows": rows})


async def measure(num_requests: int, concurrent: int) -> list[dict[str, Any]]:
    """Measures every case, cheapest first."""
    rows = []
    with tempfile.TemporaryDirectory() as name, running_redis(Path(name)) as url:
        tenants = {"limited": LIMITS, "free": {}}
        path, (limited, free) = key_file(Path(name), [{"tenant": "limited"}, {"tenant": "free"}], tenants)
        wrong = free[:-1] + ("a" if free[-1] != "a" else "b")
        counters = AccessCounters()
        async with open_gate(AccessSettings(str(path), url, 1, 5.0), counters) as gate:
            rows.append({"case": "a wrong key", "microseconds": refusals(gate, wrong, num_requests)})
            for case, key in (("a key, no limits", free), ("a key, five limits in Redis", limited)):
                best = min([await cpu_of(gate, key, num_requests, concurrent) for _ in range(RUNS)])
                rows.append({"case": case, "microseconds": best})
        async with open_gate(AccessSettings(str(path), "", 1, 5.0), AccessCounters()) as gate:
            best = min([await cpu_of(gate, limited, num_requests, concurrent) for _ in range(RUNS)])
            rows.append({"case": "a key, five limits in memory", "microseconds": best})
        assert not counters.redis_errors, counters
        assert not counters.local_decisions
    return rows


def refusals(gate: Gate, key: str, num_requests: int) -> float:
    """Returns the microseconds of CPU to reject a wrong key."""
    headers = {b"authorization": f"Bearer {key}".encode()}
    began = time.process_time()
    for _ in range(num_requests):
        try:
            gate.identify(keys_in_headers(headers), Scope.INFERENCE)
        except Exception:
            continue
        raise AssertionError("a wrong key was accepted")
    return (time.process_time() - began) / num_requests * 1e6


async def cpu_of(gate: Gate, key: str, num_requests: int, concurrent: int) -> float:
    """Returns the microseconds of CPU per request."""
    headers = {b"host": b"x", b"authorization": f"Bearer {key}".encode(), b"content-type": b"application/json"}
    request = GenerationRequest("r", "m", [7] * 512, stop=types_pb2.StopConditions(max_tokens=256))
    inner, sink = Nothing(), NoSink()

    def note(ticket: Permit) -> None:
        ticket.headers()

    async def client() -> None:
        for _ in range(num_requests // concurrent):
            identity = gate.identify(keys_in_headers(headers), Scope.INFERENCE)
            admitted = AdmittedGenerator(inner, gate, identity, [request], 4096, note)
            await admitted.start(request, sink)
            admitted.close()

    began = time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    return (time.process_time() - began) / (num_requests // concurrent * concurrent) * 1e6


class Nothing:
    """A Generator whose generations end at once."""

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        if request.on_end is not None:
            request.on_end(Usage(512, 200, 0))
        return self

    def abort(self) -> None:
        """Does nothing, because the generation has ended."""

    def resume(self) -> None:
        """Does nothing, because the generation has ended."""


class NoSink:
    """A sink that drops everything."""

    writable = True

    def on_delta(self, delta: Delta) -> None:
        """Never called."""

    def on_done(self, usage: Usage) -> None:
        """Never called."""

    def on_error(self, error: ServiceError) -> None:
        """Never called."""


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Runs a Redis server on a free port. Yields its URL."""
    port = free_ports(1)[0]
    words = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int) -> None:
    """Waits until the server responds."""
    import redis

    with redis.Redis(port=port) as client:
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.05)
            else:
                return
    raise SystemExit("redis-server did not start")


if __name__ == "__main__":
    main()
