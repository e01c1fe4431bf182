"""The thread on which large requests are read and checked, so that the event loop stays free. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Reading less takes less time than a few milliseconds.
INLINE_BYTES = 32 << 10


class BodyThread:
    """One thread: two that parse would have the event loop wait for both of them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body")

    async def run(self, work: Callable[[], T], num_bytes: int) -> T:
        """Returns what `work` on so many bytes does. Work on few runs here and now."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
