"""The events of parsed output: answer text, reasoning and tool calls. Shared by the parsers and the APIs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. Calls are numbered from 0 and do not overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. The JSON text may be invalid if the model's own was."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call: it is complete, or the model left the format."""

    index: int


Event = ContentText | ReasoningText | CallStart | CallArguments | CallEnd


def append(events: list[Event], event: Event) -> None:
    """Appends an event, merged with the last one if both are pieces of the same text."""
    last = events[-1] if events else None
    if isinstance(event, ContentText) and isinstance(last, ContentText):
        events[-1] = ContentText(last.text + event.text)
    elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
        events[-1] = ReasoningText(last.text + event.text)
    elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
        events[-1] = CallArguments(event.index, last.fragment + event.fragment)
    else:
        events.append(event)
