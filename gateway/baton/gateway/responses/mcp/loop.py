"""Runs a response that calls MCP servers: generation, calls, generation, until the model calls none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import orjson

from baton.gateway.core import Delta, Generation, GenerationRequest, Sink, Usage
from baton.gateway.mcp.sessions import McpSessions
from baton.gateway.mcp.settings import McpSettings
from baton.gateway.mcp.tools import McpFailed, McpResult
from baton.gateway.responses.items import APPROVAL_REQUEST, Item
from baton.gateway.responses.mcp.request import RequestedServer
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.tools import ToolName
from baton.rpc.errors import ServiceError

_CLIENTS_TURN = ("function_call", "custom_tool_call", APPROVAL_REQUEST)
_NO_USAGE = Usage(0, 0, 0)
# Of JSON-RPC.
_PROTOCOL_ERROR, _INVALID_REQUEST, _INVALID_PARAMS = "mcp_protocol_error", -32600, -32602


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call of an earlier response that the client has approved."""

    server: RequestedServer
    name: str
    arguments: str
    call_id: str
    request_id: str  # of the approval request


@dataclass(frozen=True, slots=True)
class Round:
    """One generation of a response."""

    output: Sequence[Item]  # items of the response so far
    number: int
    calls_tools: bool  # False: the model must answer
    used_tokens: int  # by earlier rounds


class Rounds(Protocol):
    """Makes and starts the generations of one response."""

    async def request(self, wanted: Round) -> GenerationRequest:
        """Returns the generation. Raises ServiceError."""

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        """Starts it within the tenant's limits. Raises ServiceError."""


class ToolLoop:
    """Implements Generation for the response, and Sink for its rounds."""

    def __init__(
        self,
        running: RunningResponse,
        servers: Mapping[str, RequestedServer],
        connections: McpSessions,
        rounds: Rounds,
        settings: McpSettings,
        approved: Sequence[ApprovedCall],
        observe: Callable[[str, float], None],
    ) -> None:
        self._running = running
        self._servers = servers
        self._connections = connections
        self._rounds = rounds
        self._settings = settings
        self._approved = approved
        self._observe = observe  # takes each call's outcome and seconds
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()  # set when the first generation or call has begun
        self._generation: Generation | None = None
        self._ended: asyncio.Future[None] | None = None  # of the current round
        self._usage = _NO_USAGE
        self._num_calls = 0

    async def start(self, first: GenerationRequest, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Starts the loop, and returns when it has begun or failed. `spawn` runs what outlives the caller."""
        self._task = asyncio.create_task(self._run(first, spawn))
        await self._begun.wait()

    # Generation

    def abort(self) -> None:
        if self._generation is not None:
            self._generation.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def cancel(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    def resume(self) -> None:
        if self._generation is not None:
            self._generation.resume()

    # Sink

    @property
    def writable(self) -> bool:
        return self._running.writable

    def on_delta(self, delta: Delta) -> None:
        self._running.on_delta(delta)

    def on_done(self, usage: Usage) -> None:
        self._usage = _sum(self._usage, usage)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def on_error(self, error: ServiceError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _run(self, first: GenerationRequest, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        try:
            await self._run_rounds(first)
        except Exception as error:
            self._running.fail(error)
        finally:
            self._begun.set()
            spawn(self._connections.close())

    async def _run_rounds(self, first: GenerationRequest) -> None:
        running, request = self._running, first
        if self._approved:
            self._begun.set()
            await self._run_approved()
            request = await self._rounds.request(self._next(1))
        for number in count(1):
            num_items = len(running.output.complete)
            self._ended = asyncio.get_running_loop().create_future()
            self._generation = await self._rounds.start(request, self)
            self._begun.set()
            await self._ended
            calls = list(running.output.waiting)
            if not calls or running.cut_short:
                break
            await self._run_calls(calls)
            if any(item["type"] in _CLIENTS_TURN for item in running.output.complete[num_items:]):
                break
            most = running.response.max_output_tokens
            if most is not None and self._usage.completion_tokens >= most:
                running.cut_short = True
                break
            request = await self._rounds.request(self._next(number + 1))
        running.on_done(self._usage)

    def _next(self, number: int) -> Round:
        most = self._running.response.max_tool_calls
        may_call = number <= self._settings.max_rounds and (most is None or self._num_calls < most)
        return Round(list(self._running.output.complete), number, may_call, self._usage.completion_tokens)

    async def _run_approved(self) -> None:
        running = self._running
        for call in self._approved:
            tool = ToolName(call.name, server=call.server.label)
            running.show(running.output.begin_call(tool, call.arguments, call.call_id, call.request_id))
        await self._run_calls(list(running.output.waiting))

    async def _run_calls(self, items: Sequence[Item]) -> None:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(self._run_call(item, self._may_run()))

    def _may_run(self) -> bool:
        """Counts a call. Returns whether the request's limit allows it."""
        most = self._running.response.max_tool_calls
        self._num_calls += 1
        return most is None or self._num_calls <= most

    async def _run_call(self, item: Item, may_run: bool) -> None:
        begun = time.perf_counter()
        try:
            if not may_run:
                raise McpFailed("max_tool_calls is reached", _PROTOCOL_ERROR, _INVALID_REQUEST)
            server = self._servers[item["server_label"]]
            result = await self._connections.call(server.server, item["name"], _arguments_of(item))
        except McpFailed as failed:
            result = McpResult(error=failed.error)
        running = self._running
        if running.ended:
            return
        outcome = "completed" if result.error is None else "failed"
        self._observe(outcome, time.perf_counter() - begun)
        shown = {"output": result.output} if result.error is None else {"error": result.error}
        running.show(running.output.settle(item, outcome, **shown))


def _arguments_of(item: Item) -> dict[str, Any]:
    """Returns a call's arguments. Raises McpFailed if the model wrote no object."""
    try:
        arguments = orjson.loads(item["arguments"] or "{}")
    except orjson.JSONDecodeError as error:
        raise McpFailed(f"the arguments are not valid JSON: {error}", _PROTOCOL_ERROR, _INVALID_PARAMS) from None
    if not isinstance(arguments, dict):
        raise McpFailed("the arguments must be a JSON object", _PROTOCOL_ERROR, _INVALID_PARAMS)
    return arguments


def _sum(first: Usage, second: Usage) -> Usage:
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.cached_tokens + second.cached_tokens,
        first.reasoning_tokens + second.reasoning_tokens,
    )
