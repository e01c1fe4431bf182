"""The HTTP server over real sockets: framing, order, limits, slow and vanishing clients, drain."""

import asyncio
import socket

import pytest
import uvloop
from support.gateway.rest_harness import RawClient, request_bytes, until

from baton.gateway.http.connections import Connections
from baton.gateway.http.limits import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.rpc.errors import InvalidRequest, Unavailable

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")

LIMITS = HttpLimits(
    max_body_bytes=1000, max_header_bytes=2000, header_timeout=0.3, body_timeout=0.3, idle_timeout=0.3,
    stall_timeout=0.5,
)  # fmt: skip


@pytest.fixture(scope="module", params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request):
    return request.param()


class EchoApp:
    """Answers with the method, path and body; /slow and /stream wait for the test."""

    def __init__(self):
        self.exchanges = []
        self.gate = asyncio.Event()
        self.disconnects = 0

    def __call__(self, exchange):
        self.exchanges.append(exchange)
        exchange.request_id = "id"
        if exchange.path == "/slow":
            return self._slow(exchange)
        if exchange.path == "/broken":
            raise ValueError("secret")
        if exchange.path == "/broken-later":
            return self._broken()
        if exchange.path == "/wrong":
            exchange.fail(InvalidRequest("x is wrong", field="x"))
        elif exchange.path == "/stream":
            exchange.on_disconnect.append(self._disconnected)
            exchange.stream("text/plain")
        else:
            exchange.respond(200, f"{exchange.method} {exchange.path} ".encode() + exchange.body, "text/plain")
        return None

    async def _slow(self, exchange):
        exchange.begin_work(self._disconnected, lambda: None)
        await self.gate.wait()
        exchange.respond(200, b"slow")

    async def _broken(self):
        raise ValueError("secret")

    def _disconnected(self):
        self.disconnects += 1

    async def next(self, number=0):
        await until(lambda: len(self.exchanges) > number)
        return self.exchanges[number]


@pytest.fixture
async def app():
    return EchoApp()


@pytest.fixture
async def server(app):
    """Runs a server with small limits. `app.connections` are its clients."""
    app.connections = Connections()
    async with HttpServer("127.0.0.1:0", app, LIMITS, app.connections) as server:
        yield server


async def test_a_request_may_arrive_byte_by_byte(server):
    async with RawClient.connect(server.port) as client:
        client.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request_bytes("POST", "/a", b"hello"):
            await client.send(bytes((byte,)))
            await asyncio.sleep(0)
        answer = await client.answer()
    assert answer.body == b"POST /a hello"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_request_may_be_cut_anywhere(server, framing):
    if framing == "length":
        data = request_bytes("POST", "/a", b"hello")
    else:
        data = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    async with RawClient.connect(server.port) as client:
        for cut in range(1, len(data)):
            await client.send(data[:cut])
            await asyncio.sleep(0.0005)
            await client.send(data[cut:])
            assert (await client.answer()).body == b"POST /a hello"


async def test_pipelined_requests_are_answered_in_order(app, server):
    async with RawClient.connect(server.port) as client:
        paths = ["/slow", *(f"/{index}" for index in range(60))]
        await client.send(b"".join(request_bytes("POST", path, b"x" * 10) for path in paths))
        await app.next()
        await asyncio.sleep(0.05)
        assert len(app.exchanges) == 1
        app.gate.set()
        assert (await client.answer()).body == b"slow"
        for path in paths[1:]:
            assert (await client.answer()).body == f"POST {path} ".encode() + b"x" * 10


async def test_connections_stay_open_and_head_has_no_body(server):
    async with RawClient.connect(server.port) as client:
        for _ in range(3):
            head = await client.request("HEAD", "/a")
            assert head.headers["content-length"] == str(len("HEAD /a "))
            assert (await client.request("GET", "/a")).body == b"GET /a "
        assert "connection" not in head.headers


