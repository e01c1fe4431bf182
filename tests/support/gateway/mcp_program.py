"""An MCP server by the official package, as a process: mcp_program.py PORT TRANSPORT."""

from __future__ import annotations

import asyncio
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations

server = MCPServer("weather")
notes: list[str] = []


@server.tool()
def get_weather(city: str) -> str:
    """The weather somewhere."""
    return f"It rains in {city}."


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def read_notes() -> str:
    """All notes."""
    return "; ".join(notes) or "no notes"


@server.tool()
def add_note(text: str) -> str:
    """Adds a note."""
    notes.append(text)
    return "added"


@server.tool()
def fail(station: str) -> str:
    """Fails."""
    raise ValueError(f"there is no station {station}")


@server.tool()
def write(num_bytes: int) -> str:
    """A long text."""
    return "é" * (num_bytes // 2)


@server.tool()
async def wait(seconds: float) -> str:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return "waited"


meeting = asyncio.Barrier(3)


@server.tool()
async def meet() -> str:
    """Waits for two other calls."""
    await meeting.wait()
    return "all have come"


@server.tool()
def whoami(context: Context) -> str:
    """The caller's token."""
    return context.headers.get("authorization", "nobody") if context.headers else "nobody"


if __name__ == "__main__":
    if sys.argv[2] == "sse":
        server.run("sse", port=int(sys.argv[1]))
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
