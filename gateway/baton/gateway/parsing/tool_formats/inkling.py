"""Inkling: messages of one kind each, which a special token names: reasoning, text, or a call as JSON.

<|message_model|><|content_thinking|>...<|end_message|><|message_model|>f<|content_invoke_tool_json|>
{"name": "f", "args": {...}}<|end_message|>. A prompt ends with the first <|message_model|>.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import call_object
from baton.gateway.parsing.grammar.forms import Form, const, either, repeat, sequence, text
from baton.gateway.parsing.reading.call_object import read_call_object
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

MESSAGE = "<|message_model|>"
THINKING, TEXT = "<|content_thinking|>", "<|content_text|>"
CALL, CALL_TEXT, TOOL_ERROR = (
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
)
END, END_SAMPLING = "<|end_message|>", "<|content_model_end_sampling|>"
_KINDS = (THINKING, TEXT, CALL, CALL_TEXT, TOOL_ERROR)
TOKENS = (MESSAGE, *_KINDS, END, END_SAMPLING)
_MAX_HEADER_CHARS = 256
_ENDS = repeat(either([const(END), const(END_SAMPLING)]), optional=True)


def output_form(tools: Sequence[Tool], answer: Form | None) -> Form:
    """Returns the form of an output whose calls follow the schemas and whose text has the form `answer`, if given."""
    message = either([sequence(const(THINKING), text()), sequence(const(TEXT), answer or text()), *_calls(tools)])
    # A prompt may have opened the reasoning.
    return sequence(either([message, text()]), repeat(_next(message), optional=True), _ENDS)


def forced_form(tools: Sequence[Tool], parallel: bool) -> Form:
    """Returns the form of an output that calls one of the tools, after at most one message of reasoning."""
    call = either(_calls(tools))
    # A prompt may have opened the reasoning.
    thinking = sequence(either([sequence(const(THINKING), text()), text()]), _next(call))
    others = [repeat(_next(call), optional=True)] if parallel else []
    return sequence(either([call, thinking]), *others, _ENDS)


def _calls(tools: Sequence[Tool]) -> list[Form]:
    return [sequence(const(f"{name}{CALL}"), call_object(tool, "args")) for tool in tools for name in (tool.name, "")]


def _next(message: Form) -> Form:
    return sequence(const(f"{END}{MESSAGE}"), message)


class InklingParser(ToolParser):
    """Parses reasoning and calls. Calls are part of the answer without tools, as are those in text."""

    def __init__(self, tools: Sequence[Tool] = (), new_id: NewId | None = None, opened: bool = False) -> None:
        self.in_reasoning = opened
        super().__init__(tools, new_id)

    def parse(self) -> Steps[None]:
        source = self.source
        if self.in_reasoning:
            yield from self._reasoning()
        else:
            yield from self.attempt(self._header(), "")
        while marker := (yield from source.until(markers(*TOKENS), self.out.content)):
            if marker == MESSAGE:
                yield from self.attempt(self._header(), "")
            elif marker == THINKING:
                yield from self._reasoning()
            elif marker == CALL and self.tools:
                yield from self.attempt(self._call(), CALL)
            elif marker in (END, END_SAMPLING):
                self.out.end_content()

    def _header(self) -> Steps[None]:
        """Drops the function's name, which a message has before a call."""
        source = self.source
        # Nothing was read since begin(), so this starts again with another limit.
        source.commit()
        source.begin(_MAX_HEADER_CHARS)
        text, stop = yield from source.read_until(markers(*TOKENS))
        if stop not in _KINDS or (text.strip() and stop not in (CALL, CALL_TEXT)):
            raise Malformed
        if text.strip():
            call_name(text)
        source.unread(len(stop))

    def _reasoning(self) -> Steps[None]:
        source, out = self.source, self.out
        self.in_reasoning = True
        stop = yield from source.until(markers(END, END_SAMPLING, CALL, MESSAGE), out.reasoning)
        out.end_reasoning()
        self.in_reasoning = False
        if stop in (CALL, MESSAGE):
            source.unread(len(stop))

    def _call(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from read_call_object(self.source, self.out, argument_keys=("args",))
