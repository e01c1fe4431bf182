"""baton.v1.IndexService: workers publish, routers watch. Keeps the workers' leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.kvstore.index import Index
from baton.kvstore.leases import Leases
from baton.kvstore.metrics import KvstoreMetrics
from baton.kvstore.publish_session import PublishSession
from baton.kvstore.watch import WatchHub
from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unavailable
from baton.v1 import index_pb2

_log = logging.getLogger(__name__)

SERVICE_NAME = "baton.v1.IndexService"

Context = grpc.aio.ServicerContext[Any, Any]


class IndexServicer:
    """The gRPC side of one index."""

    def __init__(self, index: Index, hub: WatchHub, lease_seconds: float, metrics: KvstoreMetrics) -> None:
        self._index = index
        self._hub = hub
        self._metrics = metrics
        self._leases = Leases(lease_seconds, self._on_lease_expired)
        self._owners: dict[str, PublishSession] = {}
        self._closing = asyncio.Event()

    @staticmethod
    def register(servicer: IndexServicer, server: grpc.aio.Server) -> None:
        """Adds the service; watchers are sent messages that are encoded already."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Publish": grpc.stream_stream_rpc_method_handler(
                servicer.publish,
                request_deserializer=index_pb2.PublishRequest.FromString,
                response_serializer=index_pb2.PublishResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                servicer.watch, request_deserializer=index_pb2.WatchRequest.FromString
            ),
        }
        server.add_registered_method_handlers(SERVICE_NAME, handlers)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def renew(self, worker_id: str) -> None:
        """Starts or renews a worker's lease: unless it is heard of, its blocks are forgotten."""
        self._leases.renew(worker_id)

    def close(self) -> None:
        """Ends every stream and lease."""
        self._closing.set()
        self._leases.close()

    async def publish(
        self, requests: AsyncIterator[index_pb2.PublishRequest], context: Context
    ) -> AsyncIterator[index_pb2.PublishResponse]:
        """One worker's events."""
        session = PublishSession(self._index)
        peer = context.peer()
        try:
            async for request in requests:
                response = self._handle(session, request, peer)
                if response is not None:
                    yield response
        finally:
            if self._owners.get(session.worker_id) is session:
                del self._owners[session.worker_id]
                _log.info("worker %s: its stream ended; its lease runs", session.worker_id)

    async def watch(self, request: index_pb2.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """One router's copy of the index."""
        _log.info("watched by %s", context.peer())
        with self._hub.watch() as watcher:
            try:
                async for message in watcher.messages():
                    yield message
                    if self._closing.is_set():
                        raise Unavailable("the kvstore shuts down")
            except NoCapacity as error:
                self._metrics.cut_watchers.inc()
                _log.warning("watcher %s is cut: %s", context.peer(), error.message)
                raise

    def _handle(
        self, session: PublishSession, request: index_pb2.PublishRequest, peer: str
    ) -> index_pb2.PublishResponse | None:
        worker_id = session.worker_id
        if worker_id and self._owners.get(worker_id) is not session:
            raise Mismatch(f"another stream publishes for worker {worker_id!r} now", worker_id=worker_id)
        try:
            response = session.handle(request)
        except InvalidRequest as error:
            if worker_id:
                self._index.forget(worker_id)
            _log.warning("publisher %s (worker %s) is ended: %s", peer, worker_id or "unknown", error.message)
            raise
        if not worker_id:
            if session.worker_id in self._owners:
                _log.warning("worker %s publishes anew, from %s", session.worker_id, peer)
            self._owners[session.worker_id] = session
            _log.info("worker %s publishes, epoch %d", session.worker_id, request.hello.epoch)
        self._leases.renew(session.worker_id)
        if response is not None and response.snapshot_wanted:
            self._metrics.wanted_snapshots.inc()
        return response

    def _on_lease_expired(self, worker_id: str) -> None:
        if self._index.forget(worker_id):
            self._metrics.expired_leases.inc()
            _log.warning("worker %s was not heard of for its lease; its blocks are forgotten", worker_id)
