"""The interface of all parsers of output text, and the base of the built-in ones."""

from __future__ import annotations

import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.event_writer import EventWriter, NewId
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Source, Steps, Unfinished, markers
from baton.gateway.parsing.tool import Tool

_log = logging.getLogger(__name__)

_CALL_NAME = re.compile(r"[^\s\"'{}<>\[\]()|]{1,256}")


class TextParser(Protocol):
    """Parses the text of one choice. The events do not depend on how the text is split. Raises nothing."""

    def push(self, text: str) -> list[Event]:
        """Adds text and returns the events that are certain."""

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. `cut`: the output ended at a limit, possibly within a call."""


class SteppingParser(ABC):
    """A parser whose format is one generator that reads a Source.

    Text that does not follow the format becomes part of the answer. Only markup is dropped, and the beginning of a call
    that the output's limit cut.
    """

    forced = False  # whether outputs are constrained to the format

    def __init__(self, new_id: NewId | None = None) -> None:
        self.source = Source()
        self.out = EventWriter(new_id or openai_call_id)
        self._steps: Steps[None] | None = self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Reads the whole source and writes events."""

    def push(self, text: str) -> list[Event]:
        """Adds text and returns the events that are certain."""
        self.source.feed(text)
        self._advance()
        return self.out.drain()

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. `cut`: the output ended at a limit, possibly within a call."""
        self.source.close(cut or self.forced)
        self._advance()
        if cut and self.source.announced:
            self.out.end_content()
        self.out.finish()
        return self.out.drain()

    def attempt(self, steps: Steps[None], markup: str) -> Steps[bool]:
        """Reads text that may not follow the format. `markup` announced it, and becomes text in that case.

        A call that has already started ends there, and what follows is text. A call cut before its name is dropped.
        """
        num_calls = self.out.num_calls
        self.source.begin()
        try:
            yield from steps
        except Malformed as error:
            if isinstance(error, Unfinished) and (self.forced or self.source.announced or self.out.num_calls):
                self._drop_rest()
                return False
            self.out.end()
            self.source.rewind()
            if self.out.num_calls == num_calls and markup:
                self.out.content(markup)
            return False
        self.source.commit()
        return True

    def _drop_rest(self) -> None:
        """Drops incomplete markup and the white space before it."""
        self.source.take_rest()
        self.out.end()
        self.out.end_content()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
                return
            except StopIteration:
                self._steps = None
            except Unfinished:
                self._steps = None
                self._drop_rest()
            except Exception:
                _log.exception("%s failed; the rest of this output is not parsed", type(self).__name__)
                self._steps = None
                self.out.end()
        rest = self.source.take_rest()
        if rest:
            self.out.content(rest)


class ToolParser(SteppingParser):
    """A parser of calls to the request's tools."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        self.tools = {tool.name: tool for tool in tools}
        super().__init__(new_id)

    def value_until(self, arguments: ArgumentsWriter, key: str, end: str) -> Steps[None]:
        """Reads a value up to its end tag: a string is plain text, other kinds are JSON."""
        source = self.source
        source.commit()
        kinds = arguments.kinds(key)
        if kinds == {"string"}:
            arguments.begin_text(key)
            if not (yield from source.until(markers(end), arguments.text)):
                raise Malformed
            arguments.end_text()
            return
        source.begin(MAX_VALUE_CHARS)
        text, _ = yield from source.read_until(markers(end))
        source.commit()
        arguments.add(key, json_value(text, kinds))


def call_name(text: str) -> str:
    """Returns a function's name as the model wrote it. Raises Malformed for an invalid name."""
    name = text.strip()
    if _CALL_NAME.fullmatch(name) is None:
        raise Malformed
    return name


def openai_call_id(name: str, index: int) -> str:
    """Returns an id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"
