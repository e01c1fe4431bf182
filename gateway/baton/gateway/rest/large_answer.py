"""Large responses: encoded on another thread and sent in pieces at the client's speed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.gateway.http.exchange import Exchange
from baton.gateway.memory import trim_memory

_log = logging.getLogger(__name__)

# Number of log-probabilities encoded at once; more would block the event loop.
INLINE_LOGPROBS = 2048
_INLINE_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10


class LargeAnswer:
    """A response that takes long to encode."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._task: asyncio.Task[None] | None = None

    def respond(self, write: Callable[[], bytes], num_logprobs: int) -> None:
        """Responds with the result of `write`, at once or later. `write` may run on another thread."""
        if num_logprobs <= INLINE_LOGPROBS:
            self._exchange.respond(200, write())
        else:
            self._task = asyncio.get_running_loop().create_task(self._respond(write))

    async def _respond(self, write: Callable[[], bytes]) -> None:
        exchange = self._exchange
        try:
            body = await asyncio.to_thread(write)
            if len(body) <= _INLINE_BYTES:
                exchange.respond(200, body)
            else:
                await self._send(body)
                del body
                await asyncio.to_thread(trim_memory)
        except Exception as error:
            _log.exception("cannot write a response", extra={"request_id": exchange.request_id})
            exchange.fail(error)

    async def _send(self, body: bytes) -> None:
        exchange, moved = self._exchange, asyncio.Event()
        exchange.stream("application/json")
        exchange.on_writable.append(moved.set)
        exchange.on_end.append(lambda _: moved.set())
        for begin in range(0, len(body), _PIECE_BYTES):
            while not (exchange.writable or exchange.ended):
                moved.clear()
                await moved.wait()
            if exchange.ended:
                return
            exchange.write(body[begin : begin + _PIECE_BYTES])
            await asyncio.sleep(0)
        exchange.end()
