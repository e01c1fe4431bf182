"""Runs a file of requests in OpenAI's batch format on an engine of this process: no server, no store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO

from baton.gateway.access.identity import ANONYMOUS
from baton.gateway.access_log import switch_access_log
from baton.gateway.batches.running.line_call import Handler, call
from baton.gateway.batches.running.lines import Line, LineProblem, lines_of, request_of
from baton.gateway.batches.running.results import answered, not_run
from baton.gateway.batches.service import TARGETS, TARGETS_FOR_VECTORS
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.config import GatewayConfig
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest_routes import rest_routes
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.storage.store import MemoryRecordStore
from baton.llm.engine.arguments import EngineArguments
from baton.llm.engine.compute_threads import sleep_between_steps
from baton.llm.engine.local_engine import LocalEngine, open_engine
from baton.llm.progress import TextBar

# Lines that run or wait to be written, as a multiple of the engine's batch: answers are written in the input's order.
_OPEN_BATCHES = 4
_ANY_NUMBER = 1 << 30
_RESPONSE_SECONDS = 60
_RESPONSE_BYTES = 1 << 20  # of responses that lines ask to be stored; there is no later request for them


@dataclass(slots=True)
class FileCounts:
    """What became of the lines."""

    completed: int = 0
    failed: int = 0  # answered with an error
    problems: list[tuple[int, LineProblem]] = field(default_factory=list)  # lines that are no request, by number

    @property
    def total(self) -> int:
        """Returns the number of lines."""
        return self.completed + self.failed + len(self.problems)


def run_file(
    engine: EngineArguments, gateway: GatewayConfig, source: IO[bytes], output: IO[bytes], bar: TextBar
) -> FileCounts:
    """Writes a result for each line of `source`, in its order. Raises ServiceError if the model cannot be loaded."""
    sleep_between_steps()
    switch_access_log(False)
    return asyncio.run(_run(engine, gateway, source, output, bar))


async def _run(
    arguments: EngineArguments, config: GatewayConfig, source: IO[bytes], output: IO[bytes], bar: TextBar
) -> FileCounts:
    async with open_engine(arguments) as engine, _handlers(engine, config) as handlers:
        most = _OPEN_BATCHES * arguments.config.max_num_requests
        return await _FileRun(handlers, source, output, bar.update, most).run()


@asynccontextmanager
async def _handlers(engine: LocalEngine, config: GatewayConfig) -> AsyncIterator[Mapping[str, Handler]]:
    """Yields the gateway's handlers before the engine, by route: those for vectors, or those for tokens."""
    config = replace(config, request_timeout=0.0)
    store = ResponseStore(MemoryRecordStore(_RESPONSE_SECONDS, _RESPONSE_BYTES))
    async with BodyThread() as bodies:
        admission = ConcurrencyLimiter(_ANY_NUMBER)
        generator = engine.generator
        serving = ServingContext(
            config, engine.catalog, generator, admission, engine.metrics, bodies=bodies, pooler=generator.pooler
        )
        routes = rest_routes(serving, store, list)
        for_vectors = engine.info.HasField("pooler")
        yield {
            one.path: one.handler
            for one in routes
            if one.method == "POST" and one.path in TARGETS and (one.path in TARGETS_FOR_VECTORS) is for_vectors
        }
    await store.close(0)


class _FileRun:
    """The run of one file."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        source: IO[bytes],
        output: IO[bytes],
        on_line: Callable[[], None],
        most: int,
    ) -> None:
        self._handlers = handlers
        self._source = source
        self._output = output
        self._on_line = on_line
        self._places = asyncio.Semaphore(most)
        self._ids: dict[str, int] = {}  # numbers of lines
        self._ready: dict[int, bytes] = {}  # results that wait for those before them, by index
        self._num_written = 0
        self._counts = FileCounts()

    async def run(self) -> FileCounts:
        """Runs the file."""
        async with asyncio.TaskGroup() as group:
            async for line in lines_of(self._read):
                await self._places.acquire()
                group.create_task(self._run_line(line))
        self._output.flush()
        return self._counts

    async def _run_line(self, line: Line) -> None:
        counts, custom_id = self._counts, None
        try:
            request = request_of(line.data, tuple(self._handlers))
            custom_id = request.custom_id
            self._check_id(line, custom_id)
        except LineProblem as problem:
            counts.problems.append((line.number, problem))
            named = LineProblem(problem.code, f"line {line.number}: {problem.message}")
            self._write(line, not_run(line.index, custom_id, named).data)
            return
        answer = await call(self._handlers[request.url], request.url, request.body, ANONYMOUS, "run-batch")
        result = answered(line.index, request.custom_id, answer)
        counts.failed += result.is_error
        counts.completed += not result.is_error
        self._write(line, result.data)

    def _check_id(self, line: Line, custom_id: str) -> None:
        first = self._ids.setdefault(custom_id, line.number)
        if first != line.number:
            message = f"custom_id {custom_id[:80]!r} is that of line {first} too; each must be used once"
            raise LineProblem("duplicate_custom_id", message, "custom_id")

    def _write(self, line: Line, data: bytes) -> None:
        self._ready[line.index] = data
        while data := self._ready.pop(self._num_written, b""):
            self._output.write(data)
            self._num_written += 1
            self._places.release()
            self._on_line()

    async def _read(self, offset: int, length: int) -> bytes:
        return await asyncio.to_thread(partial(os.pread, self._source.fileno(), length, offset))
