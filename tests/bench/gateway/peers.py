"""Other gateways for comparison, installed from PyPI into separate environments, with a fixed OpenAI server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httptools
from bench.gateway.rig import Server, started
from support.processes.ports import free_ports

from baton.services.bench.datasets.source import BenchFailed

_INSTALL_SECONDS = 1200.0
_LEAVE_SECONDS = 120.0
# LiteLLM ends a stream whose chunks are all equal.
_WORDS = [f" word{number}" for number in range(97)]
_DATA = (
    'data: {"id":"chatcmpl-8f3c0d9e5b7a4c21a6e4f0b1d2c3a4b5","object":"chat.completion.chunk","created":1763700000,'
    '"model":"storyteller-7m","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,'
    '"finish_reason":null}]}\n\n'
)
_DOCUMENT = {
    "id": "chatcmpl-8f3c0d9e5b7a4c21a6e4f0b1d2c3a4b5", "object": "chat.completion", "created": 1763700000,
    "model": "storyteller-7m", "usage": {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28},
    "choices": [{"index": 0, "message": {"role": "assistant", "content": " word" * 8}, "finish_reason": "length"}],
}  # fmt: skip
_MODELS = {"object": "list", "data": [{"id": "storyteller-7m", "object": "model", "created": 0, "owned_by": "bench"}]}


class FixedServer:
    """An OpenAI server with fixed answers: one document, or an event for each stream at every step."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._chunks = itertools.cycle([_chunk((_DATA % word).encode()) for word in _WORDS])
        self.streams: set[asyncio.Transport] = set()
        self._none_left = asyncio.Event()
        self.port = 0

    async def __aenter__(self) -> FixedServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _FixedConnection(self), "127.0.0.1", 0, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._ticking.cancel()
        self._server.close()

    def add(self, transport: asyncio.Transport) -> None:
        """Adds a client that receives an event at every step."""
        self.streams.add(transport)
        self._none_left.clear()

    def discard(self, transport: asyncio.Transport) -> None:
        """Removes a client that has disconnected."""
        self.streams.discard(transport)
        if not self.streams:
            self._none_left.set()

    async def until_no_stream(self) -> None:
        """Waits until the gateway under test has ended the streams of clients that left. Raises BenchFailed."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._none_left.wait()
        except TimeoutError:
            raise BenchFailed(f"{len(self.streams)} streams without a client after {_LEAVE_SECONDS:.0f} s") from None

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            chunk = next(self._chunks)
            for transport in self.streams:
                transport.write(chunk)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _FixedConnection(asyncio.Protocol):
    def __init__(self, server: FixedServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._parser.get_method() == b"GET":
            self._respond(_MODELS)
        elif json.loads(body).get("stream"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.write(head)
            self._server.add(self._transport)
        else:
            self._respond(_DOCUMENT)

    def _respond(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway from PyPI."""

    requirement: str
    probe: str
    num_streams: int  # load that it can handle, with a token per stream every 20 ms
    num_clients: int
    command: Callable[[Path, int, int], list[str]]  # arguments: its environment, its port, the backend's port


def _litellm(environment: Path, port: int, backend: int) -> list[str]:
    config = environment / "config.json"  # JSON is YAML
    to_backend = {"model": "openai/storyteller-7m", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "none"}
    models = [{"model_name": "storyteller-7m", "litellm_params": to_backend}]
    open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # like the other gateways
    document = {"model_list": models, "general_settings": open_to_all}
    config.write_text(json.dumps(document), encoding="utf-8")
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(environment / "bin" / "litellm"), "--config", str(config), "--num_workers", "1", *listen]


def _vllm_router(environment: Path, port: int, backend: int) -> list[str]:
    (metrics,) = free_ports(1)
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    workers = ["--worker-urls", f"http://127.0.0.1:{backend}", "--policy", "round_robin", "--log-level", "warning"]
    return [str(environment / "bin" / "vllm-router"), *listen, *workers]


PEERS = {
    "litellm": Peer("litellm[proxy]==1.106.0", "/health/liveliness", 8, 8, _litellm),
    "vllm-router": Peer("vllm-router==0.1.17", "/health", 256, 64, _vllm_router),
}


def install(name: str, environment: Path) -> None:
    """Creates the peer's environment if it does not exist. Raises BenchFailed."""
    done = environment / "installed"
    requirement = PEERS[name].requirement
    if done.exists() and done.read_text(encoding="utf-8") == requirement:
        return
    print(f"installing {requirement} into {environment}", file=sys.stderr)
    pip = str(environment / "bin" / "pip")
    for command in ([sys.executable, "-m", "venv", str(environment)], [pip, "install", "--quiet", requirement]):
        made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        if made.returncode:
            raise BenchFailed(f"{requirement} could not be installed: {made.stderr.strip()[-500:]}")
    done.write_text(requirement, encoding="utf-8")


@contextlib.asynccontextmanager
async def peer(name: str, environment: Path, backend: FixedServer) -> AsyncIterator[Server]:
    """Runs an installed peer in front of the backend."""
    (port,) = free_ports(1)
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    command = PEERS[name].command(environment, port, backend.port)
    async with started(name, command, port, PEERS[name].probe, environ) as server:
        yield server
