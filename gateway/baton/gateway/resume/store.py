"""Streams in Redis, kept for a minute after their last token and written in batches several times per second.

A stream whose record Redis lost or may hold twice is written again as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from baton.gateway.resume.journal import Journal, StreamHead, check_positions, tokens_of
from baton.gateway.resume.position import ChoicePosition, Cursor
from baton.rpc.errors import InvalidRequest, NotFound, Unavailable

_log = logging.getLogger(__name__)

_PREFIX = "baton:streams:"
_KEEP_SECONDS = 60
_WRITE_SECONDS = 0.1
_RENEW_SECONDS = 20.0
_TIMEOUT_SECONDS = 2.0
_RETRY_SECONDS = 0.5


class _Taken(NamedTuple):
    journal: Journal
    num_entries: int
    is_new: bool
    commands: slice  # of the pipeline


class StreamStore:
    """Writes the streams of this gateway and reads those of others, for the lifetime of an `async with`."""

    def __init__(self, url: str, write_seconds: float = _WRITE_SECONDS) -> None:
        self._write_seconds = write_seconds
        self._open: dict[Journal, float] = {}  # time of the last write
        self._pending: dict[Journal, None] = {}
        self._new: dict[Journal, None] = {}  # to be written as a whole
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._closing = False
        try:
            self._redis = redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS)
        except ValueError as error:
            raise InvalidRequest(f"redis_url: {url!r} is not allowed; {error}", field="redis_url") from error

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True  # the client of Redis may lose the cancellation
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait((self._writer,))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._write()
        await self._redis.aclose()

    def begin(self, head: StreamHead) -> Journal:
        """Starts the journal of a new stream. Replaces an earlier one with the same tenant and request id."""
        nothing = tuple(ChoicePosition() for _ in range(head.num_choices))
        known: tuple[tuple[int, ...], ...] = tuple(() for _ in range(head.num_choices))
        journal = Journal(head, Cursor(nothing), nothing, known, self._on_change)
        self._new[journal] = None
        self._open[journal] = time.monotonic()
        self._on_change(journal)
        return journal

    async def resume(
        self, tenant: str, request_id: str, path: str, positions: Sequence[ChoicePosition] | None, field: str
    ) -> Journal:
        """Returns the journal of another gateway's stream. `positions` is None if the client has received nothing.

        Raises NotFound for a stream that is unknown or belongs to another tenant or route, InvalidRequest for an
        invalid position, and Unavailable if Redis does not answer.
        """
        name = _name_of(tenant, request_id)
        reads: Any = self._redis.pipeline(transaction=False)
        try:
            data, entries = await reads.get(name).lrange(f"{name}:log", 0, -1).execute()
        except (RedisError, OSError, TimeoutError) as error:
            _log.warning("cannot read streams from Redis: %s", error)
            raise Unavailable("cannot read stored streams; retry later", retry_after_ms=1000) from error
        head = msgspec.msgpack.decode(data, type=StreamHead) if data else None
        if head is None or head.path != path:
            raise NotFound(
                f"there is no stream {request_id!r} to resume; it is kept for {_KEEP_SECONDS} s after its last token",
                field=field,
            )
        known = tokens_of(entries, head.num_choices)
        given = tuple(ChoicePosition() for _ in range(head.num_choices)) if positions is None else tuple(positions)
        check_positions(head, given, field)
        journal = Journal(head, Cursor(given), given, known, self._on_change, field)
        self._open[journal] = 0.0
        return journal

    def _on_change(self, journal: Journal) -> None:
        if journal in self._open:
            self._pending[journal] = None
            self._wake.set()

    async def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RENEW_SECONDS / 2):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("cannot write streams to Redis: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                self._wake.set()
            await asyncio.sleep(self._write_seconds)

    async def _write(self) -> None:
        """Writes all pending entries in one round trip. Failed ones are retried; raises the first failure."""
        now = time.monotonic()
        due = {journal: None for journal, at in self._open.items() if now - at > _RENEW_SECONDS}
        pipeline: Any = self._redis.pipeline(transaction=False)
        taken: list[_Taken] = []
        for journal in self._pending | due:
            first = len(pipeline)
            self._add(pipeline, journal)
            taken.append(_Taken(journal, len(journal.unwritten), journal in self._new, slice(first, len(pipeline))))
        if not taken:
            return
        try:
            answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, TimeoutError):
            for one in taken:  # Redis may have received part of it before the connection failed
                if one.num_entries:
                    self._begin_anew(one.journal)
            raise
        failures = [self._settle(one, answers[one.commands], now) for one in taken]
        for failure in failures:
            if failure is not None:
                raise failure

    def _add(self, pipeline: Any, journal: Journal) -> None:
        """Adds the commands that write one journal. The first reply is false if Redis lost the journal."""
        name = _name_of(journal.head.tenant, journal.head.request_id)
        if journal in self._new:
            pipeline.set(name, msgspec.msgpack.encode(asdict(journal.head)), ex=_KEEP_SECONDS)
            pipeline.delete(f"{name}:log")
        else:
            pipeline.expire(name, _KEEP_SECONDS)
        if journal.unwritten:
            pipeline.rpush(f"{name}:log", b"".join(journal.unwritten))
        pipeline.expire(f"{name}:log", _KEEP_SECONDS)

    def _settle(self, taken: _Taken, answers: Sequence[Any], now: float) -> Exception | None:
        """Applies the replies for one journal. Returns its failure, if any."""
        journal = taken.journal
        failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
        # A journal that is only renewed waits for its next token, because its stream may run at another gateway now.
        lost = not answers[0] and taken.num_entries > 0
        if lost:
            self._begin_anew(journal)
        if lost or failure is not None:
            return failure
        del journal.unwritten[: taken.num_entries]
        if taken.is_new:
            self._new.pop(journal, None)
        if journal in self._open:
            self._open[journal] = now
        if not journal.unwritten:
            self._pending.pop(journal, None)
            if journal.ended:
                self._open.pop(journal, None)
        return None

    def _begin_anew(self, journal: Journal) -> None:
        journal.begin_anew()
        self._new[journal] = None
        self._pending[journal] = None
        self._wake.set()


def _name_of(tenant: str, request_id: str) -> str:
    digest = blake2b(f"{len(tenant)}:{tenant}{request_id}".encode(), digest_size=16).hexdigest()
    return f"{_PREFIX}{digest}"
