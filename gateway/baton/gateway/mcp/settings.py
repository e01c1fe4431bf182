"""Which MCP servers the gateway calls, and the limits of their tools. Imports no MCP library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import SplitResult, urlsplit

from baton.rpc.errors import InvalidRequest

LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LABELLED = re.compile(r"([A-Za-z0-9_-]{1,64})=(.+)")
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}")
_SSE_PATH = "/sse"  # where vLLM's tool servers listen
_PORTS = {"http": 80, "https": 443}
_WRONG = re.compile(r"[\s\\\x00-\x1f\x7f]")
_DOTS = re.compile(r"/\.{1,2}(?:/|$)|%2e|%2f|%5c", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server, and the headers of the requests to it."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class McpSettings:
    """The operator's settings."""

    tool_servers: Sequence[str] = ()  # [LABEL=]URL or HOST:PORT, each
    allowed_servers: Sequence[str] = ()  # URLs; clients may name these and paths below them
    timeout: float = 30.0  # seconds of one call or listing
    max_rounds: int = 16  # generations of one response that may call tools
    max_output_bytes: int = 64 << 10  # of one call's output

    @property
    def enabled(self) -> bool:
        """Returns whether requests may use MCP servers."""
        return bool(self.tool_servers or self.allowed_servers)

    @cached_property
    def named(self) -> Mapping[str, McpServer]:
        """Returns the operator's servers by label. Raises InvalidRequest."""
        servers: dict[str, McpServer] = {}
        for text in self.tool_servers:
            server = _tool_server(text)
            if server.label in servers:
                message = f"tool_server: {server.label} names two servers; put LABEL= before the URLs"
                raise InvalidRequest(message, field="tool_server")
            servers[server.label] = server
        return servers

    def validate(self) -> None:
        """Raises InvalidRequest for a server that is no URL."""
        _ = self.named
        for url in self.allowed_servers:
            _split(url, "allowed_mcp_servers")

    def check_url(self, url: str, field: str) -> None:
        """Raises InvalidRequest for a server that clients may not name."""
        wanted = _split(url, field)
        if not any(_contains(_split(allowed, "allowed_mcp_servers"), wanted) for allowed in self.allowed_servers):
            raise InvalidRequest(f"{field} is none of the MCP servers that this gateway may call", field=field)


def _tool_server(text: str) -> McpServer:
    match = _LABELLED.fullmatch(text)
    label, url = (match[1], match[2]) if match else ("", text)
    if _ADDRESS.fullmatch(url):
        url = f"http://{url}{_SSE_PATH}"
    parts = _split(url, "tool_server")
    label = label or re.sub(r"[^A-Za-z0-9_-]", "_", parts.hostname or "")[:64]
    return McpServer(label, url)


def _split(url: str, field: str) -> SplitResult:
    """Returns the parts of a plain URL: without user, fragment, dots in the path or characters that parsers read
    differently.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if _WRONG.search(url) or parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise InvalidRequest(f"{field} must be an http or https URL, such as https://mcp.example.com/mcp", field=field)
    if "@" in parts.netloc or parts.fragment or "#" in url or _DOTS.search(parts.path):
        raise InvalidRequest(f"{field} must have no user, no fragment and no dots in its path", field=field)
    return parts


def _contains(allowed: SplitResult, wanted: SplitResult) -> bool:
    if (allowed.scheme, allowed.hostname, _port(allowed)) != (wanted.scheme, wanted.hostname, _port(wanted)):
        return False
    path = allowed.path.rstrip("/")
    return wanted.path == allowed.path or wanted.path.rstrip("/") == path or wanted.path.startswith(f"{path}/")


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]