async def test_http_1_0_closes_unless_asked_to_stay(app, server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "keep-alive"
        await client.send(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        exchange = await app.next(1)
        exchange.write(b"one")
        exchange.end(b"two")
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.body == b"onetwo"


async def test_the_head_and_the_first_piece_of_a_stream_are_one_write(app, server):
    async with RawClient.connect(server.port) as client:
        await client.send(request_bytes("GET", "/stream"))
        exchange = await app.next()
        exchange.write(b"one")
        data = await client.reader.read(65536)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert data.endswith(b"\r\n\r\n3\r\none\r\n")
        exchange.write(b"two")
        exchange.end(b"three")
        assert await client.chunk() == b"two"
        assert await client.chunk() == b"three"
        assert await client.chunk() == b""
        assert (await client.request("GET", "/again")).status == 200


async def test_expect_100_continue_is_met_before_the_body(server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hello")
        assert (await client.answer()).body == b"POST /a hello"


async def test_a_too_large_body_is_refused_before_it_is_sent(app, server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1001\r\n\r\n")
        answer = await client.answer()
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        assert await client.closed()
    assert not app.exchanges


async def test_a_too_large_body_is_answered_while_the_client_keeps_sending(server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n")
        for _ in range(30):
            client.writer.write(b"x" * 100_000)
        assert (await client.answer()).status == 413


async def test_a_chunked_body_is_limited_too(app, server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n0\r\n\r\n")
        assert (await client.answer()).status == 413
    assert not app.exchanges


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 3000 + b"\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 300_000,
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: x\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(140)) + b"\r\n",
    ],
)
async def test_too_large_headers_are_a_431(server, head):
    async with RawClient.connect(server.port) as client:
        await client.send(head)
        assert (await client.answer()).status == 431
        assert await client.closed()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"hello there\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: -3\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nexpect: miracles\r\n\r\n", 417),
        (b"CONNECT a:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    ],
)
async def test_invalid_http_is_refused_in_openais_format(server, data, status):
    async with RawClient.connect(server.port) as client:
        await client.send(data)
        answer = await client.answer()
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close"
        assert await client.closed()


async def test_an_offer_of_h2c_is_declined_by_answering(server):
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AA"}
    async with RawClient.connect(server.port) as client:
        for _ in range(2):
            assert (await client.request("POST", "/a", b"hello", offer)).body == b"POST /a hello"


async def test_trailers_do_not_change_the_request(app, server):
    async with RawClient.connect(server.port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\na: 1\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.send(b"1\r\nx\r\n0\r\na: 2\r\n\r\n")
        await client.answer()
    assert app.exchanges[0].headers[b"a"] == b"1"


@pytest.mark.parametrize("start", [b"GET /a", b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\nx"])
async def test_a_trickling_client_gets_an_error_and_is_disconnected(server, start):
    async with RawClient.connect(server.port) as client:
        await client.send(start)
        trickle = asyncio.create_task(_trickle(client))
        assert (await client.answer()).status == 408
        assert await client.closed()
        trickle.cancel()


async def _trickle(client):
    while True:
        await asyncio.sleep(0.05)
        await client.send(b"x")


async def test_an_idle_connection_is_closed_without_a_word(server):
    async with RawClient.connect(server.port) as fresh, RawClient.connect(server.port) as used:
        await used.request("GET", "/a")
        assert await fresh.closed()
        assert await used.closed()


async def test_a_handlers_defect_is_a_500_without_its_words(server, caplog):
    async with RawClient.connect(server.port) as client:
        for path in ("/broken", "/broken-later"):
            answer = await client.request("GET", path)
            assert answer.status == 500
            assert b"secret" not in answer.body
        assert (await client.request("GET", "/a")).status == 200
    assert caplog.text.count("ValueError: secret") == 2


async def test_a_vanished_client_is_noticed_at_once(app, server):
    for path in ("/slow", "/stream"):
        async with RawClient.connect(server.port) as client:
            await client.send(request_bytes("GET", path))
            await app.next(app.disconnects)
            await asyncio.sleep(0.01)
        await until(lambda: len(app.connections) == 0, 5)
    assert app.disconnects == 2
    assert app.exchanges[1].ended
    app.exchanges[1].write(b"into the void")


async def test_a_quick_answer_survives_half_closing(server):
    async with RawClient.connect(server.port) as client:
        client.writer.write(request_bytes("GET", "/a") * 3)
        client.writer.write_eof()
        for _ in range(3):
            assert (await client.answer()).status == 200
        assert await client.closed()


async def test_a_slow_reader_pauses_the_stream_and_resumes_it(app, server):
    resumed = asyncio.Event()
    async with RawClient.connect(server.port, limit=1024) as client:
        await client.send(request_bytes("GET", "/stream"))
        exchange = await app.next()
        exchange.on_writable.append(resumed.set)
        written = 0
        while exchange.writable:
            exchange.write(b"x" * 4096)
            written += 4096
            assert written < 64 << 20
        read = 0
        while not resumed.is_set():
            read += len(await client.reader.read(65536))
            await asyncio.sleep(0)
        assert exchange.writable


async def test_a_client_that_reads_nothing_is_cut_off_in_the_end(app, server):
    async with RawClient.connect(server.port, limit=1024) as client:
        await client.send(request_bytes("GET", "/stream"))
        exchange = await app.next()
        while exchange.writable:
            exchange.write(b"x" * 65536)
        await until(lambda: app.disconnects == 1)


async def test_a_drain_completes_running_answers_with_connection_close(app, server):
    async with (
        RawClient.connect(server.port) as busy,
        RawClient.connect(server.port) as idle,
        RawClient.connect(server.port) as half,
    ):
        await idle.request("GET", "/a")
        await busy.send(request_bytes("GET", "/slow"))
        await app.next(1)
        data = request_bytes("POST", "/late", b"hello")
        await half.send(data[:-2])
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(server.drain(2))
        assert await idle.closed()
        async with RawClient.connect(server.port) as probe:  # how it is can be asked to the end
            assert (await probe.request("GET", "/a")).headers["connection"] == "close"
            assert await probe.closed()
        await half.send(data[-2:])
        assert (await half.answer()).headers["connection"] == "close"
        assert not draining.done()
        app.gate.set()
        answer = await busy.answer()
        assert answer.body == b"slow"
        assert answer.headers["connection"] == "close"
        await draining


async def test_a_connection_whose_first_request_is_on_its_way_as_a_drain_begins_is_answered(app):
    async with (
        HttpServer("127.0.0.1:0", app) as server,
        RawClient.connect(server.port) as busy,
        RawClient.connect(server.port) as fresh,
    ):
        await busy.send(request_bytes("GET", "/slow"))
        await app.next()
        draining = asyncio.create_task(server.drain(30))
        await asyncio.sleep(0.02)
        assert (await fresh.request("GET", "/a")).headers["connection"] == "close"
        assert await fresh.closed()
        app.gate.set()
        await busy.answer()
        await draining


async def test_a_drain_does_not_wait_for_a_connection_that_never_asked_anything(app):
    patient = HttpLimits(header_timeout=30)
    async with HttpServer("127.0.0.1:0", app, patient) as server, RawClient.connect(server.port) as fresh:
        async with RawClient.connect(server.port) as other:
            await other.request("GET", "/a")
        async with asyncio.timeout(10):
            await server.drain(20)
        assert (await fresh.request("GET", "/a")).headers["connection"] == "close"


async def test_a_drain_ends_when_time_is_up(app, server, caplog):
    async with RawClient.connect(server.port) as client:
        await client.send(request_bytes("GET", "/slow"))
        await app.next()
        await server.drain(0.05)
    assert "still busy" in caplog.text


async def test_excess_connections_get_an_error():
    limits = HttpLimits(max_connections=1)
    async with HttpServer("127.0.0.1:0", EchoApp(), limits) as server, RawClient.connect(server.port) as first:
        assert (await first.request("GET", "/a")).status == 200
        async with RawClient.connect(server.port) as second:
            answer = await second.answer()
            assert answer.status == 503
            assert "retry-after" in answer.headers
        assert (await first.request("GET", "/a")).status == 200


async def test_a_port_in_use_is_named():
    async with HttpServer("127.0.0.1:0", EchoApp()) as server:
        with pytest.raises(Unavailable, match=str(server.port)):
            await HttpServer(f"127.0.0.1:{server.port}", EchoApp()).__aenter__()


async def test_every_answer_is_logged_with_its_request_id(server, caplog):
    caplog.set_level("INFO", "baton.gateway.access")
    async with RawClient.connect(server.port) as client:
        await client.request("GET", "/a")
    (record,) = [record for record in caplog.records if record.name == "baton.gateway.access"]
    assert record.getMessage() == "GET /a 200"
    assert record.request_id == "id"
    assert record.client.startswith("127.0.0.1:")
