"""The state of files and batches in Redis, shared by all gateways."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from baton.gateway.batches.state.store import AlreadyRecorded, Commit, Entry, LeaseLost, Progress, StorageFull, Use
from baton.rpc.errors import InvalidRequest, Unavailable

_log = logging.getLogger(__name__)

_PREFIX = "baton:batches:"
_OPEN = f"{_PREFIX}open"
_EXPIRY = f"{_PREFIX}expiry"
_TIMEOUT_SECONDS = 5.0

# KEYS: lease, fence. ARGV: milliseconds. Returns the new fence, or 0 if the lease is held.
_LEASE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local fence = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], fence, 'PX', ARGV[1])
return fence
"""
# KEYS: lease, fence. ARGV: fence, milliseconds. A lease that has expired is taken again unless a newer one was given.
_RENEW = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
# KEYS: lease. ARGV: fence.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"
# KEYS: fence, record, lines, parts. ARGV: fence, record, number of parts, parts, line indices.
# Returns 0 for a newer fence, -1 for a line that is recorded already, otherwise 1.
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local first = 4 + tonumber(ARGV[3])
for i = first, #ARGV do
  if redis.call('GETBIT', KEYS[3], ARGV[i]) == 1 then return -1 end
end
for i = first, #ARGV do redis.call('SETBIT', KEYS[3], ARGV[i], 1) end
for i = 4, first - 1 do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
# KEYS: record, listing, sizes by file, expiry. ARGV: name, record, time, size, limit, expiry or empty, packed entry.
# Returns -1, or the bytes of the other files where it does not fit.
_CREATE_FILE = """
local others = 0
for _, size in ipairs(redis.call('HVALS', KEYS[3])) do others = others + size end
others = others - (redis.call('HGET', KEYS[3], ARGV[1]) or 0)
local limit = tonumber(ARGV[5])
if limit > 0 and others + tonumber(ARGV[4]) > limit then return others end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
if ARGV[6] ~= '' then redis.call('ZADD', KEYS[4], ARGV[6], ARGV[7]) end
return -1
"""


