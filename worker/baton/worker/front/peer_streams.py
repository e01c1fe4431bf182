"""Streams from this worker to prefill workers, dialed when the engine opens them. Parses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from baton.rpc.channel import open_channel
from baton.rpc.errors import ServiceError, error_from_rpc
from baton.worker.front.engine_client import EngineClient
from baton.worker.front.send_queue import SendQueue
from baton.worker.link.frames import Kind

_log = logging.getLogger(__name__)

_METHOD = "/baton.v1.WorkerService/PrefillStream"
_CONNECT_SECONDS = 2.0


class PeerStreams:
    """Relays streams that the engine opens, writes and closes. Reports every message and every end, with its reason.

    A stream that has ended is not opened again; the engine opens a new one.
    """

    def __init__(self, engine: EngineClient, dial: Callable[[str], grpc.aio.Channel] = open_channel) -> None:
        self._engine = engine
        self._dial = dial
        self._queues: dict[int, SendQueue] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        engine.on(Kind.PEER_OPEN, self._on_open)
        engine.on(Kind.PEER, self._on_message)
        engine.on(Kind.PEER_CLOSE, self._on_close)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_open(self, channel: int, payload: bytes) -> None:
        self._queues[channel] = SendQueue()
        self._tasks[channel] = asyncio.get_running_loop().create_task(self._run(channel, payload.decode()))

    def _on_message(self, channel: int, payload: bytes) -> None:
        if queue := self._queues.get(channel):
            queue.push(payload)

    def _on_close(self, channel: int, payload: bytes) -> None:
        if queue := self._queues.get(channel):
            queue.close()

    async def _run(self, channel: int, address: str) -> None:
        try:
            reason = await self._relay(channel, address)
        finally:
            del self._queues[channel], self._tasks[channel]
        _log.info("prefill stream to %s ended: %s", address, reason)
        self._engine.send(Kind.PEER_CLOSE, channel, reason.encode())

    async def _relay(self, channel: int, address: str) -> str:
        """Runs one stream to its end. Returns why it ended."""
        async with self._dial(address) as grpc_channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = grpc_channel.stream_stream(_METHOD)()
            writing: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await call.wait_for_connection()
                writing = asyncio.create_task(self._write(channel, call))
                async for message in call:
                    self._engine.send(Kind.PEER, channel, message)
                return f"{address} ended the stream"
            except TimeoutError:
                return f"no connection to {address} within {_CONNECT_SECONDS:g} s"
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error, address).message
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return "the stream could not be written"
            finally:
                if writing is not None:
                    writing.cancel()
                call.cancel()

    async def _write(self, channel: int, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        queue = self._queues[channel]
        try:
            while (message := await queue.take()) is not None:
                await call.write(message)
            await call.done_writing()
        except (ServiceError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            _log.warning("prefill stream cannot be written: %s", error)
            call.cancel()
