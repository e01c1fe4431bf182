"""Threads that take work in turns by owner. Knows no requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from baton.gateway.fairness.fair_queue import FairQueue

T = TypeVar("T")


class FairThreads:
    """Runs the work of the owner that used least. `run` is for one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._queue = FairQueue()
        self._num_free = num_threads

    async def run(self, work: Callable[[], T], owner: str, cost: float) -> T:
        """Runs `work` in its owner's turn and returns the result. Drops the work if the caller is cancelled before."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        turn = self._queue.push(owner, cost, partial(self._start, work, future))
        self._fill()
        try:
            return await future
        finally:
            turn.cancel()
            del future  # an error's frames hold this one: together they would stay until the next collection

    def close(self) -> None:
        """Ends the threads and drops waiting work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._num_free and (start := self._queue.pop()) is not None:
            self._num_free -= 1
            start()

    def _start(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, work)
        done.add_done_callback(partial(self._ended, future))

    def _ended(self, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._num_free += 1
        if not future.done():
            if done.cancelled():
                future.cancel()
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
        elif not done.cancelled():
            done.exception()  # marks it as retrieved, since it is no longer awaited
        self._fill()
