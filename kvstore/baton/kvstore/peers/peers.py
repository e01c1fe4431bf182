"""The replicas that share one Redis: finds them through it and follows each. Keeps the known ones if Redis is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from baton.kvstore.peers.link import PeerLink
from baton.kvstore.store.store import StoreError

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0


class ReplicaDirectory(Protocol):
    """The directory in which replicas find each other."""

    async def announce(self, replica: str, address: str) -> dict[str, str]:
        """Renews this replica's entry and returns every live replica's address. Raises StoreError."""

    async def withdraw(self, replica: str) -> None:
        """Removes this replica's entry. Raises StoreError."""


class Peers:
    """Links to all other replicas while `run` runs."""

    def __init__(
        self, directory: ReplicaDirectory, replica: str, address: str, make_link: Callable[[str, str], PeerLink]
    ) -> None:
        self._directory = directory
        self._replica = replica
        self._address = address
        self._make_link = make_link
        self._links: dict[str, tuple[PeerLink, asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()

    @property
    def num_connected(self) -> int:
        """Number of replicas with an open stream. Thread-safe."""
        return sum(link.connected for link, _ in list(self._links.values()))

    def stop(self) -> None:
        """Ends `run` after the current call to the directory."""
        self._stopping.set()

    async def run(self) -> None:
        """Follows every announced replica until stopped."""
        try:
            while not self._stopping.is_set():
                await self._refresh()
                try:
                    async with asyncio.timeout(_INTERVAL_SECONDS):
                        await self._stopping.wait()
                except TimeoutError:
                    pass
            await self._withdraw()
        finally:
            for replica in list(self._links):
                await self._unfollow(replica)

    async def _refresh(self) -> None:
        try:
            addresses = await self._directory.announce(self._replica, self._address)
        except StoreError as error:
            # The store's writer reports outages.
            _log.debug("cannot look up replicas: %s", error)
            return
        addresses.pop(self._replica, None)
        for replica, (link, _) in list(self._links.items()):
            moved = addresses.get(replica, link.address) != link.address
            if moved or (replica not in addresses and not link.connected):
                await self._unfollow(replica)
        for replica, address in addresses.items():
            if replica not in self._links:
                link = self._make_link(replica, address)
                self._links[replica] = (link, asyncio.create_task(link.run()))

    async def _unfollow(self, replica: str) -> None:
        _, task = self._links.pop(replica)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _withdraw(self) -> None:
        try:
            await self._directory.withdraw(self._replica)
        except StoreError as error:
            _log.debug("cannot withdraw this replica; its entry expires by itself: %s", error)
