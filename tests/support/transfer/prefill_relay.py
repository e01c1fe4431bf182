"""A relay of PrefillStream between a decode and a prefill worker, with a hook for every message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.rpc.channel import open_channel
from baton.v1 import worker_pb2

_SERVICE = "baton.v1.WorkerService"

OnMessage = Callable[[str], bool]  # the message's kind; returns whether it passes


class PrefillRelay:
    """A relay at `address`. `on_message` is called with each message before it is forwarded."""

    def __init__(self, target: str) -> None:
        self.on_message: OnMessage = lambda kind: True
        self.address = ""
        self._target = target
        self._server = grpc.aio.server()
        self._calls: set[Any] = set()

    async def __aenter__(self) -> PrefillRelay:
        handler: Any = grpc.stream_stream_rpc_method_handler(self._relay)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"PrefillStream": handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def cut(self) -> None:
        """Ends all streams, at both ends."""
        for call in list(self._calls):
            call.cancel()

    async def _relay(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async with open_channel(self._target) as channel:
            call: Any = channel.stream_stream(f"/{_SERVICE}/PrefillStream")()
            self._calls.add(call)
            writing = asyncio.create_task(self._write(requests, call))
            try:
                async for message in call:
                    if self._passes(worker_pb2.PrefillStreamResponse, message):
                        yield message
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNAVAILABLE
                await context.abort(code, "the relay's stream ended")
            finally:
                writing.cancel()
                self._calls.discard(call)
                call.cancel()

    async def _write(self, requests: AsyncIterator[bytes], call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            async for message in requests:
                if self._passes(worker_pb2.PrefillStreamRequest, message):
                    await call.write(message)
            await call.done_writing()

    def _passes(self, kind: Any, payload: bytes) -> bool:
        name = kind.FromString(payload).WhichOneof("message")
        return name is None or name == "renewal" or self.on_message(name)
