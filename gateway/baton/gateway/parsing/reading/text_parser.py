"""What all parsers of an output's text are: text in, in any pieces; events out. The base of the built-in ones."""

from __future__ import annotations

import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.reading.event_writer import EventWriter, NewId
from baton.gateway.parsing.reading.source import Malformed, Source, Steps, Unfinished
from baton.gateway.parsing.tool import Tool

_log = logging.getLogger(__name__)

_CALL_NAME = re.compile(r"[^\s\"'{}<>\[\]()|]{1,256}")


class TextParser(Protocol):
    """Of one choice's text. However the text is cut, the events are the same in sum. Raises nothing."""

    def push(self, text: str) -> list[Event]:
        """What is certain now."""

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest, once no more text comes. `cut`: the output ended at a limit, maybe amid a call."""


class SteppingParser(ABC):
    """A parser whose format is written down as one generator that reads a Source.

    What does not fit the format goes on as text of the answer: nothing is lost but markup, and the begin of a call
    that the output's limit cut.
    """

    forced = False  # outputs are held to the format: they cannot be anything else

    def __init__(self, new_id: NewId | None = None) -> None:
        self.source = Source()
        self.out = EventWriter(new_id or openai_call_id)
        self._steps: Steps[None] | None = self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Reads the source to its end and writes what it finds."""

    def push(self, text: str) -> list[Event]:
        """What is certain now."""
        self.source.feed(text)
        self._advance()
        return self.out.drain()

    def finish(self, cut: bool = False) -> list[Event]:
        """The rest, once no more text comes. `cut`: the output ended at a limit, maybe amid a call."""
        self.source.close(cut or self.forced)
        self._advance()
        if cut and self.source.announced:
            self.out.end_content()
        self.out.finish()
        return self.out.drain()

    def attempt(self, steps: Steps[None], markup: str) -> Steps[bool]:
        """Reads something that may turn out not to be in the format. `markup` is what announced it, and is text then.

        A call that has begun before that ends there, and only what follows is text. Of a call that was cut before its
        name is known nothing is left.
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
        """Ends amid markup. White space before it is layout."""
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
                _log.exception("%s failed; the rest of this output stays unparsed", type(self).__name__)
                self._steps = None
                self.out.end()
        rest = self.source.take_rest()
        if rest:
            self.out.content(rest)


class ToolParser(SteppingParser):
    """A parser of calls. It knows the request's tools."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        self.tools = {tool.name: tool for tool in tools}
        super().__init__(new_id)


def call_name(text: str) -> str:
    """A function's name as the model wrote it. Raises Malformed where it can be none."""
    name = text.strip()
    if _CALL_NAME.fullmatch(name) is None:
        raise Malformed
    return name


def openai_call_id(name: str, index: int) -> str:
    """Calls are named like OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"
