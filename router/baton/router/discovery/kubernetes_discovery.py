"""The endpoints of a Kubernetes Service, followed by a watch of its EndpointSlices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator

from baton.router.discovery.endpoints import Endpoints, merged
from baton.router.discovery.freshness import Freshness
from baton.router.discovery.kubernetes_api import ApiError, KubernetesApi
from baton.router.discovery.pace import Pace
from baton.router.discovery.slices import endpoints_of, name_of

_log = logging.getLogger(__name__)

_GONE = 410  # the version that a watch or a page begins at is too old


class KubernetesDiscovery:
    """Lists, then watches from there. Lists again after every watch.

    A watch resumed at a version of its own would never notice a cluster whose state was restored to an older one.
    `port`: the port's name or number in the EndpointSlice.
    """

    def __init__(self, api: KubernetesApi, namespace: str, service: str, port: str, pace: Pace | None = None) -> None:
        self._api = api
        self._namespace = namespace
        self._service = service
        self._port = port
        self._pace = pace or Pace()
        self._freshness = Freshness()
        self._backoff = _Backoff(self._pace)
        self._problem = ""

    @property
    def age_seconds(self) -> float:
        """Returns the seconds since the last list, event or bookmark."""
        return self._freshness.age_seconds

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields the Service's endpoints."""
        reported: Endpoints | None = None
        while True:
            problem = ""
            try:
                async with contextlib.aclosing(self._list_and_watch()) as views:
                    async for found in views:
                        self._freshness.prove()
                        if found != reported:
                            reported = found
                            yield found
            except ApiError as error:
                problem = "" if error.status == _GONE else str(error)
            except TimeoutError:
                problem = f"no answer within {self._pace.request:g} s"
            self._report(problem or self._problem)
            await asyncio.sleep(self._backoff.next())

    async def _list_and_watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields the endpoints as of the list and after every event, until the watch ends."""
        pace = self._pace
        found = await self._api.list_slices(self._namespace, self._service, pace.request)
        slices = {name_of(item): endpoints_of(item, self._port) for item in found.slices}
        version = found.version
        yield merged(slices.values())
        async with contextlib.aclosing(self._api.watch_slices(self._namespace, self._service, version, pace)) as events:
            async for event in events:
                if _is_before(event.version, version):
                    raise ApiError(0, f"version {event.version} after {version}: the cluster's state was restored")
                version = event.version
                self._backoff.reset()
                self._report("")
                if event.kind == "DELETED" and event.slice is not None:
                    slices.pop(name_of(event.slice), None)
                elif event.slice is not None:
                    slices[name_of(event.slice)] = endpoints_of(event.slice, self._port)
                yield merged(slices.values())

    def _report(self, problem: str) -> None:
        """Logs a problem if it differs from the last one. Empty: no problem."""
        if problem == self._problem:
            return
        self._problem = problem
        name = f"{self._namespace}/{self._service}"
        if problem:
            _log.warning("cannot watch the endpoints of %s: %s; keeping the known ones", name, problem)
        else:
            _log.info("the endpoints of %s are watched again", name)


class _Backoff:
    """Seconds to wait between two attempts."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._seconds = pace.min_backoff

    def next(self) -> float:
        """Returns the next wait, with jitter: routers do not list at the same time."""
        seconds = self._seconds
        self._seconds = min(self._pace.max_backoff, 2 * seconds)
        return seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Resets the backoff to its minimum."""
        self._seconds = self._pace.min_backoff


def _is_before(version: str, other: str) -> bool:
    """Returns whether a resource version is older. Kubernetes compares those of one kind as numbers."""
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)
