"""Clients that violate HTTP, with the whole REST server: each gets an error, and none affects other clients."""

import asyncio
import contextlib
import gc
import time
import tracemalloc

import pytest
from support.gateway.rest_harness import RawClient, request_bytes, rest_side, say, until

from baton.gateway.http.limits import HttpLimits

LIMITS = HttpLimits(header_timeout=0.5, body_timeout=0.5, idle_timeout=0.5, stall_timeout=0.5)
HOST = b"host: localhost\r\n"
BODY = b'{"prompt": "Hi"}'
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNK = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"


def post(headers, body=b"", version=b"1.1"):
    return b"POST /v1/completions HTTP/" + version + b"\r\n" + HOST + headers + b"\r\n" + body


def get(path=b"/version", headers=HOST):
    return b"GET " + path + b" HTTP/1.1\r\n" + headers + b"\r\n"


REFUSED = {
    "a chunk beyond all sizes": post(CHUNKED, b"fffffffffffffffff\r\nx"),
    "a negative chunk": post(CHUNKED, b"-1\r\nx"),
    "a chunk in C's hexadecimal": post(CHUNKED, b"0x10\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a blank before a chunk's size": post(CHUNKED, b" " + CHUNK),
    "a blank behind a chunk's size": post(CHUNKED, b"10 \r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a control character in a chunk's extension": post(CHUNKED, b"10;\x00\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunks that end in line feeds": post(CHUNKED, CHUNK.replace(b"\r", b"")),
    "a chunk longer than it says": post(CHUNKED, b"f\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a length in the trailer": post(CHUNKED, CHUNK[:-2] + b"content-length: 5\r\n\r\n"),
    "chunks that are no last coding": post(b"transfer-encoding: chunked, identity\r\n", CHUNK),
    "chunks of a coding": post(b"transfer-encoding: gzip, chunked\r\n", CHUNK),
    "chunks of no coding": post(b"transfer-encoding: identity, chunked\r\n", CHUNK),
    "an unknown coding": post(b"transfer-encoding: xchunked\r\n", CHUNK),
    "chunked twice": post(CHUNKED * 2, CHUNK),
    "a length and chunks": post(b"content-length: 4\r\n" + CHUNKED, CHUNK),
    "a length and hidden chunks": post(b"content-length: 4\r\ntransfer-encoding : chunked\r\n", CHUNK),
    "two lengths": post(b"content-length: 16\r\ncontent-length: 17\r\n", BODY),
    "a list of lengths": post(b"content-length: 16, 16\r\n", BODY),
    "a length with a sign": post(b"content-length: +16\r\n", BODY),
    "a length beyond all numbers": post(b"content-length: 99999999999999999999999\r\n", BODY),
    "a length in C's hexadecimal": post(b"content-length: 0x10\r\n", BODY),
    "an empty length": post(b"content-length: \r\n", BODY),
    "two hosts": get(headers=HOST + b"host: y\r\n"),
    "a folded header": get(headers=HOST + b"a: b\r\n c\r\n"),
    "a blank behind a header's name": get(headers=b"host : x\r\n"),
    "a header without name": get(headers=HOST + b": b\r\n"),
    "a NUL in a header": get(headers=HOST + b"a: \x00\r\n"),
    "a carriage return in a header": get(headers=HOST + b"a: b\rc: d\r\n"),
    "lines that end in line feeds": get().replace(b"\r", b""),
    "a NUL in a path": get(b"/v1/models/a\x00b"),
    "another HTTP": get().replace(b"HTTP/1.1", b"HTTP/3.0"),
    "another protocol's greeting": b"\x05\x01\x00\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_requests_that_servers_parse_differently_are_refused(data):
    async with rest_side(say("x")) as rest:
        async with RawClient.connect(rest.port) as client:
            await client.send(data + get())  # a second request must not be seen behind it
            answer = await client.answer()
            assert answer.status == 400
            assert answer.error["type"] == "invalid_request_error"
            assert await client.closed()
        assert not rest.generator.started
        assert (await rest.request("GET", "/version")).status == 200


SERVED = {
    "an extension": post(CHUNKED, b'10;a="b";c\r\n' + BODY + b"\r\n0\r\n\r\n"),
    "leading zeros": post(CHUNKED, b"0" * 1000 + CHUNK),
    "a trailer": post(CHUNKED, CHUNK[:-2] + b"host: y\r\n\r\n"),
    "bytes of their own": post(CHUNKED, b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"),
    "a target with a host": post(b"content-length: 16\r\n", BODY).replace(b"POST /", b"POST http://y.localhost/"),
    "lines before it": b"\r\n" * 100 + post(b"content-length: 16\r\n", BODY),
}


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED)
async def test_all_requests_allowed_by_the_standard_are_served(data):
    async with rest_side(say("x")) as rest, RawClient.connect(rest.port) as client:
        for _ in range(2):
            await client.send(data)
            assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"content-encoding": "gzip"}, "content-encoding"),
        ({"content-type": "text/plain"}, "content-type"),
        ({"x-request-id": "a b"}, "x-request-id"),
        ({"x-request-id": "x" * 257}, "x-request-id"),
        ({"transfer-encoding": "gzip"}, None),
    ],
)
async def test_a_wrong_header_is_named(headers, field):
    async with rest_side(say("x")) as rest, RawClient.connect(rest.port) as client:
        await client.send(request_bytes("POST", "/v1/completions", BODY, headers))
        answer = await client.answer()
        assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("data", [post(CHUNKED, b"7fffffffffffffff\r\nx"), post(CHUNKED, b"5;" + b"a" * 10_000)])
async def test_a_missing_body_times_out(data):
    async with rest_side(limits=LIMITS) as rest, RawClient.connect(rest.port) as client:
        await client.send(data)
        assert (await client.answer()).status == 408
        assert await client.closed()


@pytest.mark.parametrize("tail", [b"x: " + b"y" * 100_000, b"".join(b"x%d: y\r\n" % index for index in range(1000))])
async def test_a_trailer_is_limited_like_headers(tail):
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        await client.send(post(CHUNKED, CHUNK[:-2] + tail + b"\r\n\r\n"))
        assert (await client.answer()).status == 431
    assert not rest.generator.started


# How a chunked body begins, and what it repeats.
ENDLESS = {
    "an extension": (b"5;", b"a" * 1000),
    "an extension in every chunk": (b"", b"1;" + b"a" * 200 + b"\r\n \r\n"),
    "leading zeros": (b"", b"0" * 1000),
    "a trailer": (b"0\r\nx: ", b"a" * 1000),
    "chunks of a byte": (b"", b"1\r\n \r\n" * 200),
    "chunks of ten bytes": (b"", b"a\r\n          \r\n" * 70),
}


@pytest.mark.parametrize(("start", "repeated"), ENDLESS.values(), ids=ENDLESS)
async def test_chunk_framing_of_a_body_is_bounded(start, repeated):
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        began = time.process_time()
        await client.send(post(CHUNKED, start))
        answering = asyncio.create_task(client.answer())
        sent = 0
        while not answering.done() and sent < 32 << 20:
            client.writer.write(repeated * 20)
            sent += 20 * len(repeated)
            await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                await client.writer.drain()
        assert (await answering).status == 431
        assert sent < 24 << 20
        assert time.process_time() - began < 2
    assert not rest.generator.started


@pytest.mark.parametrize("size", [1, 100, 5000])
async def test_bodies_in_small_chunks_are_served(size):
    body = (
        b'{"prompt": "Hi", "stop": "' + b"x" * 200 + b'", "user": "y"' + b" " * (60_000 if size < 9 else 500_000) + b"}"
    )
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    async with rest_side(say("x")) as rest, RawClient.connect(rest.port) as client:
        await client.send(post(CHUNKED, b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)))
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_a_body_in_tiny_chunks_takes_no_more_memory_than_it_is_long():
    chunks = b"2\r\n  \r\n" * 2_600
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        await client.send(post(CHUNKED))
        tracemalloc.start()
        try:
            for _ in range(25):
                await client.send(chunks)
            (connection,) = rest.server._connections
            await until(lambda: connection._reader._body_bytes == 130_000, 10)
            assert tracemalloc.get_traced_memory()[0] < 1 << 20  # as pieces they would take 2.8 MB
        finally:
            tracemalloc.stop()
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 400


