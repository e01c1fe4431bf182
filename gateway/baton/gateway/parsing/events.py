"""What an output's text turns out to be: answer, reasoning, tool calls. The words between parsers and the edges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. Calls are counted from 0 and do not overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments: of a JSON text, which may be broken where the model's own was."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or the model has left its format."""

    index: int


Event = ContentText | ReasoningText | CallStart | CallArguments | CallEnd


def append(events: list[Event], event: Event) -> None:
    """Adds an event, in one piece with the last one where both are pieces of the same text."""
    last = events[-1] if events else None
    if isinstance(event, ContentText) and isinstance(last, ContentText):
        events[-1] = ContentText(last.text + event.text)
    elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
        events[-1] = ReasoningText(last.text + event.text)
    elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
        events[-1] = CallArguments(event.index, last.fragment + event.fragment)
    else:
        events.append(event)
