"""The index in Redis: for each worker a snapshot and the log of batches after it. Knows no queue and no retry.

Keys, `ns` being the configured namespace; a worker's keys share its hash slot in a cluster:
    ns:marker                                    set once; another value means that Redis was wiped
    ns:workers                                   set of worker ids
    ns:{worker}:head                             hash: epoch, barrier, generation, parts
    ns:{worker}:<epoch>:<generation>:snapshot    list of encoded KvSnapshot
    ns:{worker}:<epoch>:<generation>:log         list of encoded KvEventBatch
Every write of a snapshot takes a new generation, so that a reader finds the old or the new one, never a mixture.
What nobody touches for a week expires by itself; nothing is ever scanned.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from google.protobuf.message import DecodeError
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from baton.kvstore.store import StoredWorker, StoreError
from baton.v1 import kv_pb2

_RETENTION_SECONDS = 7 * 24 * 3600
_PARTS_PER_COMMAND = 8  # of at most 64 KiB
_BATCHES_PER_COMMAND = 1024
_MIN_LOG_BYTES = 1 << 20


@dataclass(slots=True)
class _Head:
    """What this process knows of a worker's keys."""

    epoch: int
    generation: str
    snapshot_bytes: int
    log_length: int = 0
    log_bytes: int = 0

    @property
    def is_log_long(self) -> bool:
        return self.log_bytes > max(_MIN_LOG_BYTES, 2 * self.snapshot_bytes)


