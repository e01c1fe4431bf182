"""HTTP/1.1 of the gateway beside uvicorn and aiohttp: requests and stream events for each second of the server's CPU.

`python tests/bench/libraries/edge.py`; it needs uvicorn, starlette and aiohttp. Every server answers the same bytes
without any work behind it: the gateway with its request ids, routes, metrics and checks, the others bare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import uvloop

ANSWER = b'{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"content":"%s"}}]}' % (
    b"x" * 400
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"tok"}}]}\n\n'
)
NUM_EVENTS = 100
_BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"y" * 300)
_CONNECTIONS = 32


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def serve_baton() -> None:
    from baton.gateway.http.connections import Connections
    from baton.gateway.http.exchange import Exchange
    from baton.gateway.http.server import HttpServer
    from baton.gateway.metrics.counters import GenerationCounters
    from baton.gateway.metrics.gateway import GatewayMetrics
    from baton.gateway.rest.app import App
    from baton.gateway.rest.routing import Route

    def answer(exchange: Exchange) -> None:
        exchange.respond(200, ANSWER)

    async def stream(exchange: Exchange) -> None:
        exchange.stream("text/event-stream")
        for _ in range(NUM_EVENTS):
            exchange.write(EVENT)
            await asyncio.sleep(0)
        exchange.end()

    async def run() -> None:
        metrics = GatewayMetrics(GenerationCounters(), lambda: 0, lambda: 0)
        app = App([Route("POST", "/answer", answer, ""), Route("POST", "/stream", stream, "")], metrics)
        async with HttpServer("127.0.0.1:0", app, None, Connections()) as server:
            print(server.port, flush=True)
            await asyncio.Event().wait()

    uvloop.run(run())


def serve_uvicorn(parser: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(ANSWER, media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for _ in range(NUM_EVENTS):
            yield EVENT
            await asyncio.sleep(0)

    async def stream(request: Request) -> Response:
        await request.body()
        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/answer", answer, methods=["POST"]), Route("/stream", stream, methods=["POST"])])
    sock = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(_port(sock), flush=True)
    config = uvicorn.Config(app, http=parser, loop="uvloop", access_log=False, log_level="error")  # type: ignore[arg-type]
    uvicorn.Server(config).run(sockets=[sock])


def serve_aiohttp() -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=ANSWER, content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(NUM_EVENTS):
            await response.write(EVENT)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/answer", answer), web.post("/stream", stream)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        sock = socket.create_server(("127.0.0.1", 0), backlog=256)
        await web.SockSite(runner, sock).start()
        print(_port(sock), flush=True)
        await asyncio.Event().wait()

    uvloop.run(run())


SERVERS: dict[str, Callable[[], None]] = {
    "baton": serve_baton,
    "uvicorn, httptools": lambda: serve_uvicorn("httptools"),
    "uvicorn, h11": lambda: serve_uvicorn("h11"),
    "aiohttp": serve_aiohttp,
}


async def load(port: int, path: str, seconds: float, end: bytes) -> int:
    """Sends requests over kept connections, one at a time on each. Returns the number of answers."""
    fields = f"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}"
    request, until = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + _BODY, time.monotonic() + seconds

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        count = 0
        while time.monotonic() < until:
            writer.write(request)
            await reader.readuntil(end)
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(_CONNECTIONS))))


@contextlib.contextmanager
def server(name: str) -> Iterator[tuple[int, psutil.Process]]:
    """Yields the port and the process of a server."""
    child = subprocess.Popen([sys.executable, __file__, "--serve", name], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline()), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(name: str, seconds: float) -> tuple[float, float]:
    """Returns answers, and events of streams, for each second of the server's CPU."""
    with server(name) as (port, process):
        uvloop.run(load(port, "/answer", 0.5, ANSWER[-40:]))
        before = cpu(process)
        answers = uvloop.run(load(port, "/answer", seconds, ANSWER[-40:])) / (cpu(process) - before)
        before = cpu(process)
        streams = uvloop.run(load(port, "/stream", seconds, b"0\r\n\r\n"))
        return answers, streams * NUM_EVENTS / (cpu(process) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=tuple(SERVERS))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve]()
        return
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SERVERS}
    for _ in range(options.rounds):
        for name in SERVERS:
            found[name].append(measure(name, options.seconds))
    print(f"{os.cpu_count()} cores; medians of {options.rounds} rounds of {options.seconds:g} s")
    for name, pairs in found.items():
        answers, events = (sorted(values)[len(values) // 2] for values in zip(*pairs, strict=True))
        print(f"{name:<20} {answers:>9,.0f} answers   {events:>9,.0f} events   a CPU second")


if __name__ == "__main__":
    main()
