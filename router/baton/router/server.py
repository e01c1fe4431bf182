"""The router service: worker and index streams, placement and metrics, from start to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import prometheus_client

from baton.router.config import RouterConfig
from baton.router.discovery import StaticDiscovery
from baton.router.fleet import Fleet
from baton.router.index_client import IndexClient
from baton.router.metrics import RouterCollector, RouterMetrics
from baton.router.placer import Placer
from baton.router.prefix_index import PrefixIndex
from baton.router.router_servicer import SERVICE_NAME, RouterServicer
from baton.router.worker_watch import WorkerWatch
from baton.rpc.metrics_endpoint import metrics_endpoint
from baton.rpc.server import RpcServer, Service
from baton.v1 import router_pb2_grpc

_log = logging.getLogger(__name__)

# Placements take milliseconds; only streams are left to be ended.
_GRACE_SECONDS = 0.5


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set."""
    config.validate()
    registry = prometheus_client.CollectorRegistry()
    fleet, index = Fleet(), PrefixIndex()
    placer = Placer(fleet, index, config.max_queue_depth, config.explain_capacity)
    servicer = RouterServicer(fleet, placer, index, RouterMetrics(registry))
    client = IndexClient(index, config.kvstore) if config.kvstore else None
    watch = WorkerWatch(fleet, StaticDiscovery(config.workers), config.state_interval_seconds)
    registry.register(RouterCollector(fleet, placer, index, client))
    service = Service(SERVICE_NAME, servicer, router_pb2_grpc.add_RouterServiceServicer_to_server)
    server = RpcServer(config.listen, (service,), _GRACE_SECONDS)
    async with (
        server,
        metrics_endpoint(config.metrics_listen, registry) as metrics_port,
        _running(watch.run(), *([client.run()] if client is not None else [])) as ended,
    ):
        await server.set_ready(True)
        _log.info("listening", extra={"port": server.port, "metrics_port": metrics_port, "workers": config.workers})
        await _first(stop.wait(), ended.wait())
        await server.set_ready(False)
        servicer.close()


@contextlib.asynccontextmanager
async def _running(*runs: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Event]:
    """Runs these beside the body. None of them ends by itself: the event is set when one does, and why is raised."""
    ended = asyncio.Event()
    tasks = [asyncio.create_task(run) for run in runs]
    for task in tasks:
        task.add_done_callback(lambda _: ended.set())
    try:
        yield ended
    finally:
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of these has."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
