"""Collects a parser's events. White space next to markup is dropped."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.parsing.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    Event,
    ReasoningText,
    append,
)

# A longer run of white space counts as text.
_MAX_LAYOUT_CHARS = 64

NewId = Callable[[str, int], str]  # returns a call's id for its function's name and index


class EventWriter:
    """Receives a parser's output. Holds white space at the end of text back until the next text or markup."""

    def __init__(self, new_id: NewId) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._events: list[Event] = []
        self._in_call = False
        self._content = _EdgeSpace()
        self._reasoning = _EdgeSpace()
        self._only_calls = False  # only white space has followed the last call

    def content(self, text: str) -> None:
        """Adds text of the answer."""
        certain = self._content.push(text)
        if certain:
            self._only_calls = False
            append(self._events, ContentText(certain))

    def reasoning(self, text: str) -> None:
        """Adds text of the reasoning."""
        certain = self._reasoning.push(text)
        if certain:
            append(self._events, ReasoningText(certain))

    def end_content(self) -> None:
        """Ends the answer's text and drops trailing white space."""
        self._content.take()

    def end_reasoning(self) -> None:
        """Ends the reasoning and drops trailing white space."""
        self._reasoning.take()

    def start(self, name: str, call_id: str = "") -> None:
        """Starts a call, with a new id if none is given."""
        assert not self._in_call
        self._content.take()
        index = self.num_calls
        self._events.append(CallStart(index, call_id or self._new_id(name, index), name))
        self.num_calls += 1
        self._in_call = self._only_calls = True

    def arguments(self, fragment: str) -> None:
        """Adds a piece of the open call's arguments."""
        assert self._in_call
        if fragment:
            append(self._events, CallArguments(self.num_calls - 1, fragment))

    def end(self) -> None:
        """Ends the open call, if any."""
        if self._in_call:
            self._in_call = False
            self._events.append(CallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """Ends the output: ends an open call and emits held-back white space."""
        self.end()
        space = self._content.take()
        if space and not self._only_calls:
            append(self._events, ContentText(space))
        space = self._reasoning.take()
        if space:
            append(self._events, ReasoningText(space))

    def drain(self) -> list[Event]:
        """Returns and clears the collected events."""
        events, self._events = self._events, []
        return events


class _EdgeSpace:
    """Passes text on but holds white space at its end back, up to a limit."""

    def __init__(self) -> None:
        self._held = ""
        self._too_long = False  # the run of white space already counts as text

    def push(self, text: str) -> str:
        body = text.rstrip()
        certain = ""
        if body:
            certain, self._held = self._held + body, ""
            self._too_long = False
        self._held += text[len(body) :]
        if self._too_long or len(self._held) > _MAX_LAYOUT_CHARS:
            certain, self._held = certain + self._held, ""
            self._too_long = True
        return certain

    def take(self) -> str:
        held, self._held = self._held, ""
        self._too_long = False
        return held
