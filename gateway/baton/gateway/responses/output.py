"""Builds output items from deltas, and their events. Knows nothing of HTTP, gRPC or sequence numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.gateway.core import Delta
from baton.gateway.openai.logprobs import LogprobForm, chat_logprobs
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from baton.gateway.responses.tools import ToolName, input_of
from baton.gateway.serving.chat import events_of

StreamEvent = dict[str, Any]  # without its sequence number

# The input of custom tools is complete only at the end.
_ARGUMENT_DELTAS = {
    "function_call": "response.function_call_arguments.delta",
    "mcp_call": "response.mcp_call_arguments.delta",
}
# Shown only when they are complete.
_AT_ONCE = frozenset(("mcp_approval_request",))


@dataclass(slots=True)
class _Open:
    """The item that is being built."""

    kind: str  # message, reasoning, function_call, custom_tool_call, mcp_call, mcp_approval_request
    item: dict[str, Any]  # as in its added event
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class OutputItems:
    """The output's items so far. `num_top` is the number of alternatives per token, or None without log-probabilities.

    `names` maps the names that the model uses to the client's tools. Calls on MCP servers wait in `waiting` for their
    results.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        num_top: int | None = None,
        names: Mapping[str, ToolName] | None = None,
    ) -> None:
        self.complete: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []
        self._new_id = new_id
        self._num_top = num_top
        self._names = names or {}
        self._open: _Open | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been emitted

    def take(self, delta: Delta) -> list[StreamEvent]:
        """Adds a delta and returns its events."""
        if self._num_top is not None and delta.logprobs:
            entries = chat_logprobs(delta.logprobs, LogprobForm(self._num_top)).content
            self._logprobs += [msgspec.to_builtins(entry) for entry in entries]
        out: list[StreamEvent] = []
        for event in events_of(delta):
            self._take(event, out)
        return out

    def finish(self, status: str) -> list[StreamEvent]:
        """Closes the open item with `status` and returns the events."""
        out: list[StreamEvent] = []
        self._close(out, status)
        return out

    def add(self, kind: str, fields: Mapping[str, Any], events: Sequence[str] = ()) -> list[StreamEvent]:
        """Adds a complete item that no model wrote, with these events between its begin and its end."""
        return self._all_at_once({"id": self._new_id(kind), "type": kind, **fields}, events)

    def _all_at_once(self, item: dict[str, Any], events: Sequence[str] = ()) -> list[StreamEvent]:
        index = len(self.complete)
        self.complete.append(item)
        place = {"item_id": item["id"], "output_index": index}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": item},
            *({"type": name, **place} for name in events),
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def begin_call(self, tool: ToolName, arguments: str, call_id: str, approval: str) -> list[StreamEvent]:
        """Adds a call that the client approved, which then waits for its result."""
        out: list[StreamEvent] = []
        self._start("mcp_call", {**_mcp_fields(tool, call_id), "approval_request_id": approval}, out).pieces = [
            arguments
        ]
        self._close(out, "completed")
        return out

    def settle(self, item: dict[str, Any], status: str, **result: Any) -> list[StreamEvent]:
        """Ends a waiting call with its result and returns the events."""
        self.waiting.remove(item)
        item.update(status=status, **result)
        index = self.complete.index(item)
        place = {"item_id": item["id"], "output_index": index}
        ended = [] if status == "incomplete" else [{"type": f"response.mcp_call.{status}", **place}]
        return [*ended, {"type": "response.output_item.done", "output_index": index, "item": item}]

    def _take(self, event: Event, out: list[StreamEvent]) -> None:
        if isinstance(event, ContentText):
            opened = self._need("message", out)
            logprobs, self._logprobs = self._logprobs, []
            opened.pieces.append(event.text)
            opened.logprobs += logprobs
            place = {**opened.place, "content_index": 0}
            out.append({"type": "response.output_text.delta", **place, "delta": event.text, "logprobs": logprobs})
        elif isinstance(event, ReasoningText):
            opened = self._need("reasoning", out)
            self._logprobs = []
            opened.pieces.append(event.text)
            place = {**opened.place, "content_index": 0}
            out.append({"type": "response.reasoning_text.delta", **place, "delta": event.text})
        elif isinstance(event, CallStart):
            self._close(out, "completed")
            self._start_call(event, out)
        elif isinstance(event, CallArguments) and self._open is not None:
            self._open.pieces.append(event.fragment)
            if name := _ARGUMENT_DELTAS.get(self._open.kind):
                out.append({"type": name, **self._open.place, "delta": event.fragment})
        elif isinstance(event, CallEnd):
            self._close(out, "completed")

    def _start_call(self, call: CallStart, out: list[StreamEvent]) -> None:
        tool = self._names.get(call.name, ToolName(call.name))
        if tool.is_custom:
            self._start("custom_tool_call", {"call_id": call.id, "name": tool.name, "input": ""}, out)
            return
        if tool.server:
            self._start("mcp_approval_request" if tool.needs_approval else "mcp_call", _mcp_fields(tool, call.id), out)
            return
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        self._start("function_call", {"call_id": call.id, "name": tool.name, **namespace, "arguments": ""}, out)

    def _need(self, kind: str, out: list[StreamEvent]) -> _Open:
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close(out, "completed")
        if kind == "message":
            opened = self._start(kind, {"role": "assistant", "content": []}, out)
            part, name = _text_part("", []), "content_part"
        else:
            opened = self._start(kind, {"summary": [], "content": []}, out)
            part, name = {"type": "reasoning_text", "text": ""}, "reasoning_part"
        out.append({"type": f"response.{name}.added", **opened.place, "content_index": 0, "part": part})
        return opened

    def _start(self, kind: str, fields: dict[str, Any], out: list[StreamEvent]) -> _Open:
        status = {} if kind in _AT_ONCE else {"status": "in_progress"}
        item = {"id": self._new_id(kind), "type": kind, **status, **fields}
        self._open = _Open(kind, item, len(self.complete))
        if kind not in _AT_ONCE:
            out.append({"type": "response.output_item.added", "output_index": self._open.index, "item": item})
        if kind == "mcp_call":
            out.append({"type": "response.mcp_call.in_progress", **self._open.place})
        return self._open

    def _close(self, out: list[StreamEvent], status: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.kind in _AT_ONCE:
            if status == "completed":
                item = {**opened.item, "arguments": opened.text}
                out += self._all_at_once(item)
            return
        item = {**_ENDS[opened.kind](opened, out), "status": status}
        if opened.kind == "mcp_call" and status == "completed":
            item["status"] = "calling"
            self.complete.append(item)
            self.waiting.append(item)
            return
        out.append({"type": "response.output_item.done", "output_index": opened.index, "item": item})
        self.complete.append(item)


def _mcp_fields(tool: ToolName, call_id: str) -> dict[str, Any]:
    return {"server_label": tool.server, "name": tool.name, "arguments": "", "call_id": call_id}


def _end_message(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    place = {**opened.place, "content_index": 0}
    part = _text_part(opened.text, opened.logprobs)
    done = {"type": "response.output_text.done", **place, "text": opened.text, "logprobs": opened.logprobs}
    out += [done, {"type": "response.content_part.done", **place, "part": part}]
    return {**opened.item, "content": [part]}


def _end_reasoning(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    place = {**opened.place, "content_index": 0}
    part = {"type": "reasoning_text", "text": opened.text}
    out.append({"type": "response.reasoning_text.done", **place, "text": opened.text})
    out.append({"type": "response.reasoning_part.done", **place, "part": part})
    return {**opened.item, "content": [part]}


def _end_call(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    fields = {"name": opened.item["name"], "arguments": opened.text}
    out.append({"type": "response.function_call_arguments.done", **opened.place, **fields})
    return {**opened.item, "arguments": opened.text}


def _end_mcp_call(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    out.append({"type": "response.mcp_call_arguments.done", **opened.place, "arguments": opened.text})
    return {**opened.item, "arguments": opened.text, "output": None, "error": None}


def _end_custom(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    text = input_of(opened.text)
    out.append({"type": "response.custom_tool_call_input.delta", **opened.place, "delta": text})
    out.append({"type": "response.custom_tool_call_input.done", **opened.place, "input": text})
    return {**opened.item, "input": text}


_ENDS: Mapping[str, Callable[[_Open, list[StreamEvent]], dict[str, Any]]] = {
    "message": _end_message,
    "reasoning": _end_reasoning,
    "function_call": _end_call,
    "mcp_call": _end_mcp_call,
    "custom_tool_call": _end_custom,
}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
