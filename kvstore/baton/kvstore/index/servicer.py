"""baton.v1.IndexService: workers publish, routers and other replicas watch. Keeps the workers' leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index
from baton.kvstore.index.membership import Membership
from baton.kvstore.index.publish_session import PublishSession
from baton.kvstore.index.publishers import Publisher
from baton.kvstore.index.watch import WatchHub
from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unavailable
from baton.v1 import index_pb2

_log = logging.getLogger(__name__)

SERVICE_NAME = "baton.v1.IndexService"

Context = grpc.aio.ServicerContext[Any, Any]


class IndexServicer:
    """Serves one index over gRPC."""

    def __init__(self, index: Index, hub: WatchHub, membership: Membership, counters: KvstoreCounters) -> None:
        self._index = index
        self._hub = hub
        self._membership = membership
        self._counters = counters
        self._closing = asyncio.Event()

    @staticmethod
    def register(servicer: IndexServicer, server: grpc.aio.Server) -> None:
        """Adds the service. Watch responses are already encoded."""
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

    def close(self) -> None:
        """Ends every stream."""
        self._closing.set()

    async def publish(
        self, requests: AsyncIterator[index_pb2.PublishRequest], context: Context
    ) -> AsyncIterator[index_pb2.PublishResponse]:
        """Applies one worker's events to the index."""
        session = PublishSession(self._index)
        publisher: Publisher | None = None
        peer = context.peer()
        try:
            async for request in requests:
                if publisher is not None and self._membership.publisher(session.worker_id) is not publisher:
                    raise _elsewhere(session.worker_id)
                publisher = publisher or self._claim(request, peer)
                response = self._handle(session, request, peer)
                if response is not None:
                    yield response
        finally:
            if publisher is not None and self._membership.publisher(session.worker_id) is publisher:
                self._membership.end(session.worker_id)
                _log.info("worker %s: its stream ended; its lease continues", session.worker_id)

    async def watch(self, request: index_pb2.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """Sends one reader the index, then its changes."""
        _log.info("watcher %s connected", context.peer())
        known = {one.worker_id: (one.epoch, one.sequence) for one in request.known}
        with self._hub.watch(known, request.own_only) as watcher:
            try:
                async for message in watcher.messages():
                    yield message
                    if self._closing.is_set():
                        raise Unavailable("the kvstore is shutting down")
            except NoCapacity as error:
                self._counters.cut_watchers.inc()
                _log.warning("watcher %s disconnected: %s", context.peer(), error.message)
                raise

    def _claim(self, request: index_pb2.PublishRequest, peer: str) -> Publisher | None:
        """Claims the worker that a hello names. Returns None for other messages."""
        if not request.HasField("hello") or not request.hello.worker_id:
            return None
        hello = request.hello
        publisher = Publisher(hello.term)
        if not self._membership.claim(hello.worker_id, publisher):
            raise _elsewhere(hello.worker_id)
        _log.info("worker %s publishes from %s, epoch %d", hello.worker_id, peer, hello.epoch)
        return publisher

    def _handle(
        self, session: PublishSession, request: index_pb2.PublishRequest, peer: str
    ) -> index_pb2.PublishResponse | None:
        try:
            response = session.handle(request)
        except InvalidRequest as error:
            if session.worker_id:
                self._index.forget(session.worker_id)
            _log.warning(
                "publisher %s (worker %s) disconnected: %s", peer, session.worker_id or "unknown", error.message
            )
            raise
        is_hello = request.HasField("hello")
        self._membership.renew(session.worker_id, session.is_caught_up, is_hello)
        if response is not None and response.snapshot_wanted:
            self._counters.wanted_snapshots.inc()
        return response


def _elsewhere(worker_id: str) -> Mismatch:
    return Mismatch(f"another stream publishes worker {worker_id!r} now", worker_id=worker_id)
