"""The worker's readiness: it accepts new work while it is willing to and its device does not stall."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.worker.front.engine_client import EngineClient


class Readiness:
    """Passes each change to `set_ready`, in order."""

    def __init__(self, engine: EngineClient, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._set_ready = set_ready
        self._willing = False
        self._reporting = asyncio.Lock()
        self._reports: set[asyncio.Task[None]] = set()
        engine.on_stall(self._on_stall)

    async def update(self, willing: bool) -> None:
        """Sets whether the worker is willing. Returns when that is reported."""
        self._willing = willing
        await self._report()

    async def _report(self) -> None:
        async with self._reporting:
            await self._set_ready(self._willing and not self._engine.stalled)

    def _on_stall(self, stalled: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._report())
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
