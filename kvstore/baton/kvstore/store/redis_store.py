"""The index in Redis: for each worker a snapshot and the log of batches after it. Does not queue and does not retry.

Keys, with the configured namespace `ns`; in a cluster the part in braces chooses the hash slot:
    ns:{ns}:workers                                 set of worker ids
    ns:{ns}:replicas                                set of replica ids
    ns:{ns}:replica:<id>                            a replica's address, which expires unless renewed
    ns:{ns/worker}:head                             hash: epoch, generation, parts
    ns:{ns/worker}:<epoch>:<generation>:snapshot    list of encoded KvSnapshot
    ns:{ns/worker}:<epoch>:<generation>:log         list: a mark, then encoded KvEventBatches
Every snapshot is written under a new generation, and one command makes that the current one. So a reader finds the old
or the new snapshot, never a mixture. If two replicas write one worker, the last wins and the other notices, because its
log was dropped and takes no batches. Keys expire after a week without use; nothing scans for them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from baton.kvstore.store.redis_connection import RedisConnection
from baton.kvstore.store.store import StoredWorker, StoreError
from baton.v1 import kv_pb2

_RETENTION_SECONDS = 7 * 24 * 3600
_TOUCH_SECONDS = 3600
_REPLICA_MS = 5000
_PARTS_PER_CALL = 8  # of at most 128 KiB
_BATCHES_PER_COMMAND = 1024
_MARK = b"log"


@dataclass(slots=True)
class _Head:
    """A worker's keys, as this process wrote them last."""

    epoch: int
    generation: str
    log_length: int = 1  # the mark


