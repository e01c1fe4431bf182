"""A connection to Redis, a single server or a cluster. Detects which, and translates errors to StoreErrors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis.asyncio
from redis import exceptions as redis_errors
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from baton.kvstore.store.store import StoreError

_CONNECTIONS = 4


class RedisConnection:
    """Reconnects by itself. A failed call raises within its timeout."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.name = _without_password(url)
        self._url = url
        self._timeouts = {"socket_timeout": timeout_seconds, "socket_connect_timeout": timeout_seconds}
        self._single: Any = redis.asyncio.from_url(
            url, retry=Retry(NoBackoff(), 0), protocol=2, max_connections=_CONNECTIONS, **self._timeouts
        )
        self._client: Any = None
        self.is_cluster = False

    @contextlib.asynccontextmanager
    async def pipeline(self) -> Any:
        """Yields a pipeline without a transaction. Raises StoreError if any of its commands failed."""
        with translated(self.name):
            try:
                yield (await self._connected()).pipeline(transaction=False)
            except redis_errors.ReadOnlyError:
                # The server became a replica: the next connection may reach the new master.
                await self._forget_connections()
                raise

    async def close(self) -> None:
        """Closes the connections. Never raises."""
        for client in {id(one): one for one in (self._client, self._single) if one is not None}.values():
            with contextlib.suppress(redis_errors.RedisError, OSError):
                await client.aclose()

    async def _connected(self) -> Any:
        if self._client is None:
            facts = await self._single.info("cluster")
            self.is_cluster = bool(facts.get("cluster_enabled"))
            self._client = self._cluster() if self.is_cluster else self._single
        return self._client

    def _cluster(self) -> Any:
        return RedisCluster.from_url(
            self._url, protocol=2, max_connections=_CONNECTIONS, retry=Retry(NoBackoff(), 1), **self._timeouts
        )

    async def _forget_connections(self) -> None:
        if self.is_cluster:
            await self._client.aclose()
        else:
            await self._single.connection_pool.disconnect()


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Raises Redis's errors as StoreErrors."""
    try:
        yield
    except redis_errors.OutOfMemoryError as error:
        raise StoreError("full", f"{name} is full: {_brief(error)}") from error
    except redis_errors.ReadOnlyError as error:
        raise StoreError("read-only", f"{name} is a read-only replica: {_brief(error)}") from error
    except (redis_errors.TimeoutError, TimeoutError) as error:
        raise StoreError("slow", f"{name} did not answer in time") from error
    except (redis_errors.ConnectionError, redis_errors.ClusterError, OSError) as error:
        raise StoreError("unreachable", f"{name} cannot be reached: {_brief(error)}") from error
    except redis_errors.RedisError as error:
        raise StoreError("other", f"{name}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """Returns the cause: the client's messages about pipelines begin with the command and its data."""
    return str(error).rpartition("caused error: ")[2][:200]


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
