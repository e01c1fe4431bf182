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


@dataclass(slots=True)
class _Open:
    """The item that is being built."""

    kind: str  # message, reasoning, function_call, custom_tool_call
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

    `names` maps the names that the model uses to the client's tools.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        num_top: int | None = None,
        names: Mapping[str, ToolName] | None = None,
    ) -> None:
        self.complete: list[dict[str, Any]] = []
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
            if self._open.kind == "function_call":  # the input of custom tools is complete only at the end
                name = "response.function_call_arguments.delta"
                out.append({"type": name, **self._open.place, "delta": event.fragment})
        elif isinstance(event, CallEnd):
            self._close(out, "completed")

    def _start_call(self, call: CallStart, out: list[StreamEvent]) -> None:
        tool = self._names.get(call.name, ToolName(call.name))
        if tool.is_custom:
            self._start("custom_tool_call", {"call_id": call.id, "name": tool.name, "input": ""}, out)
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
        item = {"id": self._new_id(kind), "type": kind, "status": "in_progress", **fields}
        self._open = _Open(kind, item, len(self.complete))
        out.append({"type": "response.output_item.added", "output_index": self._open.index, "item": item})
        return self._open

    def _close(self, out: list[StreamEvent], status: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        item = {**_ENDS[opened.kind](opened, out), "status": status}
        out.append({"type": "response.output_item.done", "output_index": opened.index, "item": item})
        self.complete.append(item)


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


def _end_custom(opened: _Open, out: list[StreamEvent]) -> dict[str, Any]:
    text = input_of(opened.text)
    out.append({"type": "response.custom_tool_call_input.delta", **opened.place, "delta": text})
    out.append({"type": "response.custom_tool_call_input.done", **opened.place, "input": text})
    return {**opened.item, "input": text}


_ENDS: Mapping[str, Callable[[_Open, list[StreamEvent]], dict[str, Any]]] = {
    "message": _end_message,
    "reasoning": _end_reasoning,
    "function_call": _end_call,
    "custom_tool_call": _end_custom,
}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
