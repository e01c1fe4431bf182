"""Measures the time between tokens of one model's streams alone, and beside embeddings of another model.

Each model has its gateway and its worker; they share the router and the machine. Embeddings come at a fixed rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gateway.load import chat, http_request
from bench.gateway.reader import Arrivals, watch_streams
from bench.gateway.rig import PacedWorker, Server, gateway
from support.gateway.scripted_services import MODEL, ScriptedRouter, ScriptedWorker

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import render_table
from baton.services.bench.serve.http_stream import HttpPool
from baton.v1 import router_pb2, types_pb2

WANTED_RATIO = 1.05
_EMBEDDER = "embedder"
_STEP_SECONDS = 0.02
_NUM_STREAMS = 32
_NUM_CLIENTS = 16
_HEADER = ("32 streams of another model", "ITL p50, ms", "p99, ms", "of alone", "wanted", "embeddings/s")
_TOKEN_IDS = (100, 200, 300)


class ModelRouter(ScriptedRouter):
    """Places requests on their model's worker."""

    def __init__(self, endpoints: dict[str, types_pb2.Endpoint]) -> None:
        super().__init__([])
        self._endpoints = endpoints

    async def Place(self, request: Any, context: Any) -> router_pb2.PlaceResponse:  # noqa: N802
        self.places.append(request)
        return router_pb2.PlaceResponse(placement_id=len(self.places), decode=self._endpoints[request.model])


@dataclass(slots=True)
class Gaps:
    """The times between tokens of one kind of round."""

    name: str
    p50: list[float] = field(default_factory=list)  # ms, of each round
    p99: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # embeddings a second

    def cells(self, alone: Gaps) -> list[str]:
        """Returns the cells of its line."""
        ratio = statistics.median(self.p99) / statistics.median(alone.p99)
        limits = (f"{ratio:.3f}", f"<= {WANTED_RATIO}") if self is not alone else ("", "")
        return [
            self.name,
            *(f"{statistics.median(one):.2f}" for one in (self.p50, self.p99)),
            *limits,
            f"{statistics.median(self.rates):.0f}" if self.rates else "",
        ]


async def measure_beside(worker: ScriptedWorker, width: int, rate: float, seconds: float, rounds: int) -> list[Gaps]:
    """Measures streams alone and beside `rate` embeddings a second by the worker, in turns. Raises BenchFailed."""
    alone, beside = Gaps("alone"), Gaps("beside embeddings")
    async with _fleet(worker, width) as (generating, embedding):
        for _ in range(rounds):
            await _round(alone, generating, seconds)
            async with _embedding(embedding, rate, beside):
                await _round(beside, generating, seconds)
    return [alone, beside]


def table_of(found: Sequence[Gaps], markdown: bool) -> str:
    """Returns the table; the first one is alone."""
    return render_table(_HEADER, [one.cells(found[0]) for one in found], markdown)


@contextlib.asynccontextmanager
async def _fleet(embedder: ScriptedWorker, width: int) -> AsyncIterator[tuple[Server, Server]]:
    embeds = types_pb2.ModelInfo()
    embeds.CopyFrom(MODEL)
    embeds.name = _EMBEDDER
    embeds.pooler.CopyFrom(types_pb2.PoolerInfo(tasks=[types_pb2.POOLING_TASK_EMBED], width=width, normalized=True))
    async with PacedWorker(_TOKEN_IDS, _STEP_SECONDS) as paced:
        router = ModelRouter({MODEL.name: paced.endpoint, _EMBEDDER: embedder.endpoint})
        router.models = [MODEL, embeds]
        async with (
            router,
            gateway(router.address) as generating,
            gateway(router.address, served=_EMBEDDER) as embedding,
        ):
            yield generating, embedding


async def _round(gaps: Gaps, server: Server, seconds: float) -> None:
    requests = [
        http_request(chat(stream=True, max_tokens=1900, ignore_eos=True, seed=seed)) for seed in range(_NUM_STREAMS)
    ]
    watched = await watch_streams(server, requests, seconds)
    found = [1000 * gap for stream in watched.streams for gap in gaps_of(stream, watched.begin)]
    cuts = statistics.quantiles(found, n=100)
    gaps.p50.append(cuts[49])
    gaps.p99.append(cuts[98])


def gaps_of(stream: Arrivals, begin: float) -> list[float]:
    """Returns the seconds between a stream's tokens that arrived after `begin`."""
    found: list[float] = []
    earlier, before = 0.0, 0
    for arrival, total in zip(stream.times, stream.totals, strict=True):
        if earlier >= begin:
            # Tokens that were read at once came together: the first of them after the gap.
            found += [arrival - earlier, *[0.0] * (total - before - 1)]
        earlier, before = arrival, total
    return found


@contextlib.asynccontextmanager
async def _embedding(server: Server, rate: float, gaps: Gaps) -> AsyncIterator[None]:
    """Asks for embeddings at a fixed rate, and records the rate that was reached."""
    pool = HttpPool(f"http://127.0.0.1:{server.port}", {})
    body = {"model": _EMBEDDER, "input": "Once upon a time there was a little girl.", "encoding_format": "base64"}
    request, count = pool.request("POST", "/v1/embeddings", json.dumps(body).encode()), 0

    async def ask(first: float) -> None:
        nonlocal count
        due = time.perf_counter() + first
        while True:
            await asyncio.sleep(due - time.perf_counter())
            due = max(due + _NUM_CLIENTS / rate, time.perf_counter())
            status = await pool.ask(request, lambda piece, now: None, 30.0)
            if status != 200:
                raise BenchFailed(f"POST /v1/embeddings: HTTP {status}")
            count += 1

    began = time.perf_counter()
    asking = [asyncio.create_task(ask(number / rate)) for number in range(_NUM_CLIENTS)]
    try:
        yield
        gaps.rates.append(count / (time.perf_counter() - began))
    finally:
        for task in asking:
            task.cancel()
        failed = [one for one in await asyncio.gather(*asking, return_exceptions=True) if isinstance(one, BenchFailed)]
        pool.close()
    if failed:
        raise failed[0]
