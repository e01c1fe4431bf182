"""The gateway's REST server with a scripted generator, and a raw HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from baton.gateway.access.gate import OpenGate
from baton.gateway.batches.batching import open_batching
from baton.gateway.bodies.remote_reader import RemoteReader
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.config import GatewayConfig
from baton.gateway.core import Delta, GenerationRequest, Sink, TextPooler, TokenLogprob, TopLogprob, Usage
from baton.gateway.http.connections import Connections
from baton.gateway.http.cors import Cors
from baton.gateway.http.host_check import host_check_of
from baton.gateway.http.intake import Intake
from baton.gateway.http.limits import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.models.served import ModelCatalog, ServedModel, load_served_model
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.format_choice import FormatFlags
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.app import App
from baton.gateway.rest_routes import rest_routes
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.storage.store import MemoryRecordStore, RecordStore
from baton.v1 import types_pb2

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
NO_FORMATS = FormatFlags(tools="none", reasoning="none")
INFO = types_pb2.ModelInfo(
    name="storyteller-7m", digest=bytes(range(16)), max_model_len=2048, vocab_size=4096, block_size=16
)


class FakeGeneration:
    """One started request, driven by the test or by the generator's script."""

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.aborted = asyncio.Event()
        self.resumed = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()

    def cancel(self) -> None:
        for index in range(self.request.n):
            self.emit("", index, token_ids=(), finish_reason="abort")
        self.done(0)
        self.aborted.set()

    def resume(self) -> None:
        self.resumed.set()

    def emit(self, text: str, index: int = 0, **more: Any) -> None:
        if not self.aborted.is_set():
            self.sink.on_delta(Delta(index, text, more.pop("token_ids", (7,)), **more))

    def finish(self, index: int = 0, reason: str = "stop", stop_reason: str | int | None = None) -> None:
        self.emit("", index, token_ids=(), finish_reason=reason, stop_reason=stop_reason)

    def done(self, completion_tokens: int = 2, cached_tokens: int = 0) -> None:
        if not self.aborted.is_set():
            self.sink.on_done(Usage(len(self.request.prompt_token_ids), completion_tokens, cached_tokens))


Script = Callable[[FakeGeneration], None]


def say(*texts: str) -> Script:
    """Returns a script in which every choice outputs these texts and stops."""

    def script(generation: FakeGeneration) -> None:
        for index in range(generation.request.n):
            for text in texts:
                generation.emit(text, index)
            generation.finish(index)
        generation.done(len(texts) * generation.request.n)

    return script


class FakeGenerator:
    """Implements Generator. Without a script the test drives `started` generations itself."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.refusal: Exception | None = None
        self.started: list[FakeGeneration] = []
        self.hold: asyncio.Event | None = None  # start() waits for it

    async def start(self, request: GenerationRequest, sink: Sink) -> FakeGeneration:
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal is not None:
            raise self.refusal
        generation = FakeGeneration(request, sink)
        self.started.append(generation)
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, generation)
        return generation

    async def next(self, number: int = 0) -> FakeGeneration:
        await until(lambda: len(self.started) > number)
        return self.started[number]


@dataclass
class Rest:
    """A running REST server."""

    port: int
    generator: FakeGenerator
    catalog: ModelCatalog
    admission: ConcurrencyLimiter
    metrics: GatewayMetrics
    server: HttpServer
    responses: ResponseStore
    missing: list[str] = field(default_factory=list)

    async def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        async with RawClient.connect(self.port) as client:
            return await client.request(method, path, body, headers)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return await self.request("POST", path, body, headers)

    async def chat(self, text: str = "Hi", **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})


@cache
def _loaded() -> ServedModel:
    return load_served_model(str(SAMPLE), formats=NO_FORMATS)


def sample_model() -> ServedModel:
    """Returns the sample model with a new tokenizer, because tokenizers have caches. The template is compiled once."""
    one = _loaded()
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    return ServedModel(one.name, tokenizer, one.template, one.defaults, one.output_format, files=one.files)


@contextlib.asynccontextmanager
async def rest_side(
    script: Script | None = None,
    limits: HttpLimits | None = None,
    generator: FakeGenerator | None = None,
    store: RecordStore | None = None,
    pooler: TextPooler | None = None,
    **settings: Any,
) -> AsyncIterator[Rest]:
    generator = generator or FakeGenerator(script)
    catalog = ModelCatalog([sample_model()])
    info = types_pb2.ModelInfo()
    info.CopyFrom(INFO)  # each test may change its copy
    catalog.update([info])
    config = GatewayConfig(model=str(SAMPLE), **settings)
    admission = ConcurrencyLimiter(config.max_streams)
    connections = Connections()
    counters = GenerationCounters()
    metrics = GatewayMetrics(counters, lambda: admission.in_use, lambda: len(connections))
    bodies = BodyThread(RemoteReader())
    serving = ServingContext(config, catalog, generator, admission, metrics, bodies=bodies, pooler=pooler)
    missing: list[str] = []
    responses = ResponseStore(store or MemoryRecordStore(60, 1 << 20))
    cors = Cors(config.cors_origins, refuses_strangers=not config.api_keys and not config.allow_anonymous)
    hosts = host_check_of(config.allowed_hosts, bool(config.api_keys), (config.rest_listen,))
    batching = open_batching(config, OpenGate())
    spooled = Intake() if batching is None else Intake(spooled_bytes=lambda one: batching.spooled_bytes(one, bool))
    running = contextlib.nullcontext() if batching is None else batching.running()
    if batching is not None:
        metrics.register(batching.collector)
    app = App(rest_routes(serving, responses, lambda: missing, None, batching), metrics, cors=cors, hosts=hosts)
    async with bodies, HttpServer("127.0.0.1:0", app, limits, connections, intake=spooled) as server, running:
        yield Rest(server.port, generator, catalog, admission, metrics, server, responses, missing)
    await responses.close(0)


@dataclass
class Answer:
    """A response as received."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Returns the data of an event stream, without [DONE], which must be last."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-3:]
        assert all(block.startswith("data: ") for block in blocks[:-1])
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


class RawClient:
    """An HTTP/1.1 client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, port: int, **options: Any) -> AsyncIterator[RawClient]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        await self.send(request_bytes(method, path, body, headers))
        return await self.answer(has_body=method != "HEAD")

    async def answer(self, has_body: bool = True) -> Answer:
        async with asyncio.timeout(10):
            status, headers = await self.head()
            return Answer(status, headers, await self._body(headers) if has_body else b"")

    async def head(self) -> tuple[int, dict[str, str]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        assert head[0].startswith("HTTP/1.1 ")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") == "chunked":
            pieces = []
            while piece := await self.chunk():
                pieces.append(piece)
            return b"".join(pieces)
        return await self.reader.read()

    async def closed(self) -> bool:
        """Waits until the server has closed the connection."""
        async with asyncio.timeout(5):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost", **(headers or {})}
    if body is not None:
        fields = {"content-type": "application/json", "content-length": str(len(data)), **fields}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def logprob(token: str, value: float, *top: tuple[str, float]) -> TokenLogprob:
    tops = tuple(TopLogprob(name, name.encode(), 1, one) for name, one in top)
    return TokenLogprob(token, token.encode(), 1, value, 1, tops)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Polls until a condition holds."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not true within {seconds} s")
