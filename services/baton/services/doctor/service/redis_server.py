"""The Redis of a service: whether it responds, its version and mode, and whether it persists data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.redact import without_secrets
from baton.services.doctor.targets import Targets

_TOPIC = "redis"
_LEAST_VERSION = (6, 2)
_SAFE_POLICIES = ("noeviction", "volatile-lru", "volatile-lfu", "volatile-ttl", "volatile-random")


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """The Redis server. `name` is the URL without its password. `problem` is empty if it responds."""

    name: str
    problem: str = ""
    version: str = ""
    role: str = ""  # master or slave
    policy: str = ""  # of eviction; empty: unknown
    persists: bool | None = None  # None: unknown
    last_save_failed: bool = False
    offset: float | None = None  # seconds that its clock is ahead of this one


def check_redis(facts: RedisFacts | None, targets: Targets) -> Iterator[Finding]:
    """Checks the Redis server. Its failure is not fatal, because requests are served without it."""
    if facts is None:
        if targets.service in ("gateway", "kvstore"):
            yield ok(_TOPIC, "--redis-url is empty: no data outlives this process or its data folder")
        return
    if facts.problem:
        yield _unreachable(facts)
        return
    yield ok(_TOPIC, f"{facts.name}: Redis {facts.version}, {facts.role}")
    if _numbers(facts.version) < _LEAST_VERSION:
        yield failed(_TOPIC, f"Redis {facts.version} is too old", "take 6.2 or newer")
    if facts.role == "slave":
        yield failed(
            _TOPIC, f"{facts.name} is a replica: it takes no writes", "--redis-url of the master, or of a cluster"
        )
    if facts.policy and facts.policy not in _SAFE_POLICIES:
        what = f"maxmemory-policy {facts.policy} lets Redis drop keys and limits"
        yield warning(_TOPIC, what, "redis-cli config set maxmemory-policy noeviction")
    if facts.last_save_failed:
        yield warning(_TOPIC, "its last save to disk failed", "redis-cli info persistence; the volume may be full")
    elif facts.persists is False:
        what = "it has no persistence: API keys and responses are lost when it ends"
        yield warning(_TOPIC, what, "redis-cli config set appendonly yes")


async def observe_redis(targets: Targets, seconds: float) -> RedisFacts | None:
    """Queries Redis. Returns None without a Redis URL."""
    if not targets.redis_url:
        return None
    name = without_secrets(targets.redis_url)
    try:
        from redis.asyncio import Redis
    except ImportError:
        return RedisFacts(name, "the package redis is not installed: pip install 'baton-inference[kvstore]'")
    try:
        limits: dict[str, Any] = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        client: Any = Redis.from_url(targets.redis_url, protocol=2, **limits)
    except ValueError as error:
        return RedisFacts(name, without_secrets(str(error)))
    try:
        async with asyncio.timeout(seconds):
            return await _ask(client, name)
    except Exception as error:
        return RedisFacts(name, without_secrets(str(error)) or f"no answer within {seconds:.0f} s")
    finally:
        await client.aclose()


async def _ask(client: Any, name: str) -> RedisFacts:
    info = await client.info()
    began = time.time()
    seconds, micros = await client.time()
    took = time.time() - began
    return RedisFacts(
        name=name,
        version=str(info.get("redis_version", "")),
        role=str(info.get("role", "")),
        policy=str(info.get("maxmemory_policy", "")) if info.get("maxmemory") else "",
        persists=await _persists(client, info),
        last_save_failed="err" in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")),
        offset=seconds + micros / 1e6 - (began + took / 2),
    )


async def _persists(client: Any, info: dict[str, Any]) -> bool | None:
    if info.get("aof_enabled"):
        return True
    try:
        return bool((await client.config_get("save")).get("save"))
    except Exception:
        return None  # managed servers forbid this command


def _unreachable(facts: RedisFacts) -> Finding:
    text, what = facts.problem.lower(), f"{facts.name}: {facts.problem}"
    if "not installed" in text:
        return unknown(_TOPIC, what)
    if any(word in text for word in ("auth", "noperm", "wrongpass", "password")):
        return failed(
            _TOPIC, what, "the password in --redis-url (redis://:PASSWORD@HOST:PORT/0), or the Secret it is from"
        )
    if "ssl" in text or "protocol error" in text:
        return failed(_TOPIC, what, "rediss:// where Redis speaks TLS, redis:// where it does not")
    return failed(_TOPIC, what, "redis-cli -u URL ping from here; a NetworkPolicy or firewall may be in between")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0,)
