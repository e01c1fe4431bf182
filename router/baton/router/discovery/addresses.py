"""Which addresses there are: one interface, the list that an operator gives, and a name that is resolved again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

_log = logging.getLogger(__name__)

_RESOLVE_SECONDS = 5.0  # between two resolutions of a name
_RETRY_SECONDS = 1.0  # after one that failed
_TIMEOUT_SECONDS = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery(Protocol):
    """Tells addresses, each host:port."""

    def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """All addresses, as soon as they are known and after every change; never ends.

        A source that cannot be asked changes nothing: what it said last goes on.
        """


class StaticDiscovery:
    """A list that does not change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """The list."""
        yield self._addresses
        await asyncio.Event().wait()


class DnsDiscovery:
    """All addresses of a name, asked for again and again: a headless Service, a round-robin record."""

    def __init__(
        self, host: str, port: int, interval_seconds: float = _RESOLVE_SECONDS, resolve: Resolve | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._interval_seconds = interval_seconds
        self._resolve = resolve or _resolve

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """What the name stands for now. A name that no longer exists stands for what it last stood for."""
        told: frozenset[str] | None = None
        last_problem = ""
        while True:
            delay = self._interval_seconds
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    found = frozenset(await self._resolve(self._host, self._port))
            except (OSError, TimeoutError, UnicodeError) as error:
                problem = str(error) or f"no answer within {_TIMEOUT_SECONDS:.0f} s"
                if problem != last_problem:
                    _log.warning("%s cannot be resolved: %s", self._host, problem)
                last_problem, delay = problem, min(delay, _RETRY_SECONDS)
            else:
                last_problem = ""
                if found != told:
                    told = found
                    yield found
            await asyncio.sleep(delay * random.uniform(0.9, 1.1))


class UnionDiscovery:
    """All that several sources tell."""

    def __init__(self, sources: Sequence[Discovery]) -> None:
        self._sources = sources

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """All of them, as soon as one has told something."""
        told: list[frozenset[str]] = [frozenset()] * len(self._sources)
        changed: asyncio.Queue[BaseException | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(source, place, told, changed))
            for place, source in enumerate(self._sources)
        ]
        try:
            while True:
                problem = await changed.get()
                if problem is not None:
                    raise problem
                if changed.empty():
                    yield frozenset().union(*told)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        source: Discovery,
        place: int,
        told: list[frozenset[str]],
        changed: asyncio.Queue[BaseException | None],
    ) -> None:
        try:
            async with contextlib.aclosing(source.watch()) as addresses:
                async for found in addresses:
                    told[place] = found
                    changed.put_nowait(None)
        except Exception as error:
            changed.put_nowait(error)


def join_address(host: str, port: int) -> str:
    """host:port, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [join_address(str(info[4][0]), port) for info in infos]
