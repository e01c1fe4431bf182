"""Clients that send no more get their answer, clients that are gone are found: both over real sockets."""

import asyncio
import contextlib
import http.client
import itertools
import socket
import struct
import time

import pytest
import uvloop
from support.gateway.rest_harness import FakeGenerator, RawClient, request_bytes, rest_side, say, until
from support.processes.cpu_seconds import cheapest_of

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
PATH = "/v1/chat/completions"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(scope="module", params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request):
    return request.param()


def chat(version="1.1", **fields):
    return request_bytes("POST", PATH, {**CHAT, **fields}).replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1)


def ask_and_half_close(port, path, body):
    """The answer as Python's own client reads it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.getresponse()
        return answer.status, answer.read()


async def raw(port, data, half_close=True):
    """A connected socket that has sent this."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, data)
    if half_close:
        client.shutdown(socket.SHUT_WR)
    return client


async def test_a_half_closed_request_gets_its_answer_however_long_that_takes():
    cases = itertools.product(("1.1", "1.0"), (False, True))
    await asyncio.gather(*(check_that_a_slow_answer_comes(version, stream) for version, stream in cases))


async def check_that_a_slow_answer_comes(version, stream):
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        client.writer.write(chat(version, stream=stream))
        client.writer.write_eof()
        generation = await rest.generator.next()
        await asyncio.sleep(1.3)  # beyond the second probe
        generation.emit("He")
        await asyncio.sleep(1.0)
        generation.emit("llo")
        generation.finish()
        generation.done()
        answer = await client.answer()
        assert answer.status == 200
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in answer.events) if stream else (
            answer.json["choices"][0]["message"]["content"]
        )  # fmt: skip
        assert text == "Hello"
        assert not generation.aborted.is_set()
        assert await client.closed()


async def test_pythons_client_reads_an_answer_that_began_with_probes():
    async with rest_side() as rest:
        body = request_bytes("POST", PATH, {**CHAT, "stream": True}).partition(b"\r\n\r\n")[2]
        asking = asyncio.create_task(asyncio.to_thread(ask_and_half_close, rest.port, PATH, body))
        generation = await rest.generator.next()
        for piece in ("a", "b", "c"):
            generation.emit(piece)
            await asyncio.sleep(1.1)
        generation.finish()
        generation.done()
        status, text = await asking
    assert status == 200
    assert text.endswith(b"data: [DONE]\n\n")


async def test_errors_and_pipelined_answers_are_whole_too():
    async with rest_side(say("Hi")) as rest, RawClient.connect(rest.port) as client:
        client.writer.write(chat() + chat(model="none") + chat() + request_bytes("GET", "/version"))
        client.writer.write_eof()
        assert [(await client.answer()).status for _ in range(4)] == [200, 404, 200, 200]
        assert await client.closed()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_stops_its_generation_at_once(version, stream):
    seconds = []
    async with rest_side() as rest:
        for number in range(3):  # the quickest of them counts: a busy machine may be late
            client = await raw(rest.port, chat(version, stream=stream), half_close=False)
            generation = await rest.generator.next(number)
            began = time.monotonic()
            client.close()
            await asyncio.wait_for(generation.aborted.wait(), 10)
            seconds.append(time.monotonic() - began)
            assert rest.admission.in_use == 0
    assert min(seconds) < 0.5


async def test_a_client_that_closes_amid_a_stream_stops_it_before_the_next_token():
    async with rest_side() as rest:
        client = await raw(rest.port, chat(stream=True), half_close=False)
        generation = await rest.generator.next()
        generation.emit("He")
        await asyncio.get_running_loop().sock_recv(client, 65536)
        client.close()
        await asyncio.wait_for(generation.aborted.wait(), 10)


async def test_a_client_that_closes_before_its_generation_starts_stops_it():
    generator = FakeGenerator()
    generator.hold = asyncio.Event()
    async with rest_side(generator=generator) as rest:
        client = await raw(rest.port, chat(), half_close=False)
        client.close()
        await until(lambda: len(rest.server._connections) == 0, 10)
        generator.hold.set()
        await until(lambda: rest.admission.in_use == 0, 10)
        assert all(one.aborted.is_set() for one in generator.started)


async def test_a_client_that_goes_while_its_second_request_is_prepared_is_found():
    """The first answer ends the watch of the connection; the second request has not begun its generation."""
    generator = FakeGenerator()
    async with rest_side(generator=generator) as rest:
        client = await raw(rest.port, chat() + chat())
        first = await rest.generator.next()
        await asyncio.sleep(0.05)
        generator.hold = asyncio.Event()
        first.emit("He", finish_reason="stop")
        first.done()
        async with asyncio.timeout(10):
            answer = await asyncio.get_running_loop().sock_recv(client, 65536)
        assert b"200 OK" in answer
        client.close()
        await until(lambda: len(rest.server._connections) == 0, 10)
        generator.hold.set()
        await until(lambda: rest.admission.in_use == 0, 10)


async def test_a_client_that_half_closes_and_is_lost_later_is_found_by_a_later_probe():
    async with rest_side() as rest:
        client = await raw(rest.port, chat())
        generation = await rest.generator.next()
        await asyncio.sleep(0.3)
        client.close()
        await asyncio.wait_for(generation.aborted.wait(), 10)


async def test_a_reset_stops_it_after_a_half_close():
    async with rest_side() as rest:
        client = await raw(rest.port, chat())
        generation = await rest.generator.next()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await asyncio.wait_for(generation.aborted.wait(), 10)


async def test_waiting_half_closed_costs_next_to_nothing():
    async with rest_side() as rest:
        clients = [await raw(rest.port, chat()) for _ in range(200)]
        await rest.generator.next(199)
        await asyncio.sleep(1)
        assert await cheapest_of(lambda: asyncio.sleep(2), 0.3) < 0.3
        assert not any(one.aborted.is_set() for one in rest.generator.started)
        for client in clients:
            client.close()
        await until(lambda: rest.admission.in_use == 0, 8)
