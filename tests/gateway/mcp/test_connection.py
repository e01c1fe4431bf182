"""Sessions with servers that break the protocol, stall, or send too much: typed failures, in time, no task left."""

import asyncio
import contextlib
import json
import logging

import pytest

from baton.gateway.mcp.connection import McpConnection
from baton.gateway.mcp.settings import McpServer, McpSettings
from baton.gateway.mcp.tools import McpFailed

SETTINGS = McpSettings(timeout=1.0)
VERSION = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}


def answered(body, kind="application/json", status="200 OK", extra=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{extra}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Server:
    """Answers each JSON-RPC method by a function of the message, and records the methods and headers."""

    def __init__(self, **methods):
        self.methods = {"initialize": lambda message: VERSION, **methods}
        self.seen = []
        self.heads = []
        self.running = {}

    async def serve(self, reader, writer):
        self.running[asyncio.current_task()] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(lines.get("content-length", 0)))
                writer.write(await self.answer(json.loads(body) if body else {}))
                await writer.drain()

    async def stop(self):
        for task, writer in self.running.items():
            task.cancel()
            writer.close()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def answer(self, message):
        method = message.get("method", "")
        self.seen.append(method)
        if "id" not in message:
            return answered(b"", status="202 Accepted") if message else answered(b"", status="405 Method Not Allowed")
        if method not in self.methods:
            error = {"code": -32601, "message": f"no {method}"}
            return answered({"jsonrpc": "2.0", "id": message["id"], "error": error})
        result = self.methods[method](message)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, bytes):
            return result
        return answered({"jsonrpc": "2.0", "id": message["id"], "result": result})


@contextlib.asynccontextmanager
async def connected(server, settings=SETTINGS, **fields):
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    connection = McpConnection(McpServer("s", f"http://127.0.0.1:{port}/mcp", **fields), settings)
    before = asyncio.all_tasks()
    try:
        yield connection
    finally:
        await connection.close()
        left = asyncio.all_tasks() - before - set(server.running)
        listener.close()
        await server.stop()
        assert left == set()


def tools(*names, **page):
    listed = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
    return lambda message: {"tools": listed, **page}


async def test_an_older_server_is_listed_and_called():
    text = [{"type": "text", "text": "a"}, {"type": "image", "data": "QQ==", "mimeType": "image/png"}]
    text.append({"type": "resource", "resource": {"uri": "x://y", "text": "b"}})
    server = Server(**{"tools/list": tools("f"), "tools/call": lambda message: {"content": text}})
    async with connected(server, headers={"X-Key": "k"}) as connection:
        assert [tool.name for tool in await connection.tools()] == ["f"]
        result = await connection.call("f", {"x": 1})
    assert (result.output, result.error) == ("a\n[image, image/png]\nb", None)
    assert all("x-key: k" in head.lower() for head in server.heads)
    assert "tools/call" in server.seen


async def test_pages_are_read_to_a_limit():
    def page(message):
        cursor = int((message.get("params") or {}).get("cursor") or 0)
        return tools(f"f{cursor}", nextCursor=str(cursor + 1))(message)

    async with connected(Server(**{"tools/list": page})) as connection:
        with pytest.raises(McpFailed, match="more than 256 tools"):
            await connection.tools()
    async with connected(Server(**{"tools/list": tools(*map(str, range(257)))})) as connection:
        with pytest.raises(McpFailed, match="more than 256 tools"):
            await connection.tools()


REDIRECT = answered(b"", status="307 Temporary Redirect", extra="location: http://169.254.169.254/latest\r\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered(b"{nonsense"), "Failed to parse JSON response"),
        (answered(b"", status="401 Unauthorized"), "answered with HTTP 401"),
        (answered(b"oops", status="500 Internal Server Error"), "answered with HTTP 500"),
        (answered(b"<html>", "text/html"), "Unexpected content type: text/html"),
        (REDIRECT, "Redirect to http://169.254.169.254/latest not followed"),
        (answered(b" " * (9 << 20)), r"broke \(ReadError\)"),
        (b"no HTTP\r\n\r\n", r"broke \(RemoteProtocolError\)"),
    ],
)
async def test_what_is_no_protocol_is_a_failure(answer, said):
    class Broken(Server):
        async def answer(self, message):
            return answer

    async with connected(Broken()) as connection:
        with pytest.raises(McpFailed, match=said) as failed:
            await connection.tools()
    assert "127.0.0.1" not in failed.value.message


async def test_a_refused_method_is_a_protocol_error():
    async with connected(Server(**{"tools/list": tools("f")})) as connection:
        await connection.tools()
        with pytest.raises(McpFailed, match="no tools/call") as failed:
            await connection.call("f", {})
    assert failed.value.error == {"type": "mcp_protocol_error", "code": -32601, "message": "no tools/call"}


async def test_a_stalled_call_times_out_and_the_next_one_works():
    stalls = [True]

    async def call(message):
        if stalls.pop() if stalls else False:
            await asyncio.sleep(60)
        return {"content": [{"type": "text", "text": "ok"}]}

    server = Server(**{"tools/list": tools("f"), "tools/call": call})
    async with connected(server, McpSettings(timeout=0.3)) as connection:
        with pytest.raises(McpFailed, match=r"within 0\.3 s") as failed:
            await connection.call("f", {})
        assert failed.value.error["code"] == 504
        assert (await connection.call("f", {})).output == "ok"
    assert server.seen.count("initialize") == 2


async def test_a_server_that_goes_away_fails_the_call_only(caplog):
    gone = [True]

    def call(message):
        if gone:
            gone.clear()
            return b""
        return {"content": [], "structuredContent": {"a": 1}}

    class Leaving(Server):
        async def serve(self, reader, writer):
            self.writer = writer
            await super().serve(reader, writer)

        async def answer(self, message):
            result = await super().answer(message)
            if result == b"":
                self.writer.close()
            return result

    with caplog.at_level(logging.INFO):
        async with connected(Leaving(**{"tools/list": tools("f"), "tools/call": call})) as connection:
            with pytest.raises(McpFailed):
                await connection.call("f", {})
            assert (await connection.call("f", {})).output == '{"a":1}'
    assert "127.0.0.1" not in "".join(record.message for record in caplog.records if record.name.startswith("baton"))
