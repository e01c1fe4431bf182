"""Work that is done ahead on a thread of its own, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 2.0


class Result(Generic[T]):
    """What a piece of work gives, when it is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    @classmethod
    def of(cls, work: Callable[[], T]) -> Result[T]:
        """Done here and now."""
        result = cls(work)
        result.run()
        return result

    def run(self) -> None:
        """Does it."""
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Until it is done, well or badly."""
        self._done.wait()

    def get(self) -> T:
        """Raises what the work raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class BackgroundThread:
    """A thread that is started with the first work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Result[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T]) -> Result[T]:
        """Queues work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        result = Result(work)
        self._queue.put(result)
        return result

    def close(self) -> None:
        """What is queued is done first."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (result := self._queue.get()) is not None:
            result.run()
