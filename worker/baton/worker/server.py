"""The worker service: front, engine, publisher and metrics, from its start to a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import prometheus_client

from baton.plugins.kinds import METRIC_SINKS
from baton.plugins.kinds import WORKER as WORKER_PLUGINS
from baton.plugins.metric_sinks import metric_sinks
from baton.plugins.plugins import Plugins
from baton.rpc.address import split_address, split_addresses
from baton.rpc.channel import Dial
from baton.rpc.errors import Unavailable
from baton.rpc.identity.identity import KVSTORE, WORKER
from baton.rpc.server.metrics_endpoint import metrics_endpoint
from baton.rpc.server.server import RpcServer, Service
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.metrics import TlsCollector
from baton.rpc.tracing.tracer import TracingCollector, tracing
from baton.v1 import control_pb2_grpc
from baton.worker.config import WorkerConfig
from baton.worker.front import control_service as control
from baton.worker.front import worker_service as front
from baton.worker.front.engine_client import EngineClient
from baton.worker.front.metrics.worker import WorkerCollector
from baton.worker.front.peer_streams import PeerStreams
from baton.worker.front.publisher import Publisher
from baton.worker.front.readiness import Readiness
from baton.worker.front.span_export import export_spans
from baton.worker.front.stats_log import log_stats
from baton.worker.link.frames import Kind

_log = logging.getLogger(__name__)

_INDEX_SECONDS = 1.0  # for the index to receive that this worker holds nothing

_ANY_HOSTS = ("0.0.0.0", "[::]")


async def serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises a ServiceError if the engine fails to start, or ends."""
    config.validate()
    tls = Tls(config.tls, WORKER) if config.tls else None
    plugins = Plugins.named(config.plugins, WORKER_PLUGINS)
    engine = EngineClient(config)
    worker = front.WorkerFront(engine)
    peer_streams = PeerStreams(engine, Dial(tls, WORKER))
    publisher = None
    if config.kvstore:
        publisher = Publisher(engine, split_addresses(config.kvstore, "kvstore"), dial=Dial(tls, KVSTORE))
    server: RpcServer
    readiness = Readiness(engine, lambda ready: server.set_ready(ready))
    servicer = control.ControlServicer(engine, readiness.update)
    services = (
        Service(front.SERVICE_NAME, worker, front.WorkerFront.register),
        Service(control.SERVICE_NAME, servicer, control_pb2_grpc.add_ControlServiceServicer_to_server),
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(TlsCollector(tls))
    collector = WorkerCollector(servicer.stats, engine, asyncio.get_running_loop(), config.model_name)
    registry.register(collector)
    async with (
        _exporting(config, engine, registry),
        RpcServer(config.listen, services, tls=tls) as server,
        metric_sinks(plugins, registry, WORKER_PLUGINS),
        metrics_endpoint(config.metrics_listen, registry, None if config.metrics_plain else tls) as metrics_port,
        _helpers(
            engine.watch(),
            *([publisher.run()] if publisher else []),
            *([_keep_fresh(engine, collector)] if config.metrics_listen or plugins.of(METRIC_SINKS) else []),
            *([_log_stats(engine, servicer, config.log_stats_interval)] if config.log_stats_interval else []),
        ),
    ):
        advertised = _advertised_host(config)
        worker_id = config.worker_id or f"{advertised}-{server.port}"
        await engine.start(worker_id, advertised)
        try:
            if await _until_ready(engine, stop):
                await readiness.update(True)
                _log.info(
                    "listening",
                    extra={"worker_id": worker_id, "port": server.port, "metrics_port": metrics_port, **_facts(config)},
                )
                await _first(stop.wait(), engine.ended.wait())
                await readiness.update(False)
                if not engine.ended.is_set():
                    await servicer.shut_down(config.drain_timeout)
                    if publisher is not None:
                        await publisher.settle(_INDEX_SECONDS)
        finally:
            worker.close(Unavailable(f"worker {worker_id} has shut down", worker_id=worker_id))
            await peer_streams.close()
            failure = engine.end if engine.ended.is_set() else None
            await engine.stop()
    if failure is not None:
        raise failure


@contextlib.asynccontextmanager
async def _exporting(
    config: WorkerConfig, engine: EngineClient, registry: prometheus_client.CollectorRegistry
) -> AsyncIterator[None]:
    """Exports the engine's spans if a collector is configured."""
    async with tracing(config.otlp_endpoint, WORKER, config.worker_id or config.listen) as tracer:
        registry.register(TracingCollector(tracer))
        if tracer is not None:
            engine.on(Kind.SPAN, lambda _, payload: export_spans(tracer, payload))
        yield


def _facts(config: WorkerConfig) -> dict[str, str]:
    return {"role": config.role, "model": config.model_name, "executor": config.executor}


def _advertised_host(config: WorkerConfig) -> str:
    host, _ = split_address(config.listen, "listen")
    return config.advertise or (socket.getfqdn() if host in _ANY_HOSTS else host)


async def _until_ready(engine: EngineClient, stop: asyncio.Event) -> bool:
    """Returns True once the engine accepts requests; False if `stop` is set or the engine has ended before."""
    await _first(engine.ready.wait(), engine.ended.wait(), stop.wait())
    return engine.ready.is_set() and not engine.ended.is_set() and not stop.is_set()


async def _keep_fresh(engine: EngineClient, collector: WorkerCollector) -> None:
    await engine.ready.wait()
    await collector.keep_fresh()


async def _log_stats(engine: EngineClient, servicer: control.ControlServicer, seconds: float) -> None:
    await engine.ready.wait()
    await log_stats(servicer.stats, seconds)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of these has ended."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _helpers(*runs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs these beside the body. Logs one that fails; the worker serves on."""
    tasks = [asyncio.create_task(run) for run in runs]
    for task in tasks:
        task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a part of the worker failed: %s", task.get_name(), exc_info=error)
