"""Loads adapters that workers can resolve when a request first names them: once for each name, and not again soon after
a failure. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.gateway.access.identity import Identity
from baton.gateway.models.served import ModelCatalog, ServedModel, UnknownModel
from baton.rpc.errors import NoCapacity, NotFound, ServiceError

MAX_MISSES = 4096
MAX_NAMES = 64
_RETRY_AFTER_MS = 1000

Load = Callable[[str, ServedModel], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Miss:
    """A name that could not be loaded."""

    until: float
    error: ServiceError


class NameResolver:
    """The names that are being loaded, and those that could not be. `load`: loads a name as an adapter of a model."""

    def __init__(
        self,
        catalog: ModelCatalog,
        load: Load,
        miss_seconds: float,
        count: Callable[[str], None] = lambda outcome: None,  # loaded, missing, failed or remembered
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._load = load
        self._miss_seconds = miss_seconds
        self._count = count
        self._clock = clock
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._misses: dict[str, _Miss] = {}  # oldest first

    def may_resolve(self, identity: Identity, name: str) -> bool:
        """Returns whether the tenant may use the name and the workers of a model may load it."""
        return identity.tenant.may_use(name) and self._catalog.resolving_model(name) is not None

    async def ensure(self, identity: Identity, name: str) -> None:
        """Returns once the name is served, or at once if it never will be: it is refused where it is used.

        Raises ServiceError if it cannot be loaded.
        """
        try:
            self._catalog.get(name)
        except UnknownModel:
            if self.may_resolve(identity, name):
                await self.resolve(name)

    async def resolve(self, name: str) -> None:
        """Loads an unknown name that `may_resolve` allows. Raises UnknownModel without such an adapter, the error of
        its load, and NoCapacity."""
        self._raise_miss(name)
        task = self._loading.get(name)
        if task is None:
            if len(self._loading) >= MAX_NAMES:
                raise NoCapacity(
                    f"{len(self._loading)} adapters are being loaded; retry later",
                    field="model",
                    retry_after_ms=_RETRY_AFTER_MS,
                )
            task = self._loading[name] = asyncio.create_task(self._resolve(name))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # all clients may be gone
        try:
            await asyncio.shield(task)  # a client that goes away does not end the load for others
        except ServiceError as error:
            raise copy.copy(error) from error  # each request may name the field differently

    async def _resolve(self, name: str) -> None:
        try:
            model = self._catalog.resolving_model(name)
            if model is None:
                raise UnknownModel(name)
            await self._load(name, model)
        except NotFound as error:
            raise self._remembered(name, "missing", UnknownModel(name)) from error
        except ServiceError as error:
            error.field = "model"
            raise (error if error.retryable else self._remembered(name, "failed", error)) from None
        else:
            self._count("loaded")
        finally:
            del self._loading[name]

    def _remembered(self, name: str, outcome: str, error: ServiceError) -> ServiceError:
        self._count(outcome)
        self._misses.pop(name, None)
        if len(self._misses) >= MAX_MISSES:
            del self._misses[next(iter(self._misses))]
        self._misses[name] = _Miss(self._clock() + self._miss_seconds, error)
        return error

    def _raise_miss(self, name: str) -> None:
        miss = self._misses.get(name)
        if miss is None:
            return
        if miss.until <= self._clock():
            del self._misses[name]
            return
        self._count("remembered")
        raise copy.copy(miss.error)
