"""Hermes 2 Pro, Qwen 2.5 and 3, and many others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>.

Other families write the same objects between other tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, json_calls
from baton.gateway.parsing.grammar.forms import Form, const, repeat, sequence
from baton.gateway.parsing.reading.call_object import read_call_object
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser
from baton.gateway.parsing.tool import Tool

LINES = ("<tool_calls>", "</tool_calls>")


class HermesParser(ToolParser):
    """Parses any number of calls with text around them."""

    open_tag = "<tool_call>"
    subtag = ""  # always follows the opening tag
    close_tag = "</tool_call>"

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(self.open_tag), self.out.content)):
            yield from self.attempt(self._call(), self.open_tag)

    def _call(self) -> Steps[None]:
        yield from self.source.skip_space()
        if self.subtag:
            yield from self.source.expect(self.subtag)
            yield from self.source.skip_space()
        yield from read_call_object(self.source, self.out)
        yield from self._close()

    def _close(self) -> Steps[None]:
        if self.close_tag:
            yield from self.source.skip_space()
            yield from self.source.take(self.close_tag)


class LongcatParser(HermesParser):
    """LongCat's tags."""

    open_tag = "<longcat_tool_call>"
    close_tag = "</longcat_tool_call>"


class Granite20bParser(HermesParser):
    """granite-20b-functioncalling: calls begin with a tag and have none at their end."""

    open_tag = "<function_call>"
    close_tag = ""


class InternLmParser(HermesParser):
    """InternLM 2 and 3: an action is a call if it is for the plugin, and code if it is for the interpreter."""

    open_tag = "<|action_start|>"
    subtag = "<|plugin|>"
    close_tag = "<|action_end|>"


class CallLinesParser(HermesParser):
    """MiniMax M1: calls in one pair of tags, each on its line."""

    open_tag, close_tag = LINES

    def _call(self) -> Steps[None]:
        source = self.source
        while True:
            yield from source.skip_space()
            yield from read_call_object(source, self.out)
            source.begin()
            yield from source.skip_space()
            if (yield from source.peek()) != "{":
                break
        yield from source.take(self.close_tag)


class GigaChatParser(HermesParser):
    """GigaChat 3: a call is a message of its own, without an end."""

    open_tag = "<|function_call|>"
    close_tag = ""
    role_tag = "<|role_sep|>"  # of the older form
    older_tag = f"function call{role_tag}\n"
    separator = "<|message_sep|>"  # between the text and the call

    def parse(self) -> Steps[None]:
        stops = markers(self.open_tag, self.older_tag, self.separator)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker != self.separator:
                yield from self.attempt(self._call(), marker)


def _object(argument_key: str) -> tuple[str, str]:
    """Returns an object before and after its arguments, with NAME for the function."""
    return f'{{"name": NAME, "{argument_key}": ', "}"


def _syntax_of(parser: type[HermesParser], space: str, argument_key: str = "arguments") -> CallSyntax:
    """Returns the syntax with `space` around the object."""
    head, end = _object(argument_key)
    calls = json_calls(
        lambda name: f"{parser.subtag}{space}{head.replace('NAME', json.dumps(name))}",
        f"{end}{space if parser.close_tag else ''}{parser.close_tag}",
    )
    return CallSyntax((Announced((parser.open_tag,), calls),))


def _lines(tools: Sequence[Tool]) -> Form:
    head, end = _object("arguments")
    call = json_calls(lambda name: head.replace("NAME", json.dumps(name)), end)
    return sequence(const("\n"), repeat(call(tools), "\n"), const(f"\n{LINES[1]}"))


def _bare(before: str) -> Callable[[Sequence[Tool]], Form]:
    """Returns the form of an object that ends the output."""
    head, end = _object("arguments")
    return json_calls(lambda name: before + head.replace("NAME", json.dumps(name)), end)


SYNTAX = _syntax_of(HermesParser, "\n")
LONGCAT_SYNTAX = _syntax_of(LongcatParser, "\n")
GRANITE_20B_SYNTAX = _syntax_of(Granite20bParser, " ")
INTERNLM_SYNTAX = _syntax_of(InternLmParser, "\n", "parameters")
GIGACHAT_SYNTAX = CallSyntax(
    (Announced((GigaChatParser.open_tag,), _bare("")), Announced((GigaChatParser.role_tag,), _bare("\n"))),
    neutral=(GigaChatParser.separator,),
)
LINES_SYNTAX = CallSyntax((Announced(LINES[:1], _lines),))
