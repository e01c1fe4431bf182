"""A thread that runs work in the background, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 2.0


class Result(Generic[T]):
    """The result of a piece of work, once it has run."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    @classmethod
    def of(cls, work: Callable[[], T]) -> Result[T]:
        """Runs the work at once."""
        result = cls(work)
        result.run()
        return result

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Waits until the work has ended, successfully or not."""
        self._done.wait()

    def get(self) -> T:
        """Waits for the result and returns it. Raises the work's error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class BackgroundThread:
    """A thread for background work, which is started with the first work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Result[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], T]) -> Result[T]:
        """Queues work and returns its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        result = Result(work)
        self._queue.put(result)
        return result

    def close(self) -> None:
        """Ends the thread after the queued work."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (result := self._queue.get()) is not None:
            result.run()
