"""The consoles' stream: one snapshot for all watchers, none without watchers, and an end without access."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from support.gateway.rest_harness import RawClient, until
from support.gateway.scripted_gateway import running

from baton.gateway.console.broadcast import Broadcast
from baton.gateway.console.routes import PAGE, SHARED
from baton.gateway.http.exchange import Exchange
from baton.rpc.errors import NoCapacity, PermissionDenied


class Wire:
    """What a client got."""

    closing = False
    client = ""

    def __init__(self) -> None:
        self.writable = True
        self.data = b""
        self.has_ended = False

    def send(self, data: bytes) -> None:
        self.data += data

    def exchange_ended(self, exchange: Exchange, keep_alive: bool) -> None:
        self.has_ended = True

    def watch_disconnect(self) -> None:
        """Nothing came meanwhile."""


class Rig:
    """A broadcast without a clock to wait for."""

    def __init__(self, **settings: Any) -> None:
        self.num_made = 0
        self.closing = False
        self.failure: Exception | None = None
        self.banned: set[Exchange] = set()
        self.broadcast = Broadcast(self._make, self._check, lambda: self.closing, 0.001, **settings)

    def watcher(self) -> tuple[Exchange, Wire]:
        wire = Wire()
        exchange = Exchange(wire, "GET", b"/console/stream", "1.1", {})
        self.broadcast.watch(exchange)
        return exchange, wire

    async def _make(self) -> bytes:
        if self.failure is not None:
            raise self.failure
        self.num_made += 1
        return b'{"number":%d}' % self.num_made

    def _check(self, exchange: Exchange) -> None:
        if exchange in self.banned:
            raise PermissionDenied("the key was revoked")


async def test_all_watchers_get_the_same_event_and_without_watchers_none_is_made():
    rig = Rig()
    await asyncio.sleep(0.01)
    assert rig.num_made == 0
    (first, one), (_, two) = rig.watcher(), rig.watcher()
    await until(lambda: rig.num_made >= 3)
    events = [wire.data.count(b'{"number":2}') for wire in (one, two)]
    assert events == [1, 1]
    first.disconnected()
    assert len(rig.broadcast) == 1


async def test_when_the_last_one_leaves_nothing_is_made_and_the_next_one_starts_it_again():
    rig = Rig()
    exchange, _ = rig.watcher()
    await until(lambda: rig.num_made >= 2)
    exchange.disconnected()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await until(lambda: all(task.done() for task in tasks))
    made = rig.num_made
    await asyncio.sleep(0.01)
    assert rig.num_made == made
    _, wire = rig.watcher()
    await until(lambda: b"data: " in wire.data)


async def test_a_watcher_whose_key_was_revoked_gets_no_more_events():
    rig = Rig()
    (banned, one), (_, two) = rig.watcher(), rig.watcher()
    await until(lambda: rig.num_made >= 2)
    rig.banned.add(banned)
    await until(lambda: one.has_ended)
    seen = one.data
    before = rig.num_made
    await until(lambda: rig.num_made > before + 2)
    assert one.data == seen
    assert not two.has_ended


async def test_a_slow_watcher_misses_events_and_delays_no_other():
    rig = Rig()
    (_, one), (_, two) = rig.watcher(), rig.watcher()
    one.writable = False
    await until(lambda: two.data.count(b"data: ") >= 3)
    assert b"data: " not in one.data
    one.writable = True
    await until(lambda: b"data: " in one.data)


async def test_streams_end_when_the_gateway_shuts_down_or_the_snapshot_cannot_be_made():
    for fail in (False, True):
        rig = Rig()
        _, wire = rig.watcher()
        await until(lambda rig=rig: rig.num_made)
        if fail:
            rig.failure = RuntimeError("no")
        else:
            rig.closing = True
        await until(lambda wire=wire: wire.has_ended)
        assert wire.data.endswith(b"0\r\n\r\n")
        assert len(rig.broadcast) == 0


async def test_there_is_a_bound_to_how_many_watch():
    rig = Rig(max_watchers=2)
    rig.watcher()
    rig.watcher()
    with pytest.raises(NoCapacity, match="2 consoles"):
        rig.watcher()
    assert len(rig.broadcast) == 2


@contextlib.asynccontextmanager
async def streaming(port: int, headers: dict[str, str] | None = None):
    """Status and client of a stream that was asked for."""
    async with RawClient.connect(port) as client:
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        await client.send(f"GET /console/stream HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n".encode())
        status, head = await client.head()
        yield SimpleNamespace(status=status, headers=head, client=client)


async def test_without_keys_on_loopback_the_stream_is_open_but_not_to_other_pages():
    async with running(lambda submit: [5]) as gateway:
        async with streaming(gateway.port) as stream:
            assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            assert stream.headers["cache-control"] == "no-cache"
            async with asyncio.timeout(10):
                text = b""
                while b'"routers"' not in text:
                    text += await stream.client.chunk()
            # This router is of a release that knows no GetFleet.
            assert b"UNIMPLEMENTED" in text
        async with streaming(gateway.port, {"origin": "https://elsewhere.example"}) as stream:
            assert stream.status == 403


async def test_a_gateway_with_a_console_open_shuts_down_at_once():
    async with running(lambda submit: [5], drain_timeout=60.0) as gateway, streaming(gateway.port) as stream:
        gateway.stop.set()
        async with asyncio.timeout(40):  # well before drain_timeout
            await gateway.service
        assert stream.status == 200


async def test_every_file_is_served_with_its_policy_and_the_page_can_be_loaded():
    async with running(lambda submit: [5], ready=False) as gateway:
        for name in [*(path.name for path in PAGE.iterdir() if path.name != "index.html"), *SHARED]:
            answer = await answered(gateway, f"/console/{name}")
            assert answer.status == 200, name
            assert "require-trusted-types-for 'script'" in answer.headers["content-security-policy"]
        page = await answered(gateway, "/console")
        assert page.headers["content-type"].startswith("text/html")
        missing = await answered(gateway, "/console/../config.py")
        assert (missing.status, missing.error["param"]) == (404, "file")


async def answered(gateway, path):
    """The answer, once the gateway listens."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            return await gateway.get(path)
        await asyncio.sleep(0.02)
    raise AssertionError("the gateway does not listen")


async def test_it_can_be_switched_off():
    async with running(lambda submit: [5], no_console=True) as gateway:
        for path in ("/console", "/console/stream", "/console/main.js"):
            assert (await gateway.get(path)).status == 404