class RedisState:
    """Implements StateStore."""

    shared = True

    def __init__(self, url: str) -> None:
        try:
            self._redis = redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS)
        except ValueError as error:
            raise InvalidRequest(f"redis_url: {url!r} is not allowed; {error}", field="redis_url") from error
        self._lease = self._redis.register_script(_LEASE)
        self._renew = self._redis.register_script(_RENEW)
        self._release = self._redis.register_script(_RELEASE)
        self._commit = self._redis.register_script(_COMMIT)
        self._create_file = self._redis.register_script(_CREATE_FILE)

    async def create(self, entry: Entry, record: bytes, created: float, expires: float | None) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(_record(entry.kind, entry.name), record)
        pipeline.zadd(_listing(entry.kind, entry.tenant), {entry.name: created})
        if expires is not None:
            pipeline.zadd(_EXPIRY, {_packed(entry): expires})
        if entry.kind == "batch":
            pipeline.zadd(_OPEN, {_packed(entry): created})
        await _asked(pipeline.execute())

    async def create_file(self, entry: Entry, record: bytes, created: float, expires: float | None, use: Use) -> None:
        name, tenant = entry.name, entry.tenant
        keys = [_record(entry.kind, name), _listing(entry.kind, tenant), _sizes(tenant), _EXPIRY]
        when = "" if expires is None else expires
        arguments: list[str | bytes | float] = [name, record, created, use.size, use.limit, when, _packed(entry)]
        others = int(await _asked(self._create_file(keys=keys, args=arguments)))
        if others >= 0:
            raise StorageFull(others)

    async def stored_bytes(self, tenant: str) -> int:
        return sum(map(int, await _asked(self._redis.hvals(_sizes(tenant)))))

    async def load(self, kind: str, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        found: list[Any] = await _asked(self._redis.mget([_record(kind, name) for name in names]))
        return found

    async def delete(self, entry: Entry) -> bool:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(_record(entry.kind, entry.name))
        pipeline.zrem(_listing(entry.kind, entry.tenant), entry.name)
        pipeline.zrem(_EXPIRY, _packed(entry))
        pipeline.hdel(_sizes(entry.tenant), entry.name)
        if entry.kind == "batch":
            pipeline.zrem(_OPEN, _packed(entry))
            pipeline.delete(*(_part(entry.name, what) for what in ("lease", "fence", "lines", "parts", "cancel")))
        return bool((await _asked(pipeline.execute()))[0])

    async def page(self, kind: str, tenant: str, after: str, limit: int, ascending: bool) -> list[str] | None:
        key, first = _listing(kind, tenant), 0
        if after:
            rank = await _asked(self._redis.zrank(key, after) if ascending else self._redis.zrevrank(key, after))
            if rank is None:
                return None
            first = rank + 1
        found = await _asked(self._redis.zrange(key, first, first + limit - 1, desc=not ascending))
        return [_text(name) for name in found]

    async def expire(self, entry: Entry, when: float) -> None:
        await _asked(self._redis.zadd(_EXPIRY, {_packed(entry): when}))

    async def expired(self, now: float, most: int) -> list[Entry]:
        found = await _asked(self._redis.zrangebyscore(_EXPIRY, "-inf", now, start=0, num=most))
        return await self._entries(_EXPIRY, found)

    async def open_batches(self) -> list[Entry]:
        return await self._entries(_OPEN, await _asked(self._redis.zrange(_OPEN, 0, -1)))

    async def _entries(self, key: str, members: Sequence[bytes]) -> list[Entry]:
        """Decodes members of a set. Those that cannot be decoded name no record, and are removed."""
        entries, unreadable = [], []
        for member in members:
            try:
                entries.append(_unpacked(member))
            except (msgspec.DecodeError, UnicodeDecodeError):
                unreadable.append(member)
        if unreadable:
            _log.error(
                "removing %d members of %s that cannot be read, such as %.100r", len(unreadable), key, unreadable[0]
            )
            await _asked(self._redis.zrem(key, *unreadable))
        return entries

    async def close_batch(self, entry: Entry) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zrem(_OPEN, _packed(entry))
        pipeline.delete(_part(entry.name, "lines"), _part(entry.name, "parts"))
        await _asked(pipeline.execute())

    async def lease(self, name: str, seconds: float) -> int | None:
        keys = [_part(name, "lease"), _part(name, "fence")]
        fence = int(await _asked(self._lease(keys=keys, args=[int(seconds * 1000)])))
        return fence or None

    async def renew(self, name: str, fence: int, seconds: float) -> None:
        keys = [_part(name, "lease"), _part(name, "fence")]
        if not await _asked(self._renew(keys=keys, args=[fence, int(seconds * 1000)])):
            raise LeaseLost(f"another gateway runs {name}")

    async def release(self, name: str, fence: int) -> None:
        await _asked(self._release(keys=[_part(name, "lease")], args=[fence]))

    async def commit(self, name: str, fence: int, commit: Commit) -> None:
        keys = [_part(name, "fence"), _record("batch", name), _part(name, "lines"), _part(name, "parts")]
        arguments: list[bytes | int] = [fence, commit.record, len(commit.parts), *commit.parts, *commit.lines]
        result = int(await _asked(self._commit(keys=keys, args=arguments)))
        if result < 0:
            raise AlreadyRecorded(f"lines of {name} are recorded already")
        if not result:
            raise LeaseLost(f"another gateway runs {name}")

    async def progress(self, name: str) -> Progress:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.get(_part(name, "lines"))
        pipeline.lrange(_part(name, "parts"), 0, -1)
        bitmap, parts = await _asked(pipeline.execute())
        return Progress(bitmap or b"", parts)

    async def cancel(self, name: str, now: float) -> None:
        await _asked(self._redis.set(_part(name, "cancel"), now, nx=True))

    async def cancelled_at(self, names: Sequence[str]) -> list[float | None]:
        if not names:
            return []
        found = await _asked(self._redis.mget([_part(name, "cancel") for name in names]))
        return [None if one is None else float(one) for one in found]

    async def close(self) -> None:
        await self._redis.aclose()


def _record(kind: str, name: str) -> str:
    return f"{_PREFIX}{kind}:{{{name}}}"


def _part(name: str, what: str) -> str:
    return f"{_PREFIX}batch:{{{name}}}:{what}"


def _listing(kind: str, tenant: str) -> str:
    return f"{_PREFIX}{kind}s-of:{tenant}"


def _sizes(tenant: str) -> str:
    return f"{_PREFIX}bytes-of:{tenant}"


def _packed(entry: Entry) -> bytes:
    return msgspec.json.encode(entry)


def _unpacked(packed: bytes) -> Entry:
    return msgspec.json.decode(packed, type=Entry)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def _asked(answer: Any) -> Any:
    try:
        return await answer
    except (RedisError, OSError, TimeoutError) as error:
        _log.warning("cannot access the state of batches in Redis: %s", error)
        raise Unavailable("cannot access the state of files and batches; retry later", retry_after_ms=1000) from error
