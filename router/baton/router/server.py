"""The router service: worker and index streams, placement and metrics, from start to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import prometheus_client

from baton.plugins.kinds import ROUTER as ROUTER_PLUGINS
from baton.plugins.metric_sinks import metric_sinks
from baton.plugins.plugins import Plugins
from baton.router.config import RouterConfig
from baton.router.discovery.kubernetes_api import KubernetesApi
from baton.router.discovery.metrics import DiscoveryCollector
from baton.router.discovery.pace import Pace
from baton.router.discovery.sources import discovery_of
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_watch import WorkerWatch
from baton.router.garbage import rare_collections
from baton.router.grpc.placement_spans import PlacementSpans
from baton.router.grpc.servicer import SERVICE_NAME, RouterServicer
from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex
from baton.router.metrics import RouterCollector, RouterMetrics
from baton.router.peers.news import PeerNews
from baton.router.peers.peers import Peers
from baton.router.peers.servicer import SERVICE_NAME as PEER_SERVICE_NAME
from baton.router.peers.servicer import RouterPeerServicer
from baton.router.placement.placer import Placer
from baton.router.placement.worker_snapshot import Objectives
from baton.router.requests.in_flight import InFlight
from baton.rpc.channel import Dial
from baton.rpc.identity.identity import KVSTORE, ROUTER, WORKER
from baton.rpc.server.metrics_endpoint import metrics_endpoint
from baton.rpc.server.server import RpcServer, Service
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.metrics import TlsCollector
from baton.rpc.tracing.tracer import Tracer, TracingCollector, tracing
from baton.v1 import router_pb2_grpc

_log = logging.getLogger(__name__)

# Placements take milliseconds; only streams are left to be ended.
_GRACE_SECONDS = 0.5


async def serve(config: RouterConfig, stop: asyncio.Event, pace: Pace | None = None) -> None:
    """Serves until `stop` is set. `pace`: the times of Kubernetes discovery; None: the defaults."""
    config.validate()
    async with tracing(config.otlp_endpoint, ROUTER, config.listen) as tracer:
        with rare_collections():
            await _serve(config, stop, tracer, pace)


async def _serve(config: RouterConfig, stop: asyncio.Event, tracer: Tracer | None, pace: Pace | None) -> None:
    tls = Tls(config.tls, ROUTER) if config.tls else None
    plugins = Plugins.named(config.plugins, ROUTER_PLUGINS)
    registry = prometheus_client.CollectorRegistry()
    registry.register(TlsCollector(tls))
    registry.register(TracingCollector(tracer))
    fleet, index = Fleet(), PrefixIndex()
    objectives = Objectives(config.ttft_objective_ms / 1000, config.itl_objective_ms / 1000, config.shed)
    router_id, in_flight = secrets.randbits(63), InFlight()
    news = PeerNews(router_id, in_flight, fleet, time.monotonic)
    placer = Placer(
        fleet,
        index,
        config.max_queue_depth,
        config.explain_capacity,
        objectives=objectives,
        in_flight=in_flight,
        listener=news,
    )
    api = KubernetesApi(config.kubernetes_api)
    discoveries = {"workers": discovery_of(config.workers, api, "workers", pace)}
    peers = None
    if config.peers:
        discoveries["peers"] = discovery_of(config.peers, api, "peers", pace)
        dial = Dial(tls, ROUTER)
        peers = Peers(router_id, in_flight, fleet, discoveries["peers"], placer.on_remote_placement, dial=dial)
    spans = PlacementSpans(tracer) if tracer is not None else None
    servicer = RouterServicer(fleet, placer, index, RouterMetrics(registry), news, peers, spans)
    peer_servicer = RouterPeerServicer(news)
    client = IndexClient(index, config.kvstore, dial=Dial(tls, KVSTORE)) if config.kvstore else None
    watch = WorkerWatch(fleet, discoveries["workers"], config.state_interval_seconds, Dial(tls, WORKER))
    registry.register(RouterCollector(fleet, placer, index, client, peers))
    registry.register(DiscoveryCollector(discoveries))
    services = (
        Service(SERVICE_NAME, servicer, router_pb2_grpc.add_RouterServiceServicer_to_server),
        Service(PEER_SERVICE_NAME, peer_servicer, router_pb2_grpc.add_RouterPeerServiceServicer_to_server),
    )
    server = RpcServer(config.listen, services, _GRACE_SECONDS, tls=tls)
    runs = [one.run() for one in (watch, client, peers) if one is not None]
    async with (
        server,
        metric_sinks(plugins, registry, ROUTER_PLUGINS),
        metrics_endpoint(config.metrics_listen, registry, None if config.metrics_plain else tls) as metrics_port,
        _running(*runs) as ended,
    ):
        await server.set_ready(True)
        _log.info("listening", extra={"port": server.port, "metrics_port": metrics_port, "workers": config.workers})
        await _first(stop.wait(), ended.wait())
        await server.set_ready(False)
        servicer.close()
        peer_servicer.close()


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