async def test_unread_answers_are_not_produced():
    requests = get(b"/openapi.json") * 500
    async with rest_side(limits=HttpLimits(stall_timeout=60)) as rest:
        size = len((await rest.request("GET", "/openapi.json")).body)
        async with RawClient.connect(rest.port, limit=1024) as client:
            for _ in range(8):
                client.writer.write(requests)
            await asyncio.sleep(0.3)
            counted = 'baton_gateway_requests_total{route="/openapi.json",status="200"}'
            text = (await rest.request("GET", "/metrics")).body.decode()
            (line,) = [line for line in text.splitlines() if line.startswith(counted)]
            assert float(line.rpartition(" ")[2]) * size < 32 << 20
            for _ in range(4000):
                assert len((await client.answer()).body) == size


async def test_a_client_that_reads_none_of_many_answers_is_disconnected():
    async with rest_side(limits=LIMITS) as rest, RawClient.connect(rest.port, limit=1024) as client:
        client.writer.write(get(b"/openapi.json") * 2000)
        await until(lambda: open_connections(rest) == 1)
        await until(lambda: open_connections(rest) == 0, 20)


async def test_thousands_of_broken_connections_leave_nothing_behind(caplog):
    broken = [*REFUSED.values(), get()[:-2], post(b"content-length: 16\r\n", BODY[:5]), post(CHUNKED, b"10\r\n{"), b""]
    async with rest_side(say("x")) as rest:

        async def one(data):
            async with RawClient.connect(rest.port) as client:
                await client.send(data)

        async def some(count):
            for _ in range(count):
                await asyncio.gather(*map(one, broken))
            await until(lambda: not open_connections(rest), 10)
            caplog.clear()
            gc.collect()

        await some(5)
        tracemalloc.start()
        try:
            await some(5)
            before = tracemalloc.get_traced_memory()[0]
            await some(25)
            assert tracemalloc.get_traced_memory()[0] - before < 200_000
        finally:
            tracemalloc.stop()
        assert rest.admission.in_use == 0


def open_connections(rest):
    text = rest.metrics.exposition().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("baton_gateway_connections ")]
    return float(line.rpartition(" ")[2])
