"""What a response needs before its first generation: the servers' tools, and the calls that its client approved."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.errors.http import ToolServerFailed
from baton.gateway.mcp.sessions import McpSessions
from baton.gateway.mcp.tools import McpFailed, McpTool
from baton.gateway.responses.items import APPROVAL_REQUEST, APPROVAL_RESPONSE, MCP_LIST, Item
from baton.gateway.responses.mcp.loop import ApprovedCall
from baton.gateway.responses.mcp.request import RequestedServer, with_mcp_tools
from baton.gateway.responses.output import OutputItems, StreamEvent
from baton.gateway.responses.tools import ServedTools, ToolName
from baton.rpc.errors import InvalidRequest

_LISTED = ("response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed")


@dataclass(slots=True)
class McpPlan:
    """The MCP part of a response."""

    servers: Mapping[str, RequestedServer]  # by label
    sessions: McpSessions
    listed: Mapping[str, Sequence[McpTool]] = field(default_factory=dict)  # by label; those listed for this response
    approved: Sequence[ApprovedCall] = ()

    def show(self, output: OutputItems) -> list[StreamEvent]:
        """Adds the listings to the output and returns their events."""
        events: list[StreamEvent] = []
        for label, tools in self.listed.items():
            events += output.add(MCP_LIST, {"server_label": label, "tools": list(map(_shown, tools))}, _LISTED)
        return events


async def plan_of(
    servers: Mapping[str, RequestedServer],
    sessions: McpSessions,
    served: ServedTools,
    context: Sequence[Item],
    items: Sequence[Item],
) -> tuple[McpPlan, ServedTools]:
    """Returns the plan, and the tools with those of the servers. Lists the tools that the conversation does not have.

    Raises ToolServerFailed, InvalidRequest.
    """
    known = _known_tools([*context, *items])
    missing = [server for label, server in servers.items() if label not in known]
    fetched = await asyncio.gather(*(_listed(sessions, server) for server in missing))
    listed = {server.label: tools for server, tools in zip(missing, fetched, strict=True)}
    for server in servers.values():
        served = with_mcp_tools(served, server, listed.get(server.label) or known.get(server.label) or ())
    return McpPlan(servers, sessions, listed, _approved(items, context, servers, served)), served


async def _listed(sessions: McpSessions, server: RequestedServer) -> list[McpTool]:
    try:
        return await sessions.tools(server.server)
    except McpFailed as failed:
        message = f"cannot list the tools of the MCP server {server.label!r}: {failed.message}"
        raise ToolServerFailed(message, field=f"tools.{server.place}") from failed


def _known_tools(items: Sequence[Item]) -> dict[str, list[McpTool]]:
    """Returns the tools of earlier listings by label."""
    return {item["server_label"]: list(map(_read, item["tools"])) for item in items if item["type"] == MCP_LIST}


def _read(tool: Mapping[str, Any]) -> McpTool:
    name, schema = tool.get("name"), tool.get("input_schema")
    description, annotations = tool.get("description"), tool.get("annotations")
    if not isinstance(name, str) or not isinstance(schema, Mapping):
        raise InvalidRequest(f"input: a tool of an item of type {MCP_LIST} needs name and input_schema", field="input")
    return McpTool(
        name,
        description if isinstance(description, str) else None,
        schema,
        annotations if isinstance(annotations, Mapping) else None,
    )


def _shown(tool: McpTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


def _approved(
    items: Sequence[Item], context: Sequence[Item], servers: Mapping[str, RequestedServer], served: ServedTools
) -> list[ApprovedCall]:
    """Returns the calls that the request's own items approve and that were not run yet. Raises InvalidRequest."""
    everything = [*context, *items]
    requests = {item["id"]: item for item in everything if item["type"] == APPROVAL_REQUEST}
    run = {item.get("approval_request_id") for item in everything if item["type"] == "mcp_call"}
    calls = []
    for item in items:
        if item["type"] != APPROVAL_RESPONSE:
            continue
        wanted = item["approval_request_id"]
        request = requests.get(wanted)
        if request is None:
            raise InvalidRequest(f"input: there is no approval request with id {wanted!r}", field="input")
        if not item["approve"] or wanted in run:
            continue
        name = ToolName(request["name"], server=request["server_label"])
        if name.flat not in served.names or name.server not in servers:
            message = f"tools: the approved call needs the tool {name.name!r} of the MCP server {name.server!r}"
            raise InvalidRequest(message, field="tools")
        run.add(wanted)
        call_id = request.get("call_id") or request["id"]
        calls.append(ApprovedCall(servers[name.server], name.name, request["arguments"], call_id, wanted))
    return calls
