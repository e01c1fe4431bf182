"""Builds Anthropic's content blocks from output events: one open block at a time."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from baton.gateway.models.prompts.call_arguments import as_object, read_arguments
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText


@dataclass(slots=True)
class OpenBlock:
    """The block that is being built."""

    index: int
    block: dict[str, Any]  # as in its start event, without the content of deltas
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Returns text, thinking or tool_use."""
        kind: str = self.block["type"]
        return kind

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Started:
    """The start of a block."""

    index: int
    block: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Added:
    """A delta of the open block."""

    index: int
    delta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stopped:
    """The end of a block."""

    index: int


Change = Started | Added | Stopped


class ContentBlocks:
    """The output's blocks so far."""

    def __init__(self) -> None:
        self.complete: list[dict[str, Any]] = []
        self._open: OpenBlock | None = None

    @property
    def has_calls(self) -> bool:
        """Returns whether there is a tool call."""
        return any(block["type"] == "tool_use" for block in self.complete)

    def take(self, events: Sequence[Event]) -> list[Change]:
        """Adds events and returns the changes of the blocks."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, ContentText):
                self._text("text", event.text, changes)
            elif isinstance(event, ReasoningText):
                self._text("thinking", event.text, changes)
            elif isinstance(event, CallStart):
                self._start(_tool_use(event), changes)
            elif isinstance(event, CallArguments):
                self._add({"type": "input_json_delta", "partial_json": event.fragment}, event.fragment, changes)
            elif isinstance(event, CallEnd):
                self._close(changes)
        return changes

    def finish(self) -> list[Change]:
        """Closes the open block and returns the changes."""
        changes: list[Change] = []
        self._close(changes)
        return changes

    def _text(self, kind: str, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            block = {"type": "text", "text": ""} if kind == "text" else _thinking("", "")
            self._start(block, changes)
        self._add({"type": f"{kind}_delta", kind: text}, text, changes)

    def _start(self, block: dict[str, Any], changes: list[Change]) -> None:
        self._close(changes)
        self._open = OpenBlock(len(self.complete), block)
        changes.append(Started(self._open.index, block))

    def _add(self, delta: dict[str, Any], piece: str, changes: list[Change]) -> None:
        if self._open is not None and piece:
            self._open.pieces.append(piece)
            changes.append(Added(self._open.index, delta))

    def _close(self, changes: list[Change]) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.kind == "thinking":
            signature = signature_of(opened.text)
            changes.append(Added(opened.index, {"type": "signature_delta", "signature": signature}))
            self.complete.append(_thinking(opened.text, signature))
        elif opened.kind == "text":
            self.complete.append({"type": "text", "text": opened.text})
        else:
            self.complete.append({**opened.block, "input": as_object(read_arguments(opened.text))})
        changes.append(Stopped(opened.index))


def signature_of(thinking: str) -> str:
    """Returns a signature, which clients send back with the thinking. It is never verified."""
    return base64.b64encode(blake2b(thinking.encode(errors="replace"), digest_size=24).digest()).decode()


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(start: CallStart) -> dict[str, Any]:
    call_id = start.id if start.id.startswith("toolu_") else f"toolu_{start.id.removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": start.name, "input": {}}
