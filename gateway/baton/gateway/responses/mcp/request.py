"""The MCP tools of a request: which servers, which of their tools, and which calls a client must approve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.http.ignored_fields import ignored_tool
from baton.gateway.mcp.settings import LABEL, McpServer, McpSettings
from baton.gateway.mcp.tools import McpTool
from baton.gateway.parsing.tool import Tool
from baton.gateway.responses.tools import ServedTools, ToolName
from baton.rpc.errors import InvalidRequest

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
# What the connection itself sets.
_RESERVED_HEADERS = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept", "upgrade", "te")
)
_OTHER_SERVERS = ("connector_id", "tunnel_id")
_IGNORED = ("allowed_callers", "defer_loading")


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some tools of a server. None: any."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def has(self, tool: McpTool) -> bool:
        """Returns whether the tool is one of them."""
        if self.names is not None and tool.name not in self.names:
            return False
        return self.read_only is None or tool.is_read_only == self.read_only


_NO_TOOL = ToolFilter(frozenset())


@dataclass(frozen=True, slots=True)
class RequestedServer:
    """A server that a request may call."""

    server: McpServer
    place: int  # index in the request's tools
    allowed: ToolFilter = field(default_factory=ToolFilter)
    never: ToolFilter = _NO_TOOL  # tools whose calls need no approval; others do

    @property
    def label(self) -> str:
        return self.server.label


def requested_servers(
    given: Sequence[Mapping[str, Any]] | None, settings: McpSettings
) -> tuple[dict[str, RequestedServer], list[str]]:
    """Returns the servers by label, and the names of ignored fields. Raises InvalidRequest that names the field."""
    servers: dict[str, RequestedServer] = {}
    ignored: list[str] = []
    for index, tool in enumerate(given or ()):
        if tool.get("type") != "mcp":
            continue
        if not settings.enabled:
            ignored.append(ignored_tool(index, "mcp"))
            continue
        ignored += [f"tools[{index}].{name}" for name in _IGNORED if tool.get(name) is not None]
        server = _requested(tool, index, settings)
        if server.label in servers:
            name = f"tools.{index}.server_label"
            raise InvalidRequest(f"{name}: there are two servers named {server.label!r}", field=name)
        servers[server.label] = server
    return servers, ignored


def with_mcp_tools(served: ServedTools, server: RequestedServer, tools: Sequence[McpTool]) -> ServedTools:
    """Returns the tools with those of a server that are allowed. Raises InvalidRequest for two of one name."""
    more, names = list(served.tools), dict(served.names)
    for tool in tools:
        if not server.allowed.has(tool) or _TOOL_NAME.fullmatch(tool.name) is None:
            continue
        name = ToolName(tool.name, server=server.label, needs_approval=not server.never.has(tool))
        if name.flat in names:
            where = f"tools.{server.place}"
            raise InvalidRequest(f"{where}: there are two tools named {name.flat!r}", field=where)
        names[name.flat] = name
        more.append(Tool(name.flat, tool.description, tool.input_schema, place=server.place))
    return ServedTools(tuple(more), names, served.ignored)


def _requested(tool: Mapping[str, Any], index: int, settings: McpSettings) -> RequestedServer:
    where = f"tools.{index}"
    label = tool.get("server_label")
    if not isinstance(label, str) or LABEL.fullmatch(label) is None:
        raise InvalidRequest(
            f"{where}.server_label must be 1 to 64 letters, digits, - or _", field=f"{where}.server_label"
        )
    for name in _OTHER_SERVERS:
        if tool.get(name) is not None:
            raise InvalidRequest(f"{where}.{name} is not supported; give server_url", field=f"{where}.{name}")
    url = tool.get("server_url")
    if url is None:
        server = _named(tool, label, where, settings)
    elif not isinstance(url, str):
        raise InvalidRequest(f"{where}.server_url must be a string", field=f"{where}.server_url")
    else:
        settings.check_url(url, f"{where}.server_url")
        server = McpServer(label, url, _headers(tool, where))
    return RequestedServer(
        server,
        index,
        _filter(tool.get("allowed_tools"), f"{where}.allowed_tools"),
        _never(tool.get("require_approval"), f"{where}.require_approval", by_default=url is not None),
    )


def _named(tool: Mapping[str, Any], label: str, where: str, settings: McpSettings) -> McpServer:
    for name in ("headers", "authorization"):
        if tool.get(name):
            raise InvalidRequest(f"{where}.{name} is allowed only with server_url", field=f"{where}.{name}")
    if label not in settings.named:
        known = ", ".join(settings.named) or "none"
        raise InvalidRequest(
            f"{where}.server_label is {label!r}; without server_url, give one of this gateway's tool servers: {known}",
            field=f"{where}.server_label",
        )
    return settings.named[label]


def _headers(tool: Mapping[str, Any], where: str) -> dict[str, str]:
    given, token = tool.get("headers") or {}, tool.get("authorization")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where}.headers must be an object", field=f"{where}.headers")
    headers: dict[str, str] = {}
    for name, value in given.items():
        valid = isinstance(value, str) and _HEADER_VALUE.fullmatch(value) and _HEADER_NAME.fullmatch(name)
        if not valid or name.lower() in _RESERVED_HEADERS:
            raise InvalidRequest(f"{where}.headers: {name[:64]!r} cannot be sent", field=f"{where}.headers")
        headers[name] = value
    if token is not None:
        if not isinstance(token, str) or not _HEADER_VALUE.fullmatch(token):
            raise InvalidRequest(f"{where}.authorization must be a token", field=f"{where}.authorization")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _never(given: object, where: str, by_default: bool) -> ToolFilter:
    """Returns the tools whose calls need no approval. `by_default`: whether calls need one if nothing is said."""
    if given is None:
        return _NO_TOOL if by_default else ToolFilter()
    if given in ("always", "never"):
        return ToolFilter() if given == "never" else _NO_TOOL
    if not isinstance(given, Mapping) or not set(given) <= {"always", "never"}:
        raise InvalidRequest(f"{where} must be always, never, or an object with them", field=where)
    _filter(given.get("always"), f"{where}.always")
    # Tools under neither of the two need an approval.
    return _NO_TOOL if given.get("never") is None else _filter(given["never"], f"{where}.never")


def _filter(given: object, where: str) -> ToolFilter:
    if given is None:
        return ToolFilter()
    names, read_only = given, None
    if isinstance(given, Mapping):
        names, read_only = given.get("tool_names"), given.get("read_only")
    if read_only is not None and not isinstance(read_only, bool):
        raise InvalidRequest(f"{where}.read_only must be true or false", field=f"{where}.read_only")
    if names is None:
        return ToolFilter(None, read_only)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{where} must name tools by strings", field=where)
    return ToolFilter(frozenset(names), read_only)
