"""Metric sinks: plugins that receive a process's metrics every few seconds, on threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric

from baton.plugins.kinds import METRIC_SINKS
from baton.plugins.plugins import Plugins, subclass_of

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0  # for a sink's last write


class MetricSink(ABC):
    """Receives the metrics of one service. An entry point names a subclass.

    `interval_seconds` is the time between writes. One thread calls all methods but `__init__`.
    """

    interval_seconds: float = 10.0

    def __init__(self, service: str) -> None:
        """Raises if it cannot work: the service then does not start. `service`: gateway, router, kvstore or worker."""
        self.service = service

    @abstractmethod
    def write(self, metrics: Sequence[Metric]) -> None:
        """Receives all metrics, as prometheus_client collects them. An exception is logged, and harms nothing else."""

    def close(self) -> None:  # noqa: B027 - most sinks have nothing to close
        """Called after the last write, when the service stops."""


@contextlib.asynccontextmanager
async def metric_sinks(plugins: Plugins, registry: CollectorRegistry, service: str) -> AsyncIterator[None]:
    """Runs the allowed sinks over `registry` beside the body. Raises PluginError for one that cannot start."""

    def make(found: Any) -> MetricSink:
        sink: MetricSink = subclass_of(MetricSink)(found)(service)
        if not sink.interval_seconds > 0:
            raise ValueError(f"interval_seconds is {sink.interval_seconds}; it must be above 0")
        return sink

    sinks = plugins.start(METRIC_SINKS, make)
    writers = [_Writer(name, sink, registry) for name, sink in sinks.items()]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        for writer in writers:
            writer.stop()
        for writer in writers:
            await asyncio.to_thread(writer.join, _CLOSE_SECONDS)


class _Writer:
    """The thread of one sink."""

    def __init__(self, name: str, sink: MetricSink, registry: CollectorRegistry) -> None:
        self._name = name
        self._sink = sink
        self._registry = registry
        self._stopped = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"metric sink {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.warning("the metric sink %s did not end within %g s", self._name, seconds)

    def _run(self) -> None:
        while not self._stopped.wait(self._sink.interval_seconds):
            self._write()
        self._write()
        try:
            self._sink.close()
        except Exception:
            _log.exception("the metric sink %s cannot be closed", self._name)

    def _write(self) -> None:
        """Logs the first failure in a row, and its end."""
        try:
            self._sink.write(list(self._registry.collect()))
        except Exception:
            if not self._failing:
                _log.exception("the metric sink %s failed; it is called again", self._name)
            self._failing = True
            return
        if self._failing:
            _log.info("the metric sink %s works again", self._name)
        self._failing = False