class RedisStore:
    """A Store. The client reconnects by itself; a failure costs one call, never a wait beyond its time limit."""

    def __init__(self, url: str, namespace: str, timeout_seconds: float) -> None:
        self.name = _without_password(url)
        self._namespace = namespace
        self._redis: Any = redis.asyncio.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            max_connections=2,
        )
        self._marker = b""
        self._heads: dict[str, _Head] = {}

    async def check(self) -> bool:
        """Whether this is the Redis that was written to, with its content."""
        with _translated(self.name):
            marker = await self._read_marker()
        is_same = marker == self._marker
        if not is_same:
            self._heads.clear()
            self._marker = marker
        return is_same

    async def load(self) -> AsyncIterator[StoredWorker]:
        """Every worker that has a whole snapshot."""
        with _translated(self.name):
            self._marker = await self._read_marker()
            worker_ids = sorted(await self._redis.smembers(self._key("workers")))
        for worker_id in worker_ids:
            with _translated(self.name):
                stored = await self._load_worker(worker_id.decode())
            if stored is not None:
                yield stored

    async def write(self, worker_id: str, snapshot: Sequence[kv_pb2.KvSnapshot]) -> None:
        """Writes a new generation, then makes it the current one in one transaction."""
        epoch, barrier = snapshot[0].epoch, snapshot[0].barrier
        generation = secrets.token_hex(4)
        parts = [part.SerializeToString() for part in snapshot]
        key = self._generation_key(worker_id, epoch, generation, "snapshot")
        with _translated(self.name):
            for start in range(0, len(parts), _PARTS_PER_COMMAND):
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.rpush(key, *parts[start : start + _PARTS_PER_COMMAND])
                pipeline.expire(key, _RETENTION_SECONDS)
                await pipeline.execute()
            await self._make_current(worker_id, epoch, barrier, generation, len(parts))
        self._heads[worker_id] = _Head(epoch, generation, sum(map(len, parts)))

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Appends to all logs in one round trip; a log of unexpected length is one that Redis lost or another wrote."""
        wanting = {worker_id for worker_id in batches if worker_id not in self._heads}
        expected: list[tuple[int, int, str]] = []  # place in the pipeline, the log's length then, worker
        pipeline = self._redis.pipeline(transaction=False)
        for worker_id, encoded in batches.items():
            head = self._heads.get(worker_id)
            if head is None:
                continue
            for start in range(0, len(encoded), _BATCHES_PER_COMMAND):
                chunk = encoded[start : start + _BATCHES_PER_COMMAND]
                head.log_length += len(chunk)
                head.log_bytes += sum(map(len, chunk))
                expected.append((len(pipeline), head.log_length, worker_id))
                pipeline.rpush(self._generation_key(worker_id, head.epoch, head.generation, "log"), *chunk)
            self._touch(pipeline, worker_id, head)
            if head.is_log_long:
                wanting.add(worker_id)
        with _translated(self.name):
            answers = await pipeline.execute()
        return wanting | {worker_id for place, length, worker_id in expected if answers[place] != length}

    async def forget(self, worker_id: str) -> None:
        """Removes a worker's keys."""
        with _translated(self.name):
            old = await self._redis.hgetall(self._key(worker_id, "head"))
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.srem(self._key("workers"), worker_id)
            pipeline.delete(self._key(worker_id, "head"))
            self._drop_generation(pipeline, worker_id, old)
            await pipeline.execute()
        self._heads.pop(worker_id, None)

    async def close(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(redis_errors.RedisError, OSError):
            await self._redis.aclose()

    async def _read_marker(self) -> bytes:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.setnx(self._key("marker"), secrets.token_hex(8))
        pipeline.get(self._key("marker"))
        _, marker = await pipeline.execute()
        return bytes(marker)

    async def _make_current(self, worker_id: str, epoch: int, barrier: int, generation: str, num_parts: int) -> None:
        head = self._key(worker_id, "head")
        old = await self._redis.hgetall(head)
        pipeline = self._redis.pipeline(transaction=True)
        fields = {"epoch": epoch, "barrier": barrier, "generation": generation, "parts": num_parts}
        pipeline.hset(head, mapping=fields)
        pipeline.expire(head, _RETENTION_SECONDS)
        self._drop_generation(pipeline, worker_id, old)
        await pipeline.execute()
        await self._redis.sadd(self._key("workers"), worker_id)

    async def _load_worker(self, worker_id: str) -> StoredWorker | None:
        fields = await self._redis.hgetall(self._key(worker_id, "head"))
        if not fields:
            return None
        epoch, generation = int(fields[b"epoch"]), fields[b"generation"].decode()
        parts = await self._redis.lrange(self._generation_key(worker_id, epoch, generation, "snapshot"), 0, -1)
        log = await self._redis.lrange(self._generation_key(worker_id, epoch, generation, "log"), 0, -1)
        if len(parts) != int(fields[b"parts"]):
            return None
        self._heads[worker_id] = _Head(epoch, generation, sum(map(len, parts)), len(log), sum(map(len, log)))
        try:
            return StoredWorker(
                [kv_pb2.KvSnapshot.FromString(part) for part in parts],
                [kv_pb2.KvEventBatch.FromString(batch) for batch in log],
            )
        except DecodeError as error:
            raise StoreError("other", f"{self.name}: what is kept of worker {worker_id} cannot be read") from error

    def _touch(self, pipeline: Any, worker_id: str, head: _Head) -> None:
        """Keeps a live worker's keys from expiring."""
        pipeline.expire(self._key(worker_id, "head"), _RETENTION_SECONDS)
        for part in ("snapshot", "log"):
            pipeline.expire(self._generation_key(worker_id, head.epoch, head.generation, part), _RETENTION_SECONDS)

    def _drop_generation(self, pipeline: Any, worker_id: str, fields: Mapping[bytes, bytes]) -> None:
        if fields:
            epoch, generation = int(fields[b"epoch"]), fields[b"generation"].decode()
            for part in ("snapshot", "log"):
                pipeline.unlink(self._generation_key(worker_id, epoch, generation, part))

    def _generation_key(self, worker_id: str, epoch: int, generation: str, part: str) -> str:
        return self._key(worker_id, f"{epoch}:{generation}:{part}")

    def _key(self, *words: str) -> str:
        if len(words) == 1:
            return f"{self._namespace}:{words[0]}"
        return f"{self._namespace}:{{{words[0]}}}:{words[1]}"


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Redis's errors as StoreErrors."""
    try:
        yield
    except redis_errors.OutOfMemoryError as error:
        raise StoreError("full", f"{name} is full: {error}") from error
    except (redis_errors.TimeoutError, TimeoutError) as error:
        raise StoreError("slow", f"{name} did not answer in time") from error
    except (redis_errors.ConnectionError, OSError) as error:
        raise StoreError("unreachable", f"{name} cannot be reached: {error}") from error
    except redis_errors.RedisError as error:
        raise StoreError("other", f"{name}: {error}") from error


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
