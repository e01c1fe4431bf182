"""Runs loads of adapters beside the engine, on threads of their own."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from baton.rpc.errors import InternalError, ServiceError

_log = logging.getLogger(__name__)

_NUM_THREADS = 2  # one that reads from a slow disk does not delay copies to the device


@dataclass(frozen=True, slots=True)
class Ended:
    """A load that has ended."""

    key: Any
    result: Any
    error: ServiceError | None
    seconds: float


class Loads(Protocol):
    """Runs functions elsewhere, and returns their results to the engine's thread."""

    def start(self, key: object, work: Callable[[], Any]) -> None:
        """Starts a load that `key` names."""

    def take(self) -> list[Ended]:
        """Returns the loads that have ended since the last call."""

    @property
    def due(self) -> float | None:
        """When `take` must be called next, on the engine's clock. None: the end of a load wakes the engine."""

    def close(self) -> None:
        """Drops the loads that have not begun. Idempotent."""


class ThreadLoads:
    """Implements Loads with threads, which start with the first load. `wake`: called at each end, on a thread."""

    due = None

    def __init__(self, wake: Callable[[], object] = lambda: None, num_threads: int = _NUM_THREADS) -> None:
        self._wake = wake
        self._num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def start(self, key: object, work: Callable[[], Any]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="adapters")
        self._threads.submit(self._run, key, work)

    def take(self) -> list[Ended]:
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _run(self, key: object, work: Callable[[], Any]) -> None:
        started = time.perf_counter()
        result, error = None, None
        try:
            result = work()
        except ServiceError as refused:
            error = refused
        except Exception as failure:  # any error that a file or a device can cause
            _log.exception("an adapter cannot be loaded")
            error = InternalError(f"an adapter cannot be loaded: {type(failure).__name__}: {failure}")
        self._ended.put(Ended(key, result, error, time.perf_counter() - started))
        self._wake()
