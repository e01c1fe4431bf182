"""Responses in Redis, shared by all gateways. Redis expires the records."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

import redis.asyncio as redis
from redis.exceptions import RedisError

from baton.gateway.storage.store import ALIVE_SECONDS, MAX_LISTED
from baton.rpc.errors import InvalidRequest, Unavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PREFIX = "baton:responses:"
_PIECES_PREFIX = "baton:responses-items:"
_GROUP_PREFIX = "baton:responses-of:"
_TIMEOUT_SECONDS = 2.0
_CANCEL_SECONDS = 600


class RedisRecordStore:
    """Implements RecordStore."""

    def __init__(self, url: str, ttl: float) -> None:
        self._ttl = max(1, int(ttl))
        try:
            self._redis = redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS)
        except ValueError as error:
            raise InvalidRequest(f"redis_url: {url!r} is not allowed; {error}", field="redis_url") from error

    async def save(self, name: str, record: bytes) -> None:
        await _asked(self._redis.set(_PREFIX + name, record, ex=self._ttl))

    async def load(self, name: str) -> bytes | None:
        record = await _asked(self._redis.get(_PREFIX + name))
        return record.encode() if isinstance(record, str) else record

    async def delete(self, name: str) -> bool:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(_PREFIX + name)
        pipeline.delete(_PIECES_PREFIX + name)
        return bool((await _asked(pipeline.execute()))[0])

    async def append(self, name: str, pieces: Sequence[bytes]) -> bool:
        if not await _asked(self._redis.expire(_PREFIX + name, self._ttl)):
            return False
        pipeline = self._redis.pipeline(transaction=True)
        if pieces:
            pipeline.rpush(_PIECES_PREFIX + name, *pieces)
        pipeline.expire(_PIECES_PREFIX + name, self._ttl)
        await _asked(pipeline.execute())
        return True

    async def pieces(self, name: str) -> list[bytes]:
        found: Awaitable[list[bytes | str]] = self._redis.lrange(_PIECES_PREFIX + name, 0, -1)
        return [piece.encode() if isinstance(piece, str) else piece for piece in await _asked(found)]

    async def remove(self, name: str, piece: bytes) -> bool:
        removed: Awaitable[int] = self._redis.lrem(_PIECES_PREFIX + name, 1, piece)  # type: ignore[arg-type]
        return bool(await _asked(removed))

    async def enlist(self, group: str, name: str) -> None:
        key, now = _GROUP_PREFIX + group, time.time()
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zadd(key, {name: now})
        pipeline.zremrangebyscore(key, "-inf", now - self._ttl)
        pipeline.zremrangebyrank(key, 0, -MAX_LISTED - 1)
        pipeline.expire(key, self._ttl)
        await _asked(pipeline.execute())

    async def delist(self, group: str, name: str) -> None:
        await _asked(self._redis.zrem(_GROUP_PREFIX + group, name))

    async def listed(self, group: str) -> list[str]:
        names = await _asked(self._redis.zrangebyscore(_GROUP_PREFIX + group, time.time() - self._ttl, "+inf"))
        return [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    async def beat(self, names: Iterable[str]) -> list[str]:
        listed = list(names)
        pipeline = self._redis.pipeline(transaction=False)
        for name in listed:
            pipeline.set(f"{_PREFIX}{name}:alive", b"1", ex=ALIVE_SECONDS)
        for name in listed:
            pipeline.getdel(f"{_PREFIX}{name}:cancel")
        answers = await _asked(pipeline.execute())
        return [name for name, wanted in zip(listed, answers[len(listed) :], strict=True) if wanted]

    async def is_running(self, name: str) -> bool:
        return bool(await _asked(self._redis.exists(f"{_PREFIX}{name}:alive")))

    async def ask_cancel(self, name: str) -> None:
        await _asked(self._redis.set(f"{_PREFIX}{name}:cancel", b"1", ex=_CANCEL_SECONDS))

    async def close(self) -> None:
        await self._redis.aclose()


async def _asked(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except (RedisError, OSError, TimeoutError) as error:
        _log.warning("cannot access stored responses in Redis: %s", error)
        raise Unavailable("cannot access stored responses; retry later", retry_after_ms=1000) from error
