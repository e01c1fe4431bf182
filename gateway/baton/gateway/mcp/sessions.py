"""The sessions of one response with MCP servers, opened at their first use."""

from __future__ import annotations

import asyncio
import importlib
import logging
from typing import TYPE_CHECKING, Any

from baton.gateway.mcp.settings import McpServer, McpSettings
from baton.gateway.mcp.tools import McpResult, McpTool
from baton.rpc.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.gateway.mcp.connection import McpConnection

_CONNECTION = "baton.gateway.mcp.connection"


def load_client(settings: McpSettings) -> None:
    """Imports the client library if it is needed, so that no request waits for it. Raises InvalidRequest."""
    if not settings.enabled:
        return
    field = "tool_server" if settings.tool_servers else "allowed_mcp_servers"
    try:
        importlib.import_module(_CONNECTION)
    except ImportError as error:
        install = 'pip install "baton-inference[mcp]"'
        raise InvalidRequest(f"{field} needs the package {error.name}: {install}", field=field) from error
    # It logs every request with its URL.
    logging.getLogger("httpx2").setLevel(logging.WARNING)


class McpSessions:
    """Sessions by the server's label."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._open: dict[str, McpConnection] = {}

    async def tools(self, server: McpServer) -> list[McpTool]:
        """Returns the tools of a server. Raises McpFailed."""
        return await self._of(server).tools()

    async def call(self, server: McpServer, name: str, arguments: dict[str, Any]) -> McpResult:
        """Calls a tool. Raises McpFailed."""
        return await self._of(server).call(name, arguments)

    async def close(self) -> None:
        """Ends all sessions. Idempotent."""
        connections, self._open = list(self._open.values()), {}
        await asyncio.gather(*(connection.close() for connection in connections))

    def _of(self, server: McpServer) -> McpConnection:
        if server.label not in self._open:
            from baton.gateway.mcp.connection import McpConnection

            self._open[server.label] = McpConnection(server, self._settings)
        return self._open[server.label]
