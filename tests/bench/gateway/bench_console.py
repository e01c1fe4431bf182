"""Measures what consoles cost the gateway: CPU of its process while 0, 1 or 10 consoles watch a fleet.

baton bench console [--workers 100] [--consoles 0,1,10] [--seconds 10] [--rounds 3] [--seed 1]

The gateway and the router are separate processes. The workers are scripted in this one, and each publishes its state
twice a second. 50 requests a second are placed and reported. Cases take turns in every round. `wanted` is a share of
one core. Consoles receive a snapshot per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# gRPC logs every fork, and its fork handlers hang or end some of the started processes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from bench.gateway.rig import Server, gateway
from support.gateway.console_fleet import console_fleet

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json

_HEADER = ("consoles", "CPU of a core: median", "min", "max", "wanted", "snapshots/s each", "bytes a snapshot")
_WANTED = "<= 5 %"
_SETTLE_SECONDS = 2.0
_PACKAGES = ("grpcio", "uvloop", "protobuf", "msgspec")


@dataclass
class Row:
    """The figures of every round for one number of consoles."""

    consoles: int
    shares: list[float] = field(default_factory=list)  # of one core
    rates: list[float] = field(default_factory=list)  # snapshots per second and console
    sizes: list[float] = field(default_factory=list)  # bytes

    def cells(self) -> list[str]:
        """Returns the cells of the table's line."""
        percent = [f"{100 * pick(self.shares):.2f} %" for pick in (statistics.median, min, max)]
        told = (
            (f"{statistics.median(self.rates):.2f}", f"{statistics.median(self.sizes):,.0f}")
            if self.rates
            else ("", "")
        )
        return [str(self.consoles), *percent, _WANTED if self.consoles else "", *told]


class Watcher:
    """One console's connection: reads snapshots and counts them."""

    def __init__(self) -> None:
        self.num_snapshots = 0
        self.num_bytes = 0

    async def follow(self, port: int) -> None:
        """Reads until cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        try:
            writer.write(b"GET /console/stream HTTP/1.1\r\nhost: bench\r\n\r\n")
            status = await reader.readline()
            assert b" 200 " in status, status
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.num_snapshots += 1
                    self.num_bytes += len(line)
        finally:
            writer.close()


async def measure(row: Row, server: Server, seconds: float) -> None:
    """Measures one round of one case."""
    watchers = [Watcher() for _ in range(row.consoles)]
    tasks = [asyncio.create_task(watcher.follow(server.port)) for watcher in watchers]
    try:
        await asyncio.sleep(_SETTLE_SECONDS)
        for watcher in watchers:
            watcher.num_snapshots = watcher.num_bytes = 0
        began, cpu = time.perf_counter(), server.cpu_seconds()
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - began
        row.shares.append((server.cpu_seconds() - cpu) / elapsed)
        seen = sum(watcher.num_snapshots for watcher in watchers)
        if seen:
            row.rates.append(seen / elapsed / len(watchers))
            row.sizes.append(sum(watcher.num_bytes for watcher in watchers) / seen)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def run(options: argparse.Namespace) -> list[Row]:
    """Measures the gateway with each number of open consoles, round by round."""
    rows = [Row(int(count)) for count in options.consoles.split(",")]
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(console_fleet(options.workers, options.placements, options.seed))
        server = await stack.enter_async_context(gateway(router))
        for _ in range(options.rounds):
            for row in rows:
                await measure(row, server, options.seconds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--consoles", default="0,1,10", help="number of consoles in each case")
    parser.add_argument("--placements", type=float, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each case in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = uvloop.run(run(options))
    facts = machine_facts(_PACKAGES)
    print(f"{facts_line(facts)}, {options.workers} workers, seed {options.seed}")
    print(render_table(_HEADER, [row.cells() for row in rows], markdown=True))
    write_json(options.json, {**facts, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
