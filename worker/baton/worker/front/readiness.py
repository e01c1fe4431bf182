"""Whether the worker says that it takes new work: while it wants to, and its device does not stall."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.worker.front.engine_client import EngineClient


class Readiness:
    """Tells `set_ready` each change, in order."""

    def __init__(self, engine: EngineClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._set_ready = set_ready
        self._wanted = False
        self._turn = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()
        engine.on_stall(self._on_stall)

    async def want(self, ready: bool) -> None:
        """What the worker itself decides. Returns when it was told."""
        self._wanted = ready
        await self._tell()

    async def _tell(self) -> None:
        async with self._turn:
            await self._set_ready(self._wanted and not self._engine.stalled)

    def _on_stall(self, stalled: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
