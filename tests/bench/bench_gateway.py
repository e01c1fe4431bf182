"""What a streamed token and a small chat cost in the gateway: CPU of its whole process, over real sockets.

python tests/bench/bench_gateway.py [--streams 256] [--seconds 8] [--rounds 3] [--json FILE]

"REST only" is the HTTP, OpenAI and SSE side with a generator that emits text every 20 ms. "all in" is the gateway as
it runs, with a scripted router and worker in the load generator's process: placement, tokenizer, block hashes, the
worker's frames, detokenization, SSE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from rest_harness import SAMPLE, FakeGeneration, FakeGenerator, rest_side
from scripted_services import ScriptedRouter, ScriptedWorker

from baton.gateway.config import GatewayConfig
from baton.gateway.server import serve
from baton.services.ports import free_ports

STEP_SECONDS = 0.02
WARM_SECONDS = 1.0
CHAT = {"model": "storyteller-7m", "messages": [{"role": "user", "content": "Tell me a story about a dog."}]}


class PacedGenerator(FakeGenerator):
    """Gives every running stream one piece of text a step, all in one loop turn, as one frame would."""

    async def start(self, request: Any, sink: Any) -> FakeGeneration:
        generation = await super().start(request, sink)
        if request.stop.max_tokens <= 8:
            asyncio.get_running_loop().call_soon(self._answer, generation)
            self.started.pop()
        return generation

    async def run(self) -> None:
        """Steps for ever."""
        step = 0
        while True:
            await asyncio.sleep(STEP_SECONDS)
            step += 1
            for generation in self.started:
                generation.emit(" word", token_ids=(step,))

    def _answer(self, generation: FakeGeneration) -> None:
        for _ in range(generation.request.stop.max_tokens):
            generation.emit(" word")
        generation.finish()
        generation.done()


async def serve_fake() -> None:
    """The REST side alone, until killed."""
    generator = PacedGenerator()
    async with rest_side(generator=generator) as rest:
        print(rest.port, flush=True)
        await generator.run()


async def serve_real(router: str) -> None:
    """The gateway, until killed."""
    rest, grpc = free_ports(2)
    config = GatewayConfig(
        rest_listen=f"127.0.0.1:{rest}", grpc_listen=f"127.0.0.1:{grpc}", router=(router,), model=str(SAMPLE)
    )
    print(rest, flush=True)
    await serve(config, asyncio.Event())


class StreamReader(asyncio.Protocol):
    """Counts the events of one stream, and the gaps between them."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.num_events = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(_post(self._body))

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"\n\n")


def _post(body: bytes) -> bytes:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(body) + body


@contextlib.asynccontextmanager
async def gateway(kind: str, router: str = "") -> AsyncIterator[tuple[int, psutil.Process]]:
    """A gateway process of its own."""
    command = (sys.executable, __file__, "--serve", kind, "--router", router)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        port = int(await child.stdout.readline())
        await _until_ready(port)
        yield port, psutil.Process(child.pid)
    finally:
        child.kill()
        await child.wait()


async def _until_ready(port: int) -> None:
    for _ in range(200):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            if b" 200 " in head:
                return
        await asyncio.sleep(0.05)
    raise RuntimeError("the gateway was not ready in time")


async def cpu_a_token(port: int, process: psutil.Process, num_streams: int, seconds: float) -> tuple[float, float]:
    """Microseconds of CPU a token, and tokens a second."""
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1900, "ignore_eos": True}).encode()
    loop = asyncio.get_running_loop()
    readers = [StreamReader(body) for _ in range(num_streams)]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
    await asyncio.sleep(WARM_SECONDS)
    begin_events, begin_cpu, begin = sum(r.num_events for r in readers), _cpu(process), time.perf_counter()
    await asyncio.sleep(seconds)
    num_tokens = sum(r.num_events for r in readers) - begin_events
    cpu, wall = _cpu(process) - begin_cpu, time.perf_counter() - begin
    for reader in readers:
        reader.transport.abort()
    await asyncio.sleep(0.3)
    return cpu / num_tokens * 1e6, num_tokens / wall


async def cpu_a_chat(port: int, process: psutil.Process, num_clients: int, seconds: float) -> tuple[float, float]:
    """Milliseconds of CPU a small chat that is not streamed, and chats a second."""
    body = _post(json.dumps(CHAT | {"max_tokens": 8, "ignore_eos": True}).encode())
    counts = [0] * num_clients

    async def ask(client: int, deadline: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < deadline:
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head, head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            await reader.readexactly(length)
            counts[client] += 1
        writer.close()

    begin_cpu, begin = _cpu(process), time.perf_counter()
    await asyncio.gather(*(ask(client, begin + seconds) for client in range(num_clients)))
    cpu, wall = _cpu(process) - begin_cpu, time.perf_counter() - begin
    return cpu / sum(counts) * 1e3, sum(counts) / wall


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(num_streams: int, seconds: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Every case, interleaved."""
    results: dict[str, list[tuple[float, float]]] = {}
    script = [5 + at % 500 for at in range(2000)]
    async with (
        ScriptedWorker("w", lambda submit: script, STEP_SECONDS) as slow,
        ScriptedWorker("w", lambda submit: script, 0.002) as fast,
        ScriptedRouter([slow]) as slow_router,
        ScriptedRouter([fast]) as fast_router,
        gateway("fake") as fake,
        gateway("real", slow_router.address) as paced,
        gateway("real", fast_router.address) as quick,
    ):
        for _ in range(rounds):
            for name, one in (("REST only", fake), ("all in", paced)):
                result = await cpu_a_token(*one, num_streams, seconds)
                results.setdefault(f"us a token, {num_streams} streams, {name}", []).append(result)
            for name, one in (("REST only", fake), ("all in", quick)):
                result = await cpu_a_chat(*one, 8, seconds / 2)
                results.setdefault(f"ms a small chat, 8 clients, {name}", []).append(result)
    return results


def main() -> None:
    """Prints the table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=("fake", "real"), help=argparse.SUPPRESS)
    parser.add_argument("--router", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # As in production, log lines are made; here they go nowhere.
    logging.basicConfig(level=logging.INFO, handlers=[logging.FileHandler("/dev/null")])
    if options.serve:
        uvloop.run(serve_fake() if options.serve == "fake" else serve_real(options.router))
        return
    results = uvloop.run(measure(options.streams, options.seconds, options.rounds))
    print(f"CPU of the gateway's process, 1 token / {STEP_SECONDS * 1000:.0f} ms a stream, {options.rounds} rounds")
    print(f"{'':44}{'median':>8}{'min':>8}{'max':>8}{'rate/s':>10}")
    for name, values in results.items():
        costs = [cost for cost, _ in values]
        rate = statistics.median(rate for _, rate in values)
        print(f"{name:44}{statistics.median(costs):8.2f}{min(costs):8.2f}{max(costs):8.2f}{rate:10.0f}")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
