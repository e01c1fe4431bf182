"""Measures the CPU of a gateway's process for embeddings: a request of one text, and a text of larger requests.

baton bench vectors [--width 1024] [--seconds 3] [--rounds 3] [--only cpu|beside] [--rate 100] [--json FILE]

Measures also the time between tokens of another model's streams, alone and beside embeddings at a fixed rate.

The gateway is `baton gateway` with real sockets. Its router and worker are simulated in this process, which is also the
client. The cost is all in: the request, its limits, tokenization, placement, the worker's frame, base64 and the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# gRPC's fork handlers break processes that are started while it runs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from bench.gateway.rig import Server, gateway
from bench.gateway.vectors_beside import Gaps, measure_beside, table_of
from support.gateway.scripted_services import MODEL, ScriptedRouter, ScriptedWorker

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.services.bench.serve.http_stream import HttpPool
from baton.v1 import types_pb2, worker_pb2

WANTED_MS = 0.5
_PACKAGES = ("grpcio", "uvloop", "tokenizers", "protobuf", "numpy")
_HEADER = ("", "ms of CPU, median", "min", "max", "wanted", "requests/s")
_WORDS = "Once upon a time there was a little girl who had a dog and a red ball."


class VectorWorker(ScriptedWorker):
    """Returns a vector of each text at once."""

    def __init__(self, width: int) -> None:
        super().__init__("vectors", lambda _: [], step_seconds=0.0)
        vector = np.random.default_rng(0).standard_normal(width)
        self._values = (vector / np.linalg.norm(vector)).astype("<f4").tobytes()

    def _finish(self, frame: Any, submit: worker_pb2.SubmitRequest, new: list[int]) -> None:
        frame.pooled.add(slot=submit.slot, num_vectors=1, values=self._values)
        frame.finishes.add(slot=submit.slot, reason=types_pb2.FINISH_REASON_STOP)


@dataclass(frozen=True)
class Load:
    """Requests of one kind."""

    name: str
    num_texts: int
    num_clients: int
    encoding: str = "base64"
    wanted: str = ""
    costs: list[float] = field(default_factory=list)  # milliseconds a text
    rates: list[float] = field(default_factory=list)

    def body(self) -> bytes:
        texts = [f"{number} {_WORDS}" for number in range(self.num_texts)]
        given = texts[0] if self.num_texts == 1 else texts
        return json.dumps({"model": MODEL.name, "input": given, "encoding_format": self.encoding}).encode()

    def cells(self) -> list[str]:
        """Returns the cells of its line."""
        costs = self.costs
        figures = [f"{one:.3f}" for one in (statistics.median(costs), min(costs), max(costs))]
        return [self.name, *figures, self.wanted, f"{statistics.median(self.rates):,.0f}"]


@contextlib.asynccontextmanager
async def serving(width: int) -> AsyncIterator[Server]:
    """Runs a gateway for a model with vectors of this width."""
    async with VectorWorker(width) as worker, ScriptedRouter([worker]) as router:
        model = types_pb2.ModelInfo()
        model.CopyFrom(MODEL)
        model.pooler.CopyFrom(types_pb2.PoolerInfo(tasks=[types_pb2.POOLING_TASK_EMBED], width=width, normalized=True))
        router.models = [model]
        async with gateway(router.address) as server:
            yield server


async def measure(load: Load, server: Server, seconds: float) -> None:
    """Measures one round. Raises BenchFailed."""
    pool = HttpPool(f"http://127.0.0.1:{server.port}", {})
    request, done = pool.request("POST", "/v1/embeddings", load.body()), 0

    async def ask(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            status = await pool.ask(request, lambda piece, now: None, 30.0)
            if status != 200:
                raise BenchFailed(f"POST /v1/embeddings: HTTP {status}")
            count += 1
        return count

    await asyncio.gather(*(ask(time.perf_counter() + 0.3) for _ in range(load.num_clients)))
    cpu, begin = server.cpu_seconds(), time.perf_counter()
    done = sum(await asyncio.gather(*(ask(begin + seconds) for _ in range(load.num_clients))))
    load.costs.append((server.cpu_seconds() - cpu) / done / load.num_texts * 1e3)
    load.rates.append(done / (time.perf_counter() - begin))
    pool.close()


async def run_beside(options: argparse.Namespace) -> list[Gaps]:
    """Measures the streams of another model. Raises BenchFailed."""
    async with VectorWorker(options.width) as worker:
        return await measure_beside(worker, options.width, options.rate, options.seconds, options.rounds)


async def run(options: argparse.Namespace) -> list[Load]:
    """Measures all loads in turns. Raises BenchFailed."""
    name = f"{options.width} values in base64"
    loads = [
        Load(f"a request, {name}, one client", 1, 1, wanted=f"<= {WANTED_MS}"),
        Load(f"a request, {name}, 32 clients", 1, 32, wanted=f"<= {WANTED_MS}"),
        Load(f"a text of 64, {name}, 4 clients", 64, 4),
        Load(f"a request, {options.width} values as numbers, 32 clients", 1, 32, "float"),
    ]
    async with serving(options.width) as server:
        for _ in range(options.rounds):
            for load in loads:
                await measure(load, server, options.seconds)
    return loads


def main() -> int:
    """Prints the table, and writes JSON where asked. Returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="baton bench vectors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024, help="values of a vector")
    parser.add_argument("--seconds", type=float, default=3, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are reported")
    parser.add_argument("--only", choices=("cpu", "beside"), help="one of the two tables")
    parser.add_argument("--rate", type=float, default=100, help="embeddings a second beside streams")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(facts_line(machine_facts(_PACKAGES)))
    try:
        loads = uvloop.run(run(options)) if options.only != "beside" else []
        gaps = uvloop.run(run_beside(options)) if options.only != "cpu" else []
    except BenchFailed as error:
        print(f"bench vectors: {error}", file=sys.stderr)
        return 1
    if loads:
        print(render_table(_HEADER, [load.cells() for load in loads], options.markdown))
    if gaps:
        print(table_of(gaps, options.markdown))
    rows = [{"name": load.name, "costs_ms": load.costs, "rates": load.rates} for load in loads]
    beside = [{"name": one.name, "p50_ms": one.p50, "p99_ms": one.p99, "rates": one.rates} for one in gaps]
    write_json(options.json, {"facts": machine_facts(_PACKAGES), "rows": rows, "beside": beside})
    return 0


if __name__ == "__main__":
    sys.exit(main())