class RedisStore:
    """A Store and a ReplicaDirectory."""

    def __init__(self, url: str, namespace: str, timeout_seconds: float) -> None:
        self._redis = RedisConnection(url, timeout_seconds)
        self._namespace = namespace
        self._heads: dict[str, _Head] = {}
        self._touched = time.monotonic()

    @property
    def name(self) -> str:
        """The URL, without a password."""
        return self._redis.name

    async def check(self) -> Collection[str]:
        """Compares the length of every log with what was written."""
        heads = dict(self._heads)
        if not heads:
            return ()
        touch = time.monotonic() - self._touched > _TOUCH_SECONDS
        async with self._redis.pipeline() as pipeline:
            pipeline.sadd(self._shared_key("workers"), *heads)
            for worker_id, head in heads.items():
                pipeline.llen(self._generation_key(worker_id, head, "log"))
            if touch:
                for worker_id, head in heads.items():
                    self._touch(pipeline, worker_id, head)
            lengths = (await pipeline.execute())[1 : len(heads) + 1]
        if touch:
            self._touched = time.monotonic()
        wrong = [
            worker_id
            for (worker_id, head), length in zip(heads.items(), lengths, strict=True)
            if head.log_length != length and self._heads.get(worker_id) is head
        ]
        for worker_id in wrong:
            del self._heads[worker_id]
        return wrong

    async def load(self) -> AsyncIterator[StoredWorker]:
        """Yields every worker with a complete snapshot."""
        async with self._redis.pipeline() as pipeline:
            pipeline.smembers(self._shared_key("workers"))
            (worker_ids,) = await pipeline.execute()
        for worker_id in sorted(worker_ids):
            stored = await self._load_worker(worker_id.decode())
            if stored is not None:
                yield stored

    async def write(self, worker_id: str, epoch: int, parts: Sequence[bytes]) -> None:
        """Writes a new generation, then makes it the current one."""
        head = _Head(epoch, secrets.token_hex(4))
        snapshot, log = (self._generation_key(worker_id, head, part) for part in ("snapshot", "log"))
        self._heads.pop(worker_id, None)
        for start in range(0, len(parts), _PARTS_PER_CALL):
            async with self._redis.pipeline() as pipeline:
                pipeline.rpush(snapshot, *parts[start : start + _PARTS_PER_CALL])
                pipeline.expire(snapshot, _RETENTION_SECONDS)
                await pipeline.execute()
        key = self._worker_key(worker_id, "head")
        async with self._redis.pipeline() as pipeline:
            pipeline.rpush(log, _MARK)
            pipeline.expire(log, _RETENTION_SECONDS)
            pipeline.hgetall(key)
            *_, old = await pipeline.execute()
        async with self._redis.pipeline() as pipeline:
            pipeline.hset(key, mapping={"epoch": epoch, "generation": head.generation, "parts": len(parts)})
            pipeline.expire(key, _RETENTION_SECONDS)
            if old:
                self._drop(pipeline, worker_id, _head_of(old))
            pipeline.sadd(self._shared_key("workers"), worker_id)
            await pipeline.execute()
        self._heads[worker_id] = head

    async def append(self, batches: Mapping[str, Sequence[bytes]]) -> Collection[str]:
        """Appends to all logs in one round trip."""
        missing = {worker_id for worker_id in batches if worker_id not in self._heads}
        expected: list[tuple[int, str]] = []  # the log's length after each command, worker
        async with self._redis.pipeline() as pipeline:
            for worker_id, encoded in batches.items():
                head = self._heads.get(worker_id)
                if head is None:
                    continue
                for start in range(0, len(encoded), _BATCHES_PER_COMMAND):
                    chunk = encoded[start : start + _BATCHES_PER_COMMAND]
                    head.log_length += len(chunk)
                    expected.append((head.log_length, worker_id))
                    pipeline.rpushx(self._generation_key(worker_id, head, "log"), *chunk)
            answers = await pipeline.execute() if expected else ()
        wrong = {worker_id for (length, worker_id), answer in zip(expected, answers, strict=True) if answer != length}
        for worker_id in wrong:
            self._heads.pop(worker_id, None)
        return missing | wrong

    async def forget(self, worker_id: str) -> None:
        """Removes a worker's keys."""
        head = self._heads.pop(worker_id, None)
        key = self._worker_key(worker_id, "head")
        async with self._redis.pipeline() as pipeline:
            pipeline.hgetall(key)
            (current,) = await pipeline.execute()
        is_ours = head is not None and current and _head_of(current).generation == head.generation
        async with self._redis.pipeline() as pipeline:
            if is_ours or not current:
                pipeline.srem(self._shared_key("workers"), worker_id)
            if is_ours:
                pipeline.delete(key)
            if head is not None:
                self._drop(pipeline, worker_id, head)
            if len(pipeline):
                await pipeline.execute()

    def disown(self, worker_id: str) -> None:
        """Stops writing the worker: another replica writes it."""
        self._heads.pop(worker_id, None)

    async def announce(self, replica: str, address: str) -> dict[str, str]:
        """Renews this replica's address and returns those of all replicas."""
        async with self._redis.pipeline() as pipeline:
            pipeline.set(self._shared_key("replica", replica), address, px=_REPLICA_MS)
            pipeline.sadd(self._shared_key("replicas"), replica)
            pipeline.smembers(self._shared_key("replicas"))
            *_, members = await pipeline.execute()
        replicas = [member.decode() for member in members]
        async with self._redis.pipeline() as pipeline:
            for one in replicas:
                pipeline.get(self._shared_key("replica", one))
            addresses = await pipeline.execute()
        gone = [one for one, found in zip(replicas, addresses, strict=True) if found is None]
        if gone:
            async with self._redis.pipeline() as pipeline:
                pipeline.srem(self._shared_key("replicas"), *gone)
                await pipeline.execute()
        return {one: found.decode() for one, found in zip(replicas, addresses, strict=True) if found is not None}

    async def withdraw(self, replica: str) -> None:
        """Removes this replica's address."""
        async with self._redis.pipeline() as pipeline:
            pipeline.delete(self._shared_key("replica", replica))
            pipeline.srem(self._shared_key("replicas"), replica)
            await pipeline.execute()

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    async def _load_worker(self, worker_id: str) -> StoredWorker | None:
        async with self._redis.pipeline() as pipeline:
            pipeline.hgetall(self._worker_key(worker_id, "head"))
            (fields,) = await pipeline.execute()
        if not fields:
            return None
        head = _head_of(fields)
        async with self._redis.pipeline() as pipeline:
            pipeline.lrange(self._generation_key(worker_id, head, "snapshot"), 0, -1)
            pipeline.lrange(self._generation_key(worker_id, head, "log"), 0, -1)
            parts, log = await pipeline.execute()
        if len(parts) != int(fields[b"parts"]) or not log:
            return None
        head.log_length = len(log)
        self._heads[worker_id] = head
        try:
            return StoredWorker([kv_pb2.KvSnapshot.FromString(part) for part in parts], log[1:])
        except DecodeError as error:
            raise StoreError("other", f"{self.name}: cannot decode the snapshot of worker {worker_id}") from error

    def _touch(self, pipeline: Any, worker_id: str, head: _Head) -> None:
        """Keeps a live worker's keys from expiring."""
        pipeline.expire(self._worker_key(worker_id, "head"), _RETENTION_SECONDS)
        for part in ("snapshot", "log"):
            pipeline.expire(self._generation_key(worker_id, head, part), _RETENTION_SECONDS)

    def _drop(self, pipeline: Any, worker_id: str, head: _Head) -> None:
        for part in ("snapshot", "log"):
            pipeline.unlink(self._generation_key(worker_id, head, part))

    def _generation_key(self, worker_id: str, head: _Head, part: str) -> str:
        return self._worker_key(worker_id, f"{head.epoch}:{head.generation}:{part}")

    def _worker_key(self, worker_id: str, rest: str) -> str:
        return f"{self._namespace}:{{{self._namespace}/{worker_id}}}:{rest}"

    def _shared_key(self, *words: str) -> str:
        return ":".join((self._namespace, f"{{{self._namespace}}}", *words))


def _head_of(fields: Mapping[bytes, bytes]) -> _Head:
    return _Head(int(fields[b"epoch"]), fields[b"generation"].decode())
