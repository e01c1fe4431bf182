"""Sources of addresses: their interface, a fixed list, and a host name that is resolved again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from baton.router.discovery.endpoints import Endpoints, merged, serving
from baton.router.discovery.freshness import Freshness

_log = logging.getLogger(__name__)

_RESOLVE_SECONDS = 5.0  # between two resolutions of a name
_RETRY_SECONDS = 1.0  # after one that failed
_TIMEOUT_SECONDS = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery(Protocol):
    """A source of endpoints."""

    def watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields all endpoints when they are first known and after every change, without end.

        While a source cannot be reached, its last answer stays.
        """

    @property
    def age_seconds(self) -> float:
        """Returns the seconds since the endpoints were last confirmed."""


class StaticDiscovery:
    """A list that does not change."""

    age_seconds = 0.0

    def __init__(self, addresses: Iterable[str]) -> None:
        self._endpoints = serving(addresses)

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields the given addresses once."""
        yield self._endpoints
        await asyncio.Event().wait()


class DnsDiscovery:
    """All addresses of a name, resolved again and again: a headless Service, a round-robin record."""

    def __init__(
        self, host: str, port: int, interval_seconds: float = _RESOLVE_SECONDS, resolve: Resolve | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._interval_seconds = interval_seconds
        self._resolve = resolve or _resolve
        self._freshness = Freshness()

    @property
    def age_seconds(self) -> float:
        """Returns the seconds since the name was last resolved."""
        return self._freshness.age_seconds

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields the name's addresses. A name that cannot be resolved keeps its last ones."""
        reported: Endpoints | None = None
        last_problem = ""
        while True:
            delay = self._interval_seconds
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    found = serving(await self._resolve(self._host, self._port))
            except (OSError, TimeoutError, UnicodeError) as error:
                problem = str(error) or f"no answer within {_TIMEOUT_SECONDS:.0f} s"
                if problem != last_problem:
                    _log.warning("%s cannot be resolved: %s", self._host, problem)
                last_problem, delay = problem, min(delay, _RETRY_SECONDS)
            else:
                last_problem = ""
                self._freshness.prove()
                if found != reported:
                    reported = found
                    yield found
            await asyncio.sleep(delay * random.uniform(0.9, 1.1))


class UnionDiscovery:
    """The endpoints of several sources."""

    def __init__(self, sources: Sequence[Discovery]) -> None:
        self._sources = sources

    @property
    def age_seconds(self) -> float:
        """Returns the age of the oldest source."""
        return max((source.age_seconds for source in self._sources), default=0.0)

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        """Yields the union, as soon as one source has answered."""
        reported: list[Endpoints] = [{}] * len(self._sources)
        changed: asyncio.Queue[BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(source, place, reported, changed))
            for place, source in enumerate(self._sources)
        ]
        try:
            while True:
                problem = await changed.get()
                if problem is not None:
                    raise problem
                if changed.empty():
                    yield merged(reported)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        source: Discovery,
        place: int,
        reported: list[Endpoints],
        changed: asyncio.Queue[BaseException | None],
    ) -> None:
        try:
            async with contextlib.aclosing(source.watch()) as views:
                async for found in views:
                    reported[place] = found
                    changed.put_nowait(None)
        except Exception as error:
            changed.put_nowait(error)


def join_address(host: str, port: int) -> str:
    """Formats host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [join_address(str(info[4][0]), port) for info in infos]
