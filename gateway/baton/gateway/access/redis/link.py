"""One connection to one Redis for short commands: pipelined in order, each with a deadline, failing fast when lost.

redis-py costs 0.1 ms of CPU per command, more than the rest of access control. Here commands of one loop iteration
share a write, and hiredis parses the replies. While Redis does not answer, `up` is False and no command should be sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

from baton.rpc.errors import InvalidRequest

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.25
# Consecutive timeouts after which the connection is closed.
_MAX_MISSED = 3

Answer = Any  # a RESP2 reply: int, bytes, None, list, or hiredis.ReplyError


class LinkDown(Exception):
    """Redis is unreachable, or the connection was lost before the reply."""


class RedisLink(asyncio.Protocol):
    """Keeps a connection for the lifetime of an `async with`. Each new connection begins with the `greetings`.

    `address` replaces the address of the URL.
    """

    def __init__(
        self,
        url: str,
        timeout_seconds: float,
        greetings: Sequence[tuple[str, ...]] = (),
        address: tuple[str, int] | None = None,
    ) -> None:
        try:
            self._where: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise InvalidRequest(f"redis_url is not allowed: {error}", field="redis_url") from error
        if address is not None:
            self._where.update(host=address[0], port=address[1])
        self._timeout = timeout_seconds
        self._greetings = greetings
        self.up = False
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._pending: deque[tuple[float, asyncio.Future[Answer]]] = deque()  # deadline and reply, in order
        self._timer: asyncio.TimerHandle | None = None
        self._missed = 0
        self._lost = asyncio.Event()
        self._problem = ""

    async def __aenter__(self) -> RedisLink:
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(*_FAILURES):
            await self._connect()
        self._keeper = self._loop.create_task(self._keep())
        return self

    @property
    def host(self) -> str:
        """Returns the host that it connects to."""
        return str(self._where.get("host", "localhost"))

    async def __aexit__(self, *_: object) -> None:
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        if pending := [answer for _, answer in self._pending if not answer.done()]:
            await asyncio.wait(pending, timeout=self._timeout)
        self.up = False
        self._drop("the gateway is shutting down")

    def execute(self, *words: str | bytes | int) -> asyncio.Future[Answer]:
        """Sends a command.

        The future gets the reply, which may be an error reply, or raises LinkDown or TimeoutError.
        """
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if self._transport is None:
            answer.set_exception(LinkDown("Redis is unreachable"))
            return answer
        self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]
        deadline = self._loop.time() + self._timeout
        self._pending.append((deadline, answer))
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_deadlines)
        return answer

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not _NOTHING:
                if not self._pending:
                    raise hiredis.ProtocolError("unexpected reply")
                _, future = self._pending.popleft()
                self._missed = 0
                if not future.done():
                    future.set_result(answer)
        except hiredis.ProtocolError as error:
            self._drop(f"invalid Redis protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._drop(f"connection lost: {error or 'closed'}")

    def _check_deadlines(self) -> None:
        self._timer = None
        now = self._loop.time()
        for deadline, answer in self._pending:
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._check_deadlines)
                break
            if not answer.done():
                self._missed += 1
                answer.set_exception(TimeoutError(f"Redis did not answer within {self._timeout * 1000:.0f} ms"))
                answer.exception()  # marks it as retrieved if it is not awaited
        if self._missed >= _MAX_MISSED:
            self._drop(f"{self._missed} consecutive commands had no reply within {self._timeout * 1000:.0f} ms")

    def _drop(self, why: str) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if self.up:
            _log.error("the Redis of limits is unreachable; this gateway enforces its share of them: %s", why)
        self.up = False
        self._problem = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport.abort()
        pending, self._pending = self._pending, deque()
        for _, answer in pending:
            if not answer.done():
                answer.set_exception(LinkDown(why))
                answer.exception()
        self._lost.set()

    async def _keep(self) -> None:
        while True:
            if self.up:
                await self._lost.wait()
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                await self._connect()
            except _FAILURES as error:
                self._log_once(str(error) or type(error).__name__)
            except Exception:
                _log.exception("cannot connect to the Redis of limits")

    def _log_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.warning("cannot connect to the Redis of limits: %s", problem)

    async def _connect(self) -> None:
        """Connects. Sets `up` only after a reply within the timeout."""
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._missed = 0
        self._lost.clear()
        await _within(_CONNECT_SECONDS, self._open())
        try:
            where = self._where
            if where.get("password"):
                user = (where["username"],) if where.get("username") else ()
                _must_be_fine(await self.execute("AUTH", *user, where["password"]))
            if where.get("db"):
                _must_be_fine(await self.execute("SELECT", where["db"]))
            for greeting in self._greetings:
                await self.execute(*greeting)
            _must_be_fine(await self.execute("PING"))
        except BaseException as error:
            self._drop(str(error) or type(error).__name__)
            raise
        self.up = self._transport is not None
        if self._problem:
            _log.warning("reconnected to the Redis of limits")
            self._problem = ""

    async def _open(self) -> None:
        where = self._where
        if where.get("path"):
            await self._loop.create_unix_connection(lambda: self, where["path"])
            return
        host, port = where.get("host", "localhost"), int(where.get("port", 6379))
        tls = None
        if where.get("connection_class") is SSLConnection:
            options = {name: value for name, value in where.items() if name.startswith("ssl_")}
            tls = SSLConnection(host=host, **options).ssl_context.get()
        await self._loop.create_connection(lambda: self, host, port, ssl=tls)


_NOTHING = object()
_FAILURES = (OSError, TimeoutError, LinkDown, hiredis.ReplyError)


async def _within(seconds: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await work


def _must_be_fine(answer: Answer) -> None:
    if isinstance(answer, Exception):
        raise answer
