"""The stream to the kvstore, over any of its replicas. Reconnects when it ends.

The engine numbers the events (kv/event_log.py) and sends them here without a pause. Events that a replica has not
acknowledged are kept, so that the next replica receives only those that it lacks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from baton.rpc.channel import open_channel
from baton.rpc.errors import NoCapacity, error_from_rpc
from baton.v1 import index_pb2
from baton.worker.front.engine_client import EngineClient
from baton.worker.front.event_window import EventWindow
from baton.worker.front.send_queue import SendQueue
from baton.worker.link.frames import Kind

_log = logging.getLogger(__name__)

_METHOD = "/baton.v1.IndexService/Publish"
_HEARTBEAT_SECONDS = 0.35  # the kvstore's lease is a little more than twice that
_HEARTBEATS_PER_ANSWER = 3
_ANSWER_SECONDS = 0.75
_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 0.5
_CONNECT_SECONDS = 1.0
_SETTLE_SECONDS = 0.01
# A snapshot of 2 M blocks fits. A kvstore that is further behind gets a new stream with a new snapshot.
_MAX_BACKLOG_BYTES = 64 << 20

_Queued = tuple[bool, tuple[int, int]]  # whether it is answered; the epoch and sequence number after it

_Call = grpc.aio.StreamStreamCall[bytes, index_pb2.PublishResponse]


class Publisher:
    """Publishes one engine's events to the kvstore while `run` runs. `addresses` are its replicas.

    The worker serves without it, too.
    """

    def __init__(
        self,
        engine: EngineClient,
        addresses: str | Sequence[str],
        max_backlog_bytes: int = _MAX_BACKLOG_BYTES,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._engine = engine
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        self._max_backlog_bytes = max_backlog_bytes
        self._dial = dial
        self._streams = itertools.count(1)
        self._heartbeats = itertools.count(0)
        self._stream = 0
        self._term = 0
        self._outbox = SendQueue()
        self._queued: deque[_Queued] = deque()  # of each message in the queue
        self._sent = (0, 0)  # epoch and sequence number of the last message of this stream
        self._window = EventWindow()
        self._is_greeted = False  # the hello was answered: the engine's events are sent at once
        self._unanswered_since: float | None = None  # when the oldest unanswered message was sent
        self.num_acknowledged = 0  # the sequence number that the kvstore has applied
        self.connected = False
        self.num_connects = 0
        engine.on(Kind.PUBLISH, self._on_publish)

    async def run(self) -> None:
        """Publishes from when the engine is ready, until it is cancelled."""
        await self._engine.ready.wait()
        index, backoff, logged = random.randrange(len(self._addresses)), _MIN_BACKOFF_SECONDS, ""
        try:
            while True:
                address = self._addresses[index % len(self._addresses)]
                problem = await self._attempt(address)
                was_connected, self.connected = self.connected, False
                if was_connected:
                    backoff, logged = _MIN_BACKOFF_SECONDS, ""
                if problem != logged:
                    _log.warning("kvstore %s: %s; serving on, and publishing later", address, problem)
                    logged = problem
                index += 1
                # The next replica is tried at once; a pause follows each round.
                if not was_connected or len(self._addresses) == 1:
                    await asyncio.sleep(backoff / len(self._addresses))
                    backoff = min(_MAX_BACKOFF_SECONDS, backoff * 2)
        finally:
            self._engine.send(Kind.PUBLISH_CLOSE, self._stream)

    async def settle(self, seconds: float) -> None:
        """Returns when the kvstore has answered every message, when it is gone, or after `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.connected and (self._queued or self._unanswered_since is not None):
            if asyncio.get_running_loop().time() >= deadline:
                _log.warning(
                    "the kvstore did not confirm this worker's end within %g s; its lease will expire", seconds
                )
                return
            await asyncio.sleep(_SETTLE_SECONDS)

    async def _attempt(self, address: str) -> str:
        """Publishes over one stream until it ends. Returns the reason."""
        try:
            await self._publish(address)
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error, "it").message
        except (TimeoutError, NoCapacity) as error:
            return str(error) or f"no connection within {_CONNECT_SECONDS:g} s"
        return "the stream ended"

    async def _publish(self, address: str) -> None:
        self._outbox, self._queued, self._sent = SendQueue(self._max_backlog_bytes), deque(), (0, 0)
        self._stream = next(self._streams)
        self._is_greeted, self._unanswered_since = False, None
        async with self._dial(address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, index_pb2.PublishResponse] = channel.stream_stream(
                _METHOD, response_deserializer=index_pb2.PublishResponse.FromString
            )
            call = method()
            async with asyncio.timeout(_CONNECT_SECONDS):
                await call.wait_for_connection()
            self._engine.send(Kind.PUBLISH_OPEN, self._stream)
            helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch(call))]
            try:
                async for response in call:
                    self._on_response(address, response)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                for helper in helpers:
                    if helper.done():
                        helper.result()  # raises its reason for cancelling the call
            finally:
                self._is_greeted = False
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    async def _write(self, call: _Call) -> None:
        try:
            async for message in self._messages():
                await call.write(message)
        except asyncio.InvalidStateError:
            pass  # the call ended during a write; its reader returns the reason
        except NoCapacity:
            call.cancel()
            raise

    async def _watch(self, call: _Call) -> None:
        """Cancels the call when the replica does not answer."""
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            now = asyncio.get_running_loop().time()
            if self._unanswered_since is not None and now - self._unanswered_since > _ANSWER_SECONDS:
                call.cancel()
                raise TimeoutError(f"no answer for {_ANSWER_SECONDS:g} s")

    async def _messages(self) -> AsyncIterator[bytes]:
        due = asyncio.get_running_loop().time() + _HEARTBEAT_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, due - asyncio.get_running_loop().time())):
                    message = await self._outbox.take()
            except TimeoutError:
                due = asyncio.get_running_loop().time() + _HEARTBEAT_SECONDS
                if self._is_greeted:
                    yield self._heartbeat()
                continue
            if message is None:
                return
            is_answered, brings_to = self._queued.popleft()
            if is_answered:
                self._ask()
            yield message
            self._sent = max(self._sent, brings_to)
            if self._is_greeted and asyncio.get_running_loop().time() >= due:
                due = asyncio.get_running_loop().time() + _HEARTBEAT_SECONDS
                yield self._heartbeat()

    def _heartbeat(self) -> bytes:
        wants_answer = next(self._heartbeats) % _HEARTBEATS_PER_ANSWER == 0
        if wants_answer:
            self._ask()
        epoch, sequence = self._sent
        heartbeat = index_pb2.PublishHeartbeat(wants_answer=wants_answer, epoch=epoch, sequence=sequence)
        return index_pb2.PublishRequest(heartbeat=heartbeat).SerializeToString()

    def _ask(self) -> None:
        if self._unanswered_since is None:
            self._unanswered_since = asyncio.get_running_loop().time()

    def _on_response(self, address: str, response: index_pb2.PublishResponse) -> None:
        self._unanswered_since = None
        if not self.connected:
            self.connected = True
            self.num_connects += 1
            _log.info("publishing KV events to kvstore %s", address)
        self.num_acknowledged = response.acknowledged_sequence
        if response.snapshot_wanted:
            self._engine.send(Kind.SNAPSHOT_WANTED, self._stream)
        elif not self._is_greeted:
            missing = self._window.since(response.acknowledged_sequence)
            for number, message in enumerate(missing, self._window.last + 1 - len(missing)):
                self._send(message, is_answered=False, brings_to=(self._window.epoch, number))
        else:
            self._window.acknowledge(response.acknowledged_sequence)
        self._is_greeted = True

    def _on_publish(self, channel: int, payload: bytes) -> None:
        request = index_pb2.PublishRequest.FromString(payload)
        kind = request.WhichOneof("message")
        if kind == "hello":
            if channel == self._stream:
                self._say_hello(request)
        elif kind == "batch":
            self._window.add(request.batch.epoch, request.batch.sequence, payload)
            if self._is_greeted:
                self._send(payload, is_answered=False, brings_to=(request.batch.epoch, request.batch.sequence))
        else:
            self._window.begin(request.snapshot.epoch)
            if self._is_greeted:
                part = request.snapshot
                self._send(payload, part.last, (part.epoch, part.barrier) if part.last else (0, 0))

    def _say_hello(self, request: index_pb2.PublishRequest) -> None:
        self._term = max(self._term + 1, time.time_ns())
        self._window.begin(request.hello.epoch)
        request.hello.term = self._term
        request.hello.first_kept = self._window.first_kept
        self._send(request.SerializeToString(), is_answered=True)

    def _send(self, message: bytes, is_answered: bool, brings_to: tuple[int, int] = (0, 0)) -> None:
        self._queued.append((is_answered, brings_to))
        self._outbox.push(message)
