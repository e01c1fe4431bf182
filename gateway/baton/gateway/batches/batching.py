"""Files and batches of one gateway: composes stores, routes and the runner."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from baton.gateway.access.gate import Gate
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.batches.batch_routes import batch_routes
from baton.gateway.batches.blobs.factory import open_blobs
from baton.gateway.batches.blobs.threads import Blobs
from baton.gateway.batches.files import Files
from baton.gateway.batches.running.batch_run import RunnerParts
from baton.gateway.batches.running.line_call import Handler
from baton.gateway.batches.running.runner import BatchRunner
from baton.gateway.batches.running.window import Window
from baton.gateway.batches.service import TARGETS, Batches
from baton.gateway.batches.state.factory import open_state
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.config import GatewayConfig
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.batches import BatchCollector, BatchCounters
from baton.gateway.rest.routing import Route
from baton.rpc.errors import InvalidRequest

_log = logging.getLogger(__name__)

# Added to the tenant's priority: routers and workers run urgent requests first.
BATCH_PRIORITY = 1000
_FORM_BYTES = 64 << 10  # of an upload, besides the file
_FILES = "/v1/files"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of files and batches."""

    store: str
    redis_url: str
    max_file_bytes: int
    max_tenant_bytes: int  # 0: any number
    max_lines: int
    max_running_lines: int


class Batching:
    """The parts of files and batches. `routes` is called once, before `running`."""

    def __init__(self, settings: BatchSettings, gate: Gate) -> None:
        self._settings = settings
        self._gate = gate
        self._state = open_state(settings.redis_url)
        counters = BatchCounters()
        blobs = Blobs(open_blobs(settings.store))
        self._files = Files(self._state, blobs, settings.max_tenant_bytes, counters)
        self._handlers: dict[str, Handler] = {}
        window = Window(settings.max_running_lines, time.monotonic)
        parts = RunnerParts(
            self._state,
            self._files,
            window,
            lambda endpoint: endpoint in self._handlers,
            self._handler_of,
            self._identity_of,
            settings.max_lines,
            counters,
        )
        self.runner = BatchRunner(parts)
        self.collector = BatchCollector(counters, self.runner.load)
        if not self._state.shared:
            _log.warning("files and batches are forgotten at a restart: their state is in memory (--redis-url)")

    def routes(self, api: Sequence[Route], bodies: BodyThread, strict: bool) -> list[Route]:
        """Returns the routes of files and batches, whose targets are those of `api`."""
        found = {route.path: route.handler for route in api if route.method == "POST"}
        self._handlers = {path: found[path] for path in TARGETS if path in found}
        batches = Batches(self._state, self._files, tuple(self._handlers), self.runner.wake)
        return batch_routes(batches, self._files, bodies, strict)

    def spooled_bytes(self, exchange: Exchange, is_known: Callable[[Exchange], bool]) -> int:
        """Returns the most bytes of an upload; 0 for other requests, and for clients that are not known."""
        is_upload = exchange.method == "POST" and exchange.path == _FILES
        return self._settings.max_file_bytes + _FORM_BYTES if is_upload and is_known(exchange) else 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs batches until the end of the context, then closes the stores."""
        try:
            async with self.runner.running():
                yield
        finally:
            await self._files.close()
            await self._state.close()

    def _handler_of(self, endpoint: str) -> Handler:
        handler = self._handlers.get(endpoint)
        if handler is None:
            raise InvalidRequest(f"endpoint {endpoint!r} is not served by this gateway", field="endpoint")
        return handler

    def _identity_of(self, name: str) -> Identity:
        tenant = self._gate.tenant_named(name)
        return Identity(_background(tenant), background=True)


def open_batching(config: GatewayConfig, gate: Gate) -> Batching | None:
    """Opens the stores of files and batches, if there are any. Raises InvalidRequest."""
    if not config.batch_store:
        return None
    # Requests of clients keep at least half of the streams.
    most = min(config.max_batch_streams, max(1, config.max_streams // 2))
    settings = BatchSettings(
        config.batch_store,
        config.redis_url,
        config.max_file_bytes,
        config.max_tenant_file_bytes,
        config.max_batch_requests,
        most,
    )
    return Batching(settings, gate)


def _background(tenant: Tenant) -> Tenant:
    return replace(tenant, priority=tenant.priority + BATCH_PRIORITY)
