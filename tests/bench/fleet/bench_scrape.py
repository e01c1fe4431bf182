"""Measures how long a scrape of /metrics takes with requests in flight, for each service of a simulated stack.

baton bench scrape [--requests 1000] [--scrapes 40] [--json FILE]

One slow simulated worker holds every request. A scrape is one GET of /metrics on a new connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from support.processes.stack import MODEL_NAME, Service, Stack, metric, start_stack, wait_until

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_MOST_MS = 20.0
_SLOW = ("--sim-eos-every", "0", "--sim-step-seconds", "0.5", "--max-num-requests", "4096",
         "--max-num-batched-tokens", "8192", "--max-queue", "8192", "--num-blocks", "65536")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 1 if a service's median scrape takes too long."""
    options = _options(argv)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
        extra = {"worker": _SLOW, "router": ("--max-queue-depth", "8192")}
        stack = start_stack(folder, cleanup, extra, executor="sim", prefill_workers=0)
        figures = asyncio.run(_measure(stack, options))
    header = ("service", "bytes", "scrape p50 ms", "p99 ms", "CPU ms a scrape", "wanted")
    rows = [
        [name, f"{size:,}", f"{statistics.median(times):.1f}", f"{sorted(times)[-1 - len(times) // 100]:.1f}",
         f"{cpu:.1f}", f"<= {_MOST_MS:.0f} ms"]
        for name, (size, times, cpu) in figures.items()
    ]  # fmt: skip
    print(facts_line(machine_facts(("prometheus-client", "uvloop"))))
    print(render_table(header, rows, markdown=True))
    print(f"{options.requests} requests in flight, {options.scrapes} scrapes of each")
    write_json(options.json, {name: {"bytes": row[0], "ms": row[1]} for name, row in figures.items()})
    return 1 if any(statistics.median(times) > _MOST_MS for _, times, _ in figures.values()) else 0


async def _measure(stack: Stack, options: argparse.Namespace) -> dict[str, tuple[int, list[float], float]]:
    """Returns for each service: bytes, milliseconds of each scrape, and CPU of its process per scrape."""
    async with _streams(stack, options.requests):
        return await asyncio.to_thread(_scrape_all, stack, options)


def _scrape_all(stack: Stack, options: argparse.Namespace) -> dict[str, tuple[int, list[float], float]]:
    in_flight = "baton_gateway_in_flight"
    wait_until(lambda: metric(_scrape(stack["gateway"])[0], in_flight) >= options.requests, "all are in flight", 120)
    found = {}
    for name, service in stack.services.items():
        before, times, size = _cpu(service), [], 0
        for _ in range(options.scrapes):
            text, seconds = _scrape(service)
            times.append(1000 * seconds)
            size = len(text)
        found[name] = (size, times, 1000 * (_cpu(service) - before) / options.scrapes)
    return found


def _scrape(service: Service) -> tuple[str, float]:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(service.plan.metrics, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text, time.perf_counter() - began


def _cpu(service: Service) -> float:
    assert service.process is not None
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def _streams(stack: Stack, count: int) -> AsyncIterator[None]:
    """Keeps this many streams running within the block."""
    tasks = [asyncio.create_task(_stream(stack.rest, number)) for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(address: str, number: int) -> None:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": MODEL_NAME, "prompt": f"{number} once", "max_tokens": 1900, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="baton bench scrape", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="requests in flight")
    parser.add_argument("--scrapes", type=int, default=40, help="scrapes of each service")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
