"""How long an event loop is kept from other work, as the CPU time of its own thread: a busy machine adds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator


class LoopStalls:
    """The longest turn of the loop so far, in seconds of its thread's CPU."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def _watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.thread_time() - began)


@contextlib.asynccontextmanager
async def loop_stalls() -> AsyncIterator[LoopStalls]:
    """Watches the running loop inside of the block."""
    stalls = LoopStalls()
    # The garbage of the tests before is not the gateway's, which freezes what it starts with too.
    gc.freeze()
    task = asyncio.create_task(stalls._watch())
    await asyncio.sleep(0.01)
    stalls.longest = 0.0
    try:
        yield stalls
    finally:
        task.cancel()
        gc.unfreeze()
