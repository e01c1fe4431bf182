"""The stream to the kvstore: dialled, kept, dialled again. The engine numbers and fills it (events.py)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator

import grpc

from baton.rpc.channel import open_channel
from baton.rpc.errors import NoCapacity, error_from_rpc
from baton.v1 import index_pb2
from baton.worker.engine_host import EngineHost
from baton.worker.link import Kind
from baton.worker.outbox import Outbox

_log = logging.getLogger(__name__)

_METHOD = "/baton.v1.IndexService/Publish"
_HEARTBEAT_SECONDS = 1.0
_HEARTBEAT = index_pb2.PublishRequest(heartbeat=index_pb2.PublishHeartbeat()).SerializeToString()
_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
# A snapshot of 2 M blocks fits. A store that is further behind gets a new stream, and so a new snapshot.
_MAX_BACKLOG_BYTES = 64 << 20


class Publisher:
    """Carries one engine's events to one kvstore, for as long as `run` runs. Without the store the worker serves on."""

    def __init__(self, host: EngineHost, address: str, max_backlog_bytes: int = _MAX_BACKLOG_BYTES) -> None:
        self._host = host
        self._address = address
        self._max_backlog_bytes = max_backlog_bytes
        self._streams = itertools.count(1)
        self._stream = 0
        self._outbox = Outbox()
        self.num_acknowledged = 0  # the sequence that the store has applied
        self.connected = False
        self.num_connects = 0
        host.on(Kind.PUBLISH, self._on_publish)

    async def run(self) -> None:
        """Publishes until cancelled, from when the engine is ready."""
        await self._host.ready.wait()
        backoff = _MIN_BACKOFF_SECONDS
        told = ""
        while True:
            try:
                await self._publish()
                problem = f"kvstore {self._address}: it ended the stream"
            except grpc.aio.AioRpcError as error:
                problem = error_from_rpc(error, f"kvstore {self._address}").message
            except (TimeoutError, NoCapacity) as error:
                reason = str(error) or f"no connection within {_CONNECT_SECONDS:g} s"
                problem = f"kvstore {self._address}: {reason}"
            if self.connected:
                self.connected, backoff, told = False, _MIN_BACKOFF_SECONDS, ""
            if problem != told:
                _log.warning("%s; serving on, the index is told later", problem)
                told = problem
            await asyncio.sleep(backoff)
            backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)

    async def _publish(self) -> None:
        self._outbox = Outbox(self._max_backlog_bytes)
        self._stream = next(self._streams)
        async with open_channel(self._address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, index_pb2.PublishResponse] = channel.stream_stream(
                _METHOD, response_deserializer=index_pb2.PublishResponse.FromString
            )
            call = method()
            async with asyncio.timeout(_CONNECT_SECONDS):
                await call.wait_for_connection()
            self._host.send(Kind.PUBLISH_OPEN, self._stream)
            writing = asyncio.create_task(self._write(call))
            try:
                async for response in call:
                    self._on_response(response)
            except asyncio.CancelledError:
                if not _cancelled_by_us(writing):
                    raise
                await writing  # raises why
            finally:
                self._host.send(Kind.PUBLISH_CLOSE, self._stream)
                self._stream = 0
                writing.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, index_pb2.PublishResponse]) -> None:
        try:
            async for message in self._messages():
                await call.write(message)
        except asyncio.InvalidStateError:
            pass  # the call ended under the writer; its reader says why
        except NoCapacity:
            call.cancel()
            raise

    async def _messages(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_SECONDS):
                    message = await self._outbox.take()
            except TimeoutError:
                message = _HEARTBEAT
            if message is None:
                return
            yield message

    def _on_response(self, response: index_pb2.PublishResponse) -> None:
        if not self.connected:
            self.connected = True
            self.num_connects += 1
            _log.info("publishing KV events to kvstore %s", self._address)
        self.num_acknowledged = response.acknowledged_sequence
        if response.snapshot_wanted:
            self._host.send(Kind.SNAPSHOT_WANTED, self._stream)

    def _on_publish(self, channel: int, payload: bytes) -> None:
        if channel == self._stream:
            self._outbox.push(payload)


def _cancelled_by_us(writing: asyncio.Task[None]) -> bool:
    """Whether a CancelledError comes from the writer's call.cancel(), not from a cancelled task."""
    task = asyncio.current_task()
    return writing.done() and task is not None and not task.cancelling()
