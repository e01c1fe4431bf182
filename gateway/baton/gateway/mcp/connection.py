"""A session with one MCP server, by the official client. Imports it, which takes a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import httpx2
import mcp_types
import orjson
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from baton.gateway.mcp.settings import McpServer, McpSettings
from baton.gateway.mcp.tools import McpFailed, McpResult, McpTool, shortened

_log = logging.getLogger(__name__)

_MAX_TOOLS = 256
_MAX_PAGES = 32
# Of one HTTP response, which is held in memory.
_MAX_RESPONSE_BYTES = 8 << 20
_LEAST_ERROR = 400
_MAX_MESSAGE_CHARS = 300
_SSE_SUFFIX = "/sse"

T = TypeVar("T")
_Work = Callable[[Client], Awaitable[Any]]
_Request = tuple[_Work, asyncio.Future[Any]]


class McpConnection:
    """One server during one response.

    The session runs in a task of its own: if the server breaks, the client library cancels the task that opened the
    session. Its requests run at the same time.
    """

    def __init__(self, server: McpServer, settings: McpSettings) -> None:
        self._server = server
        self._settings = settings
        self._requests: asyncio.Queue[_Request | None] = asyncio.Queue()  # None ends the session
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._status = 0  # of the last HTTP response

    async def tools(self) -> list[McpTool]:
        """Returns all tools of the server. Raises McpFailed."""
        return await self._ask(_all_tools)

    async def call(self, name: str, arguments: dict[str, Any]) -> McpResult:
        """Calls a tool. Errors that the tool reports are results. Raises McpFailed."""
        result: mcp_types.CallToolResult = await self._ask(lambda client: client.call_tool(name, arguments))
        text = shortened(_text_of(result), self._settings.max_output_bytes)
        if result.is_error:
            content = [{"type": "text", "text": text}]
            return McpResult(text, {"type": "mcp_tool_execution_error", "content": content})
        return McpResult(text)

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        self._replace_session()
        for task in self._ending:
            task.cancel()
        if self._ending:
            await asyncio.wait(self._ending, timeout=self._settings.timeout)

    async def _ask(self, work: Callable[[Client], Awaitable[T]]) -> T:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(self._requests))
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((work, future))
        try:
            async with asyncio.timeout(self._settings.timeout):
                return await future
        except TimeoutError:
            # The session may be stuck.
            self._replace_session()
            seconds = self._settings.timeout
            raise McpFailed(f"the MCP server did not answer within {seconds:g} s", code=504) from None

    def _replace_session(self) -> None:
        """Sends later requests to a new session. This one ends with the requests that it has."""
        task, requests = self._task, self._requests
        self._task, self._requests = None, asyncio.Queue()
        if task is not None:
            requests.put_nowait(None)
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _serve(self, requests: asyncio.Queue[_Request | None]) -> None:
        running: set[asyncio.Future[Any]] = set()
        failure = McpFailed("the session with the MCP server has ended")
        try:
            async with self._session() as client, asyncio.TaskGroup() as tasks:
                while (request := await requests.get()) is not None:
                    work, future = request
                    if not future.done():
                        running.add(future)
                        answer = tasks.create_task(self._answer(work, client, future))
                        future.add_done_callback(partial(_stop, answer))
        except Exception as error:
            _log.info("MCP server %s: %s", self._server.label, type(_cause(error)).__name__)
            failure = self._failure_of(error)
        finally:
            while not requests.empty():
                if (request := requests.get_nowait()) is not None:
                    running.add(request[1])
            for future in running:
                if not future.done():
                    future.set_exception(failure)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Client]:
        url = self._server.url
        if url.rstrip("/").endswith(_SSE_SUFFIX):
            async with Client(sse_client(url, httpx_client_factory=self._http_client), cache=None) as client:
                yield client
            return
        async with (
            self._http_client() as http,
            Client(streamable_http_client(url, http_client=http), cache=None) as client,
        ):
            yield client

    def _http_client(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers={**self._server.headers, **(headers or {})},
            timeout=httpx2.Timeout(self._settings.timeout),
            trust_env=False,
            transport=_BoundedTransport(self._saw),
        )

    def _saw(self, status: int) -> None:
        self._status = status

    async def _answer(self, work: _Work, client: Client, future: asyncio.Future[Any]) -> None:
        """Runs one request. Errors of the session itself are raised."""
        try:
            result = await work(client)
        except (MCPError, McpFailed) as error:
            if not future.done():
                future.set_exception(self._failure_of(error))
            return
        if not future.done():
            future.set_result(result)

    def _failure_of(self, error: BaseException) -> McpFailed:
        """Describes an error without the server's URL, which may hold secrets."""
        cause = _cause(error)
        if isinstance(cause, McpFailed):
            return cause
        if self._status >= _LEAST_ERROR:
            return McpFailed(f"the MCP server answered with HTTP {self._status}", code=self._status)
        if isinstance(cause, MCPError):
            message = cause.message.partition("\n")[0][:_MAX_MESSAGE_CHARS]
            return McpFailed(message, "mcp_protocol_error", cause.code)
        if isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout):
            return McpFailed("cannot connect to the MCP server")
        if isinstance(cause, httpx2.HTTPError):
            return McpFailed(f"the connection to the MCP server broke ({type(cause).__name__})")
        return McpFailed(f"the MCP server does not speak the protocol ({type(cause).__name__})")


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Reports the status of each response, and ends one that is too large."""

    def __init__(self, saw: Callable[[int], None]) -> None:
        super().__init__(trust_env=False)
        self._saw = saw

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        self._saw(response.status_code)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > _MAX_RESPONSE_BYTES:
                raise httpx2.ReadError(f"the response has more than {_MAX_RESPONSE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _all_tools(client: Client) -> list[McpTool]:
    tools: list[McpTool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += map(_tool_of, page.tools)
        cursor = page.next_cursor
        if not cursor:
            break
    if cursor or len(tools) > _MAX_TOOLS:
        raise McpFailed(f"the MCP server lists more than {_MAX_TOOLS} tools")
    return tools


def _tool_of(tool: mcp_types.Tool) -> McpTool:
    hints = tool.annotations
    annotations = hints.model_dump(mode="json", by_alias=True, exclude_none=True) if hints is not None else None
    return McpTool(tool.name, tool.description, tool.input_schema, annotations)


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Returns the result as text. What is no text is described."""
    if not result.content and result.structured_content is not None:
        return orjson.dumps(result.structured_content).decode()
    return "\n".join(map(_block_text, result.content))


def _block_text(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.ResourceLink):
        return f"[{block.uri}]"
    if isinstance(block, mcp_types.EmbeddedResource):
        resource = block.resource
        return resource.text if isinstance(resource, mcp_types.TextResourceContents) else f"[{resource.uri}]"
    return f"[{block.type}, {block.mime_type}]"


def _stop(answer: asyncio.Task[None], ended: asyncio.Future[Any]) -> None:
    """Stops a request whose caller waits no more."""
    answer.cancel()


def _cause(error: BaseException) -> BaseException:
    """Returns the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
