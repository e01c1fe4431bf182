"""One Redis, or the masters of a Redis Cluster, behind one interface: `up`, and `execute` with the key that selects the
node.

Each node has its own RedisLink. The slot map is read when the first node answers, and again when a reply reports moved
keys or a node is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from baton.gateway.access.redis.link import Answer, LinkDown, RedisLink

_log = logging.getLogger(__name__)

_LEARN_SECONDS = 0.25  # minimum time between reads of the slot map
_LOOK_SECONDS = 30.0  # maximum time between reads, in a cluster
_MAX_REDIRECTS = 2

Address = tuple[str, int]


class RedisNodes:
    """Keeps the connections for the lifetime of an `async with`, as RedisLink does."""

    def __init__(self, url: str, timeout_seconds: float, greetings: Sequence[tuple[str, ...]] = ()) -> None:
        self._url = url
        self._timeout = timeout_seconds
        self._greetings = greetings
        self._first = RedisLink(url, timeout_seconds, greetings)
        self._nodes: dict[Address, RedisLink] = {}
        self._of_slot: list[RedisLink | None] = []  # empty: not a cluster
        self._learnt = False
        self._stale = asyncio.Event()

    async def __aenter__(self) -> RedisNodes:
        self._loop = asyncio.get_running_loop()
        await self._first.__aenter__()
        await self._learn()
        self._keeper = self._loop.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        await asyncio.gather(*(link.__aexit__() for link in (self._first, *self._nodes.values())))

    @property
    def up(self) -> bool:
        """Returns whether any node answers."""
        if not self._learnt:
            return False
        return any(link.up for link in self._nodes.values()) if self._of_slot else self._first.up

    def execute(self, key: str, *words: str | bytes | int) -> asyncio.Future[Answer]:
        """Sends a command whose keys are all in the slot of `key`. The reply is as RedisLink's."""
        if not self._of_slot:
            return self._first.execute(*words)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._send(self._of_slot[key_slot(key.encode())], words, answer, 0)
        return answer

    def _send(
        self, link: RedisLink | None, words: tuple[Any, ...], answer: asyncio.Future[Answer], redirects: int
    ) -> None:
        if link is None or not link.up:
            self._stale.set()
            answer.set_exception(LinkDown("this node of the Redis Cluster is unreachable"))
            return

        def on_reply(pending: asyncio.Future[Answer]) -> None:
            if answer.done() or pending.cancelled():
                return
            if error := pending.exception():
                self._stale.set()
                answer.set_exception(error)
                return
            found = pending.result()
            where = _elsewhere(found) if isinstance(found, hiredis.ReplyError) else None
            if where is None or redirects == _MAX_REDIRECTS:
                answer.set_result(found)
                return
            kind, address = where
            other = self._nodes.get((address[0] or link.host, address[1]))
            if kind == "ASK" and other is not None and other.up:
                other.execute("ASKING")
            else:
                self._stale.set()
            self._send(other, words, answer, redirects + 1)

        link.execute(*words).add_done_callback(on_reply)

    async def _keep(self) -> None:
        while True:
            seconds = _LOOK_SECONDS if self._of_slot else None
            if not self._learnt:
                seconds = _LEARN_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stale.wait()
            self._stale.clear()
            try:
                await self._learn()
            except Exception:
                _log.exception("cannot read the nodes of the Redis Cluster of limits")
            await asyncio.sleep(_LEARN_SECONDS)

    async def _learn(self) -> None:
        """Reads the slot map from the first node that answers."""
        for link in (self._first, *self._nodes.values()):
            if not link.up:
                continue
            try:
                answer = await link.execute("CLUSTER", "SLOTS")
            except (LinkDown, TimeoutError):
                continue
            if not isinstance(answer, list):
                self._learnt = True  # "cluster support disabled", or another error of a single Redis
                return
            if await self._take(answer, link.host):
                self._learnt = True
                return

    async def _take(self, answer: Answer, host: str) -> bool:
        """Applies a slot map. Returns False if the reply is not one."""
        try:
            ranges = [(int(row[0]), int(row[1]), _address(row[2], host)) for row in answer]
        except (TypeError, ValueError, IndexError, AttributeError):
            return False
        if not ranges:
            return False
        wanted = {address for _, _, address in ranges}
        for address in wanted - set(self._nodes):
            link = RedisLink(self._url, self._timeout, self._greetings, address)
            self._nodes[address] = await link.__aenter__()
        of_slot: list[RedisLink | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, address in ranges:
            of_slot[first : last + 1] = [self._nodes[address]] * (last + 1 - first)
        self._of_slot = of_slot
        for address in set(self._nodes) - wanted:
            await self._nodes.pop(address).__aexit__()
        return True


def _address(node: Any, host: str) -> Address:
    name = node[0].decode() if node[0] else ""
    return (name if name not in ("", "?") else host), int(node[1])


def _elsewhere(error: hiredis.ReplyError) -> tuple[str, Address] | None:
    """Parses `MOVED 1234 host:port` or `ASK ...`. An empty host means the host that replied."""
    words = str(error).split(" ")
    if len(words) != 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    return (words[0], (host, int(port))) if port.isdigit() else None
