"""Measures how long an event loop is blocked, in CPU time of its thread, so that a busy machine adds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator


class LoopStalls:
    """The longest iteration of the loop so far, in CPU seconds of its thread."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def _watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.thread_time() - began)


@contextlib.asynccontextmanager
async def loop_stalls() -> AsyncIterator[LoopStalls]:
    """Measures the running loop within the block."""
    stalls = LoopStalls()
    # Excludes garbage of earlier tests, as the gateway freezes the objects that exist at its start. They stay excluded:
    # among them is all that pytest has collected, which takes a second to look through.
    gc.freeze()
    task = asyncio.create_task(stalls._watch())
    await asyncio.sleep(0.01)
    stalls.longest = 0.0
    try:
        yield stalls
    finally:
        task.cancel()
