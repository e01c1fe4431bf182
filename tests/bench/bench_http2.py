"""What carrying one unary call costs a server that does nothing with it: grpcio's asyncio server, and the router's.

python tests/bench/bench_http2.py [--requests 4000] [--rate 1000] [--rounds 3] [--json PATH]

Each server is a process of its own; the client is grpcio's in another one, the same for both. Requests carry 4 KiB, as
a placement of 256 blocks does. CPU is that of the server's whole process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import uvloop

from baton.router.http2.server import Http2Server
from baton.rpc.channel import SERVER_OPTIONS, open_channel
from baton.rpc.server import Service
from baton.services import ports
from baton.v1 import router_pb2, router_pb2_grpc, types_pb2

_NAME = "baton.v1.RouterService"
_KINDS = {"grpcio": "grpcio's asyncio server", "router": "the router's server"}


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Always the same answer."""

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        """At once."""
        endpoint = types_pb2.Endpoint(worker_id="w1", epoch=1, address="127.0.0.1:1")
        return router_pb2.PlaceResponse(placement_id=1, decode=endpoint)

    async def Place(self, request: router_pb2.PlaceRequest, context: object) -> router_pb2.PlaceResponse:  # noqa: N802
        return self.place(request)


async def serve(kind: str, address: str) -> None:
    """Serves until it is killed."""
    servicer, register = Servicer(), router_pb2_grpc.add_RouterServiceServicer_to_server
    if kind == "router":
        async with Http2Server(
            address, [Service(_NAME, servicer, register)], quick={f"/{_NAME}/Place": servicer.place}
        ):
            await asyncio.Event().wait()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    register(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


async def measure(kind: str, requests: int, rate: float) -> dict[str, float]:
    """Microseconds of the server's CPU and milliseconds of the client's time, for each call."""
    address = f"127.0.0.1:{ports.free_ports(1)[0]}"
    process = psutil.Popen([sys.executable, __file__, "--serve", kind, "--address", address], stderr=subprocess.DEVNULL)
    times: list[float] = []
    try:
        async with open_channel(address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            hashes = os.urandom(4096)

            async def place() -> None:
                began = time.perf_counter()
                await stub.Place(
                    router_pb2.PlaceRequest(model="m", block_hashes=hashes), timeout=30, wait_for_ready=True
                )
                times.append((time.perf_counter() - began) * 1e3)

            await place()
            times.clear()
            cpu, began, tasks = sum(process.cpu_times()[:2]), time.perf_counter(), []
            for number in range(requests):
                delay = began + number / rate - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(place()))
            await asyncio.gather(*tasks)
            cpu = sum(process.cpu_times()[:2]) - cpu
    finally:
        process.kill()
        process.wait(10)
    return {
        "cpu_us": cpu / requests * 1e6,
        "p50_ms": statistics.median(times),
        "p99_ms": statistics.quantiles(times, n=100)[98],
    }


def main() -> None:
    """Measures both in turn, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=1000.0, help="calls a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=tuple(_KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.address))
        return
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
    for _ in range(options.rounds):
        for kind, found in rounds.items():
            found.append(uvloop.run(measure(kind, options.requests, options.rate)))
    print(
        f"{options.rate:.0f} calls a second, {os.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}, "
        f"median of {options.rounds} rounds"
    )
    for kind, found in rounds.items():
        middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
        cpu, p50, p99 = middle["cpu_us"], middle["p50_ms"], middle["p99_ms"]
        print(f"{_KINDS[kind]:<26} CPU {cpu:6.0f} us, p50 {p50:6.2f} ms, p99 {p99:6.2f} ms")
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
