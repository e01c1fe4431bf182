"""WorkerService on the gRPC side: passes messages to the engine, with prompts read and hashed, and bytes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from baton.rpc.errors import ServiceError, Unavailable
from baton.rpc.server.server import Context
from baton.v1 import worker_pb2
from baton.worker.front.engine_client import EngineClient, error_of_status
from baton.worker.front.send_queue import SendQueue
from baton.worker.link.frames import Kind
from baton.worker.link.prompts import KnownPrompt, PromptReader, join_prompts

_log = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_DEFAULT_INTERVAL_MS = 1000
_MIN_INTERVAL_MS = 100
_MAX_PING_BYTES = 6  # the field's key and a number

# Appending one of these to a message merges the two.
_STALLED = worker_pb2.GenerateStreamResponse(stalled=True).SerializeToString()
_STALLED_PREFILLS = worker_pb2.PrefillStreamResponse(stalled=worker_pb2.PrefillStalled()).SerializeToString()
_STALLED_STATE = worker_pb2.WatchStateResponse(state=worker_pb2.WorkerState(stalled=True)).SerializeToString()


class WorkerFront:
    """Serves WorkerService with the engine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._channels = itertools.count(1)
        self._generates: dict[int, SendQueue] = {}
        self._prefills: dict[int, SendQueue] = {}
        self._state = b""
        self._reader: PromptReader | None = None  # None until the engine has sent its state
        self._state_changed = asyncio.Event()
        self._closed: ServiceError | None = None
        engine.on(Kind.STATE, self._on_state)
        engine.on(Kind.GENERATE, self._on_generate)
        engine.on(Kind.GENERATE_PLAIN, self._on_generate_plain)
        engine.on(Kind.GENERATE_FIRST, self._on_generate_first)
        engine.on(Kind.GENERATE_LATER, self._on_generate_later)
        engine.on(Kind.GENERATE_CLOSE, self._on_generate_close)
        engine.on(Kind.PREFILL, self._on_prefill)
        engine.on(Kind.PREFILL_CLOSE, self._on_prefill_close)
        engine.on_lost(self.close)
        engine.on_stall(self._on_stall)

    @staticmethod
    def register(front: WorkerFront, server: grpc.aio.Server) -> None:
        """Registers the service. Streams of generations and prefills pass as bytes in both directions."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GenerateStream": grpc.stream_stream_rpc_method_handler(front.generate_stream),
            "PrefillStream": grpc.stream_stream_rpc_method_handler(front.prefill_stream),
            "WatchState": grpc.unary_stream_rpc_method_handler(
                front.watch_state, request_deserializer=worker_pb2.WatchStateRequest.FromString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def close(self, error: ServiceError) -> None:
        """Ends every stream with `error`, and refuses new ones. Idempotent."""
        self._closed = self._closed or error
        for queue in (*self._generates.values(), *self._prefills.values()):
            queue.close(error)
        self._notify()

    async def generate_stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Relays one gateway's requests and frames."""
        kinds = (Kind.GENERATE_OPEN, Kind.GENERATE, Kind.GENERATE_HASHED, Kind.GENERATE_CLOSE)
        async for frame in self._relay(requests, context, self._generates, *kinds):
            yield frame

    async def prefill_stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Relays one decode worker's prefills."""
        kinds = (Kind.PREFILL_OPEN, Kind.PREFILL, Kind.PREFILL_HASHED, Kind.PREFILL_CLOSE)
        async for message in self._relay(requests, context, self._prefills, *kinds):
            yield message

    async def watch_state(self, request: worker_pb2.WatchStateRequest, context: Context) -> AsyncIterator[bytes]:
        """Sends the state at once, at every change, and at the interval."""
        interval = max(_MIN_INTERVAL_MS, request.max_interval_ms or _DEFAULT_INTERVAL_MS) / 1000
        while True:
            self._check_open()
            changed = self._state_changed
            yield self._state + _STALLED_STATE if self._engine.stalled else self._state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await changed.wait()

    async def _relay(
        self,
        requests: AsyncIterator[bytes],
        context: Context,
        queues: dict[int, SendQueue],
        open_kind: Kind,
        message_kind: Kind,
        hashed_kind: Kind,
        close_kind: Kind,
    ) -> AsyncIterator[bytes]:
        self._check_open()
        channel = next(self._channels)
        queue = queues[channel] = SendQueue()
        if self._engine.stalled and queues is self._generates:
            queue.push(_STALLED, mergeable=True)
        self._engine.send(open_kind, channel)
        reading = asyncio.create_task(self._read(requests, queue, message_kind, hashed_kind, channel))

        def end(_: object) -> None:
            reading.cancel()
            del queues[channel]
            self._engine.send(close_kind, channel)

        # Not in `finally`: if a call is cancelled during a write, this generator stays suspended.
        context.add_done_callback(cast(Any, end))
        while (message := await queue.take()) is not None:
            yield message

    async def _read(
        self, requests: AsyncIterator[bytes], queue: SendQueue, kind: Kind, hashed_kind: Kind, channel: int
    ) -> None:
        try:
            async for request in requests:
                if kind is Kind.GENERATE and (ping := _ping_of(request)):
                    self._engine.probe()
                    pong = worker_pb2.GenerateStreamResponse(
                        pong=ping, stalled=self._engine.stalled, progress=self._engine.progress
                    )
                    queue.push(pong.SerializeToString(), mergeable=True)
                    continue
                message, prompts = await self._read_prompts(kind, request)
                if any(prompt.block_hashes or prompt.token_ids for prompt in prompts):
                    self._engine.send(hashed_kind, channel, join_prompts(message, prompts))
                else:
                    self._engine.send(kind, channel, message)
                await self._engine.writable()
        except (grpc.aio.UsageError, grpc.aio.AioRpcError):
            pass  # the call ended during a read; the queue is closed below
        finally:
            queue.close()

    async def _read_prompts(self, kind: Kind, request: bytes) -> tuple[bytes, list[KnownPrompt]]:
        reader = self._reader
        if reader is None:
            return request, []
        return await (reader.read_prefill(request) if kind is Kind.PREFILL else reader.read_generate(request))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if not self._engine.is_ready:
            raise Unavailable("the worker is starting")

    def _on_state(self, channel: int, payload: bytes) -> None:
        self._state = payload
        if self._reader is None:
            model = worker_pb2.WatchStateResponse.FromString(payload).state.model
            self._reader = PromptReader(model.block_size, model.max_model_len)
        self._notify()

    def _on_stall(self, stalled: bool) -> None:
        if stalled:
            for queue in self._generates.values():
                queue.push(_STALLED, mergeable=True)
            for queue in self._prefills.values():
                queue.push(_STALLED_PREFILLS)
        self._notify()

    def _notify(self) -> None:
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()

    def _on_generate(self, channel: int, payload: bytes) -> None:
        self._push_frame(channel, payload, mergeable=False)

    def _on_generate_plain(self, channel: int, payload: bytes) -> None:
        self._push_frame(channel, payload, mergeable=True)

    def _on_generate_first(self, channel: int, payload: bytes) -> None:
        self._push_frame(channel, payload, mergeable=True, ahead=True)

    def _on_generate_later(self, channel: int, payload: bytes) -> None:
        self._push_frame(channel, payload, mergeable=True, may_wait=True)

    def _push_frame(
        self, channel: int, payload: bytes, mergeable: bool, ahead: bool = False, may_wait: bool = False
    ) -> None:
        queue = self._generates.get(channel)
        if queue is None or queue.closed:
            return
        queue.push(payload, mergeable, ahead, may_wait)
        if queue.closed:
            _log.warning("closed a gateway's stream that was too far behind; its requests are aborted")
            self._engine.send(Kind.GENERATE_CLOSE, channel)

    def _on_generate_close(self, channel: int, payload: bytes) -> None:
        if queue := self._generates.get(channel):
            queue.close(error_of_status(payload) if payload else None)

    def _on_prefill(self, channel: int, payload: bytes) -> None:
        if queue := self._prefills.get(channel):
            queue.push(payload)

    def _on_prefill_close(self, channel: int, payload: bytes) -> None:
        if queue := self._prefills.get(channel):
            queue.close(error_of_status(payload) if payload else None)


def _ping_of(request: bytes) -> int:
    """Returns the number of a message that is only a ping; 0: it is another message."""
    if len(request) > _MAX_PING_BYTES:
        return 0
    try:
        message = worker_pb2.GenerateStreamRequest.FromString(request)
    except DecodeError:
        return 0
    return 0 if message.aborts or message.submits else message.ping
