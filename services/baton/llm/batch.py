"""Runs many requests from a caller's thread: reads them as needed, keeps the engine's batch full, returns results."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from baton.gateway.core import Generation
from baton.llm.engine.local_engine import LocalEngine
from baton.llm.garbage import rare_collections
from baton.llm.loop_thread import LoopThread
from baton.llm.requests.prepared import Encoded, Work, encode_each
from baton.rpc.errors import ServiceError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# Requests that wait in the engine's queue, as a multiple of its batch: a place that becomes free is taken at once.
_QUEUED_BATCHES = 1
# Prompts that are encoded together and then submitted together: the engine's first step should not compute only one.
_GROUP = 64


class Running(Protocol[R_co]):
    """The sink of one request."""

    error: ServiceError | None

    def snapshot(self) -> R_co:
        """Returns what the request has output so far."""


OnEnd = Callable[[Running[R]], None]
Start = Callable[[LocalEngine, Work, Encoded, OnEnd[R]], Coroutine[Any, Any, tuple[Running[R], Generation]]]


class Batch(Generic[R]):
    """The requests of one call, each begun by `start`. `in_order`: results are returned in the order of the requests.

    At most `window` outputs run or wait to be returned, so that memory does not grow with the number of requests. 0:
    as many as fill the engine's batch and queue.
    """

    def __init__(
        self, thread: LoopThread, engine: LocalEngine, start: Start[R], in_order: bool = False, window: int = 0
    ) -> None:
        self._thread = thread
        self._engine = engine
        self._start_one = start
        self._in_order = in_order
        self._window = window or engine.arguments.config.max_num_requests * (1 + _QUEUED_BATCHES)
        self._results: queue.SimpleQueue[list[tuple[int, R | BaseException]]] = queue.SimpleQueue()
        self._ended: list[tuple[int, R | BaseException]] = []  # on the loop: for the next turn's `_hand_over`
        self._tasks: set[asyncio.Task[None]] = set()  # on the loop
        self._unfinished: set[int] = set()  # on the loop
        self._generations: dict[int, Generation] = {}  # on the loop
        self._closed = False  # on the loop

    def run(self, works: Iterable[Work]) -> Iterator[tuple[Work, R]]:
        """Yields each request with its output. A failed request raises, and ends the others."""
        with rare_collections():
            yield from self._run(works)

    def _run(self, works: Iterable[Work]) -> Iterator[tuple[Work, R]]:
        open_works: dict[int, Work] = {}  # that were started and not returned, by their place in `works`
        ready: dict[int, R] = {}
        following = iter(works)
        num_started = num_returned = num_outputs = 0
        has_more = True
        try:
            while has_more or open_works:
                fresh: dict[int, Work] = {}
                while has_more and (num_outputs < self._window or not (open_works or fresh)):
                    work = next(following, None)
                    if work is None:
                        has_more = False
                        break
                    fresh[num_started] = work
                    num_outputs += work.prepared.n
                    num_started += 1
                if fresh:
                    open_works.update(fresh)
                    self._thread.call(self._begin, fresh)
                if not open_works:
                    break
                for index, result in self._results.get():
                    if isinstance(result, BaseException):
                        raise _placed(result, open_works[index].index, num_started)
                    ready[index] = result
                for done in self._returnable(ready, num_returned):
                    work = open_works.pop(done)
                    num_outputs -= work.prepared.n
                    num_returned += 1
                    yield work, ready.pop(done)
        finally:
            self._thread.call(self._close)

    def _returnable(self, ready: dict[int, R], first: int) -> list[int]:
        if not self._in_order:
            return list(ready)
        last = first
        while last in ready:
            last += 1
        return list(range(first, last))

    # On the loop.

    def _begin(self, works: Mapping[int, Work]) -> None:
        self._unfinished.update(works)
        items = list(works.items())
        for first in range(0, len(items), _GROUP):
            task = asyncio.get_running_loop().create_task(self._start_group(items[first : first + _GROUP]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_group(self, items: Sequence[tuple[int, Work]]) -> None:
        found: Sequence[Encoded | BaseException]
        try:
            found = await encode_each(self._engine, [work for _, work in items])
        except Exception as error:
            found = [error] * len(items)
        for (index, work), encoded in zip(items, found, strict=True):
            if isinstance(encoded, BaseException):
                self._end(index, encoded)
            else:
                await self._start(index, work, encoded)

    async def _start(self, index: int, work: Work, encoded: Encoded) -> None:
        try:
            _, generation = await self._start_one(
                self._engine, work, encoded, lambda running: self._finish(index, running)
            )
        except Exception as error:
            self._end(index, error)
            return
        if self._closed:
            generation.abort()
        elif index in self._unfinished:
            self._generations[index] = generation

    def _finish(self, index: int, running: Running[R]) -> None:
        self._unfinished.discard(index)
        self._generations.pop(index, None)
        self._end(index, running.error or running.snapshot())

    def _end(self, index: int, result: R | BaseException) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._ended.append((index, result))

    def _hand_over(self) -> None:
        """Wakes the caller's thread once for all requests that ended in one turn of the loop."""
        ended, self._ended = self._ended, []
        self._results.put(ended)

    def _close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for generation in self._generations.values():
            generation.abort()
        self._unfinished.clear()
        self._generations.clear()


def _placed(error: BaseException, index: int, num_started: int) -> BaseException:
    """Returns the error with the number of its prompt, if there is more than one."""
    if isinstance(error, ServiceError) and num_started > 1:
        error.message = f"prompts[{index}]: {error.message}"
        with contextlib.suppress(AttributeError):
            error.args = (error.message,)
    return error
