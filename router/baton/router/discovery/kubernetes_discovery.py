"""The endpoints of a Kubernetes Service, followed by a watch of its EndpointSlices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from baton.router.discovery.addresses import join_address
from baton.router.discovery.kubernetes_api import ApiError, KubernetesApi, UnexpectedAnswer

if TYPE_CHECKING:
    from kubernetes.aio.client import V1EndpointConditions, V1EndpointSlice

_log = logging.getLogger(__name__)

_LIST_SECONDS = 10.0
_CONNECT_SECONDS = 10.0  # until a watch has its first byte
_WATCH_SECONDS = 300  # the server ends the watch then, and it is resumed where it ended
_MIN_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 5.0
_GONE = 410

Slices = dict[str, frozenset[str]]  # by name


class KubernetesDiscovery:
    """Lists, then watches from there; a watch that ends is resumed, one that is too old begins with a list again.

    An endpoint counts while it serves, even when it no longer is ready: it drains, and says so itself.
    `port`: the port's name or number in the EndpointSlice.
    """

    def __init__(self, api: KubernetesApi, namespace: str, service: str, port: str) -> None:
        self._api = api
        self._namespace = namespace
        self._service = service
        self._port = port
        self._version = ""  # empty: a list comes first
        self._slices: Slices = {}
        self._backoff = _MIN_BACKOFF_SECONDS

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """All addresses that serve."""
        told: frozenset[str] | None = None
        last_problem = ""
        while True:
            problem = ""
            try:
                async with contextlib.aclosing(self._follow()) as changes:
                    async for _ in changes:
                        last_problem = ""
                        found = frozenset().union(*self._slices.values())
                        if found != told:
                            told = found
                            yield found
            except ApiError as error:
                if error.status == _GONE or isinstance(error, UnexpectedAnswer):
                    self._version = ""
                if error.status != _GONE:
                    problem = str(error)
            except TimeoutError:
                problem = "no answer in time"
            if problem:
                if problem != last_problem:
                    name = f"{self._namespace}/{self._service}"
                    _log.warning("endpoints of %s cannot be watched: %s; going on with what is known", name, problem)
                last_problem = problem
                await asyncio.sleep(self._backoff * random.uniform(0.8, 1.2))
                self._backoff = min(_MAX_BACKOFF_SECONDS, self._backoff * 2)
            else:
                # The server ends watches often when it is about to stop.
                await asyncio.sleep(_MIN_BACKOFF_SECONDS * random.uniform(0.5, 1.0))

    async def _follow(self) -> AsyncGenerator[None, None]:
        """Yields when the slices are known, and after every event, until the watch ends."""
        if not self._version:
            found = await self._api.list_slices(self._namespace, self._service, _LIST_SECONDS)
            self._slices = dict(map(self._told, found.slices))
            self._version = found.version
            yield
        watch = self._api.watch_slices(self._namespace, self._service, self._version, _WATCH_SECONDS, _CONNECT_SECONDS)
        async with contextlib.aclosing(watch) as events:
            async for event in events:
                self._backoff = _MIN_BACKOFF_SECONDS
                if event.slice is not None:
                    name, addresses = self._told(event.slice)
                    if event.kind == "DELETED":
                        self._slices.pop(name, None)
                    else:
                        self._slices[name] = addresses
                self._version = event.version
                yield

    def _told(self, item: V1EndpointSlice) -> tuple[str, frozenset[str]]:
        if item.metadata is None or not item.metadata.name:
            raise UnexpectedAnswer("an EndpointSlice without a name")
        port = self._port_of(item)
        if port is None or item.address_type == "FQDN":
            return item.metadata.name, frozenset()
        serving = [endpoint for endpoint in item.endpoints or () if _serves(endpoint.conditions)]
        return item.metadata.name, frozenset(
            join_address(address, port) for endpoint in serving for address in endpoint.addresses
        )

    def _port_of(self, item: V1EndpointSlice) -> int | None:
        for port in item.ports or ():
            if port.port and self._port in (port.name or "", str(port.port)):
                return port.port
        return None


def _serves(conditions: V1EndpointConditions | None) -> bool:
    """Unknown counts as true, as the API says."""
    if conditions is None:
        return True
    return conditions.serving if conditions.serving is not None else conditions.ready is not False
