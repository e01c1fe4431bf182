"""An engine in this process with the gateway's generation before it: the parts of a tandem, without services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.metrics.phase_times import PhaseTimes
from baton.gateway.models.served import ModelCatalog, ServedModel, load_served_model
from baton.llm.engine.arguments import EngineArguments
from baton.llm.engine.local_stream import LocalStreams
from baton.llm.engine.placer import LocalPlacer
from baton.rpc.errors import Unavailable, error_from_rpc
from baton.rpc.in_process import InProcessServer
from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from baton.worker.front.control_service import ControlServicer
from baton.worker.front.engine_client import EngineClient

T = TypeVar("T")

_WORKER_ID = "local"
_ANY_LOGPROBS = 1 << 30
_FOREVER = float("inf")  # no stream of this process is idle or stalled for too long


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """A running engine. Its parts belong to the event loop that opened it."""

    arguments: EngineArguments
    model: ServedModel
    catalog: ModelCatalog
    generator: WorkerGenerator
    scorer: WorkerGenerator  # without a limit of log-probabilities, for beam searches
    metrics: GatewayMetrics
    control: Any  # control_pb2_grpc.ControlServiceStub
    client: EngineClient

    @property
    def info(self) -> types_pb2.ModelInfo:
        """The model as the engine serves it."""
        return self.model.require_info()

    async def refresh(self) -> control_pb2.GetStatsResponse:
        """Reads the engine's state, and takes its model: new weights have a new digest."""
        stats = await self.stats()
        self.catalog.update([stats.state.model])
        return stats

    async def stats(self, audit: bool = False) -> control_pb2.GetStatsResponse:
        """Returns the engine's counters, blocks and activity. Raises DataLoss if an audit finds a contradiction."""
        request = control_pb2.GetStatsRequest(audit=audit)
        return await called(self.control.GetStats(request))


@contextlib.asynccontextmanager
async def open_engine(arguments: EngineArguments, pace_seconds: float = 0.0) -> AsyncIterator[LocalEngine]:
    """Starts the engine's thread, whose outputs wait up to `pace_seconds` to be handled together.

    Raises a ServiceError if the model or a setting is wrong.
    """
    client = EngineClient(arguments.config, pace_seconds)
    server = InProcessServer()
    local = LocalStreams(client)
    control = ControlServicer(client, _ignore_readiness)
    control_pb2_grpc.add_ControlServiceServicer_to_server(control, server)  # type: ignore[arg-type]
    counters, phases = GenerationCounters(), PhaseTimes()
    async with contextlib.AsyncExitStack() as cleanup:
        loading = asyncio.create_task(asyncio.to_thread(_load_model, arguments))
        await client.start(_WORKER_ID, "")
        cleanup.push_async_callback(client.stop)
        cleanup.callback(local.close, Unavailable("the engine was closed"))
        try:
            await _ready(client)
        finally:
            await asyncio.wait((loading,))
            loading.exception()  # marks it as retrieved: the engine's own error comes first
        catalog = ModelCatalog([loading.result()])
        cleanup.callback(catalog.close)
        streams = WorkerStreams(counters, _FOREVER, _FOREVER, silence_seconds=0, open_stream=local.open)
        await cleanup.enter_async_context(streams)
        placer = LocalPlacer(types_pb2.Endpoint(worker_id=_WORKER_ID), lambda: client.end, phases.observe)
        limits, model = arguments.limits, catalog.models()[0]
        metrics = GatewayMetrics(counters, lambda: streams.num_active, lambda: 0, phases)
        metrics.offer_vllm_names(model.name)
        engine = LocalEngine(
            arguments,
            model,
            catalog,
            WorkerGenerator(catalog, placer, streams, counters, limits, fixed=placer.fixed),
            WorkerGenerator(
                catalog,
                placer,
                streams,
                counters,
                replace(limits, max_logprobs=_ANY_LOGPROBS),
                fixed=placer.fixed,
            ),
            metrics,
            control_pb2_grpc.ControlServiceStub(server.connect()),
            client,
        )
        await engine.refresh()
        yield engine


def _load_model(arguments: EngineArguments) -> ServedModel:
    config = arguments.config
    return load_served_model(config.model, (config.model_name,), arguments.formats, arguments.templates)


async def _ready(client: EngineClient) -> None:
    """Waits until the engine accepts requests. Raises why it ended before."""
    waits = [asyncio.create_task(event.wait()) for event in (client.ready, client.ended)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if client.end is not None and not client.ready.is_set():
        raise client.end


async def _ignore_readiness(ready: bool) -> None:
    """No health service reports it."""


async def called(call: Awaitable[T]) -> T:
    """Returns a call's response. Raises the ServiceError that it failed with."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, "the engine") from None
