"""The valid API keys: read at the start and polled for changes while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from baton.gateway.access.counters import AccessCounters
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.access.keys.directory import Directory
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError, Unavailable

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0


class KeySource(Protocol):
    """A store of keys and tenants."""

    name: str  # for logs, without passwords

    async def read_if_changed(self) -> Directory | None:
        """Returns all keys and tenants, or None if nothing changed.

        Raises InvalidRequest (invalid content) or Unavailable.
        """

    async def close(self) -> None:
        """Closes connections."""


class KeyRing:
    """Holds the keys of the last successful read. Refuses every request until the first one."""

    def __init__(self, source: KeySource, counters: AccessCounters, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._counters = counters
        self._clock = clock
        self._directory: Directory | None = None
        self._problem = ""  # last logged problem

    @property
    def ready(self) -> bool:
        """Returns whether keys have been read."""
        return self._directory is not None

    def authenticate(self, key: str) -> Identity:
        """Returns the identity of a key. Raises Unauthenticated, or Unavailable while no keys have been read."""
        return self._read_directory.authenticate(key, self._clock())

    def tenant(self, name: str) -> Tenant:
        """Returns a tenant. Raises NotFound, or Unavailable while no keys have been read."""
        tenant = self._read_directory.tenants.get(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r} any more", field="tenant")
        return tenant

    @property
    def _read_directory(self) -> Directory:
        if self._directory is None:
            raise Unavailable("the API keys have not been read yet", retry_after_ms=1000)
        return self._directory

    @contextlib.asynccontextmanager
    async def watching(self, poll_seconds: float = POLL_SECONDS) -> AsyncIterator[None]:
        """Reads the keys and polls for changes. Raises InvalidRequest if the current content is invalid."""
        try:
            await self._read()
        except InvalidRequest:
            await self._source.close()
            raise
        except ServiceError as error:
            self._report(error)
        task = asyncio.get_running_loop().create_task(self._watch(poll_seconds))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._source.close()

    async def poll(self) -> None:
        """Reads the keys if they have changed. On failure, counts and logs it once and keeps the previous keys."""
        try:
            await self._read()
        except ServiceError as error:
            self._report(error)
        except Exception as error:
            _log.exception("reading keys from %s failed", self._source.name)
            self._report(InvalidRequest(f"unexpected {type(error).__name__}"))

    async def _watch(self, poll_seconds: float) -> None:
        while True:
            await asyncio.sleep(poll_seconds)
            await self.poll()

    async def _read(self) -> None:
        directory = await self._source.read_if_changed()
        if directory is None:
            return
        self._directory = directory
        self._counters.reloads += 1
        self._problem = ""
        facts = {"keys": len(directory.keys), "tenants": len(directory.tenants)}
        _log.info("read the API keys of %s", self._source.name, extra=facts)

    def _report(self, error: ServiceError) -> None:
        self._counters.source_errors += 1
        if error.message == self._problem:
            return
        self._problem = error.message
        kept = "the previous keys stay in force" if self.ready else "every request is refused until they are read"
        _log.error("cannot read the API keys; %s: %s", kept, error.message)
