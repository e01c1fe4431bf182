"""Connections of several clients: none waits for another's earlier data."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from support.gateway.rest_harness import RawClient, request_bytes, until

from baton.gateway.http.connection import HttpConnection
from baton.gateway.http.intake import Intake, network_of
from baton.gateway.http.server import HttpServer

TINY_CHUNKS = b"1\r\na\r\n" * 60_000


class Recorder:
    """An app that answers at once and notes whose requests came in which order."""

    def __init__(self):
        self.seen = []

    def __call__(self, exchange):
        self.seen.append(tenant_of(exchange))
        exchange.respond(200, b"%d" % len(exchange.body), "text/plain")


def tenant_of(exchange):
    return exchange.headers.get(b"x-tenant", b"").decode()


def request_of(tenant, body=b"x", headers=""):
    head = f"POST /a HTTP/1.1\r\nhost: x\r\nx-tenant: {tenant}\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def serving():
    app = Recorder()
    async with HttpServer("127.0.0.1:0", app, intake=Intake(tenant_of)) as server:
        yield app, server


async def test_a_request_passes_those_of_another_tenants_full_connections():
    async with serving() as (app, server), contextlib.AsyncExitStack() as stack:
        attackers = [await stack.enter_async_context(RawClient.connect(server.port)) for _ in range(16)]
        neighbour = await stack.enter_async_context(RawClient.connect(server.port))
        for client in attackers:
            await client.send(request_of("attacker") * 500)
        await until(lambda: len(app.seen) > 50)
        num_before = len(app.seen)
        await neighbour.send(request_of("neighbour"))
        assert (await neighbour.answer()).body == b"1"
        # Nothing is skipped: the socket is looked at in each turn of the loop, of which each has one request.
        assert app.seen.index("neighbour") - num_before < 100
        assert app.seen.count("attacker") < 8000


async def test_a_body_of_tiny_chunks_lets_others_pass():
    async with serving() as (app, server), contextlib.AsyncExitStack() as stack:
        attackers = [await stack.enter_async_context(RawClient.connect(server.port)) for _ in range(4)]
        neighbour = await stack.enter_async_context(RawClient.connect(server.port))
        for client in attackers:
            await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\nx-tenant: a\r\ntransfer-encoding: chunked\r\n\r\n")
            await client.send(TINY_CHUNKS)
        for _ in range(5):
            await neighbour.send(request_of("neighbour"))
            assert (await neighbour.answer()).body == b"1"
        assert app.seen == ["neighbour"] * 5
        for client in attackers:
            await client.send(b"0\r\n\r\n")
            assert (await client.answer()).body == b"60000"


async def test_a_tenants_chunks_do_not_wait_for_anothers():
    async with serving() as (app, server), contextlib.AsyncExitStack() as stack:
        attackers = [await stack.enter_async_context(RawClient.connect(server.port)) for _ in range(8)]
        neighbour = await stack.enter_async_context(RawClient.connect(server.port))
        head = b"POST /a HTTP/1.1\r\nhost: x\r\nx-tenant: %b\r\ntransfer-encoding: chunked\r\n\r\n"
        for client in attackers:
            await client.send(head % b"a" + TINY_CHUNKS + b"0\r\n\r\n")
        await neighbour.send(head % b"neighbour" + b"1\r\na\r\n" * 600 + b"0\r\n\r\n")
        assert (await neighbour.answer()).body == b"600"
        assert app.seen == ["neighbour"]


async def test_a_turn_of_the_event_loop_receives_little_of_what_many_send_fast(monkeypatch):
    received, most = 0, 0
    whole = HttpConnection.buffer_updated

    def buffer_updated(connection, nbytes):
        nonlocal received
        received += nbytes
        whole(connection, nbytes)

    def send(port, data):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(data)
            client.recv(1000)

    def look():
        nonlocal received, most
        received, most = 0, max(most, received)
        handle[0] = loop.call_soon(look)

    monkeypatch.setattr(HttpConnection, "buffer_updated", buffer_updated)
    loop = asyncio.get_running_loop()
    handle = [loop.call_soon(look)]
    async with serving() as (app, server):
        data = request_of("a", b"x" * (8 << 20))
        await asyncio.gather(*(asyncio.to_thread(send, server.port, data) for _ in range(6)))
        assert app.seen == ["a"] * 6
    handle[0].cancel()
    assert most <= 1 << 20


async def test_data_after_a_refused_head_is_not_parsed():
    async with serving() as (app, server), RawClient.connect(server.port) as client:
        lines = "".join(f"x-{number}: v\r\n" for number in range(100_000))
        await client.send(request_of("a", headers=lines))
        assert (await client.answer()).status == 431
    assert not app.seen


async def test_a_pipeline_is_answered_in_order_though_it_is_read_piece_by_piece():
    async with serving() as (_, server), RawClient.connect(server.port) as client:
        data = b"".join(request_of("a", b"x" * number) for number in range(300))
        for begin in range(0, len(data), 777):
            await client.send(data[begin : begin + 777])
            await asyncio.sleep(0)
        for number in range(300):
            assert (await client.answer()).body == b"%d" % number


async def test_a_client_that_closes_while_its_request_waits_costs_no_turn():
    async with serving() as (_, server), contextlib.AsyncExitStack() as stack:
        stays = await stack.enter_async_context(RawClient.connect(server.port))
        for _ in range(5):
            async with RawClient.connect(server.port) as client:
                await client.send(request_bytes("POST", "/a", b"x") * 200)
        await stays.send(request_of("neighbour"))
        assert (await stays.answer()).status == 200


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("", ""),
    ],
)
def test_clients_without_a_tenant_are_distinguished_by_network(host, network):
    assert network_of(host) == network
