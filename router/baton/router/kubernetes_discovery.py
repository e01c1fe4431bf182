"""The endpoints of a Kubernetes Service, followed by a watch of its EndpointSlices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from baton.router.discovery import join_address
from baton.router.kubernetes_api import ApiError, KubernetesApi

_log = logging.getLogger(__name__)

_LIST_SECONDS = 10.0
_PAGE = "500"
_WATCH_SECONDS = 300  # the server ends the watch then, and it is resumed where it ended
_SILENCE_SECONDS = _WATCH_SECONDS + 30.0
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
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._name = f"{namespace}/{service}"
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
                if error.status == _GONE:
                    self._version = ""
                else:
                    problem = str(error)
            except (OSError, TimeoutError) as error:
                problem = str(error) or "no answer in time"
            if problem:
                if problem != last_problem:
                    _log.warning(
                        "endpoints of %s cannot be watched: %s; going on with what is known", self._name, problem
                    )
                last_problem = problem
                await asyncio.sleep(self._backoff * random.uniform(0.8, 1.2))
                self._backoff = min(_MAX_BACKOFF_SECONDS, self._backoff * 2)
            else:
                # The server ends watches often when it is about to stop.
                await asyncio.sleep(_MIN_BACKOFF_SECONDS * random.uniform(0.5, 1.0))

    async def _follow(self) -> AsyncGenerator[None, None]:
        """Yields when the slices are known, and after every event, until the watch ends."""
        if not self._version:
            await self._list()
            yield
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        lines = self._api.lines(self._path, query, _SILENCE_SECONDS)
        async with contextlib.aclosing(lines) as events:
            async for event in events:
                self._backoff = _MIN_BACKOFF_SECONDS
                try:
                    self._take(event)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise self._unexpected("event", error) from error
                yield

    async def _list(self) -> None:
        slices: Slices = {}
        query = {"labelSelector": self._selector, "limit": _PAGE}
        while True:
            page = await self._api.get(self._path, query, _LIST_SECONDS)
            try:
                for item in page.get("items") or ():
                    slices[item["metadata"]["name"]] = self._addresses(item)
                metadata = page.get("metadata") or {}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self._unexpected("list", error) from error
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        self._slices, self._version = slices, str(metadata.get("resourceVersion", ""))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            self._version = ""
            raise ApiError(int(item.get("code") or 0), str(item.get("message") or "an error without a message"))
        metadata = item.get("metadata") or {}
        if kind in ("ADDED", "MODIFIED"):
            self._slices[metadata["name"]] = self._addresses(item)
        elif kind == "DELETED":
            self._slices.pop(metadata["name"], None)
        # Bookmarks carry nothing else.
        self._version = str(metadata.get("resourceVersion") or self._version)

    def _unexpected(self, what: str, error: Exception) -> ApiError:
        self._version = ""
        return ApiError(0, f"not the {what} that was asked for: {type(error).__name__} {error}")

    def _addresses(self, item: Mapping[str, Any]) -> frozenset[str]:
        port = self._port_of(item)
        if port is None or item.get("addressType") == "FQDN":
            return frozenset()
        return frozenset(
            join_address(address, port)
            for endpoint in item.get("endpoints") or ()
            if _serves(endpoint.get("conditions") or {})
            for address in endpoint.get("addresses") or ()
        )

    def _port_of(self, item: Mapping[str, Any]) -> int | None:
        for port in item.get("ports") or ():
            if self._port in (port.get("name") or "", str(port.get("port"))) and port.get("port"):
                return int(port["port"])
        return None


def _serves(conditions: Mapping[str, Any]) -> bool:
    """Unknown counts as true, as the API says."""
    serving = conditions.get("serving")
    ready = conditions.get("ready")
    return bool(serving) if serving is not None else ready is not False
