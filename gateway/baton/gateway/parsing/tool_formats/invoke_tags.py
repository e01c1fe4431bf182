"""MiniMax M2, DeepSeek V3.2 and Step 3: <invoke name="f"><parameter name="k">v</parameter>...</invoke>, in a section.

DeepSeek's tags have a prefix, and an attribute of each value marks text: string="true". Step's have a prefix, and
special tokens around each call. MiniCPM 5 writes <function> and <param>, in no section.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax
from baton.gateway.parsing.grammar.forms import Form, const, either, sequence, text
from baton.gateway.parsing.grammar.tagged_arguments import tagged_arguments
from baton.gateway.parsing.reading.arguments import ArgumentsWriter, json_value
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import MAX_VALUE_CHARS, Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

_NAME = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*')
_STRING = frozenset(("string",))


class InvokeParser(ToolParser):
    """Parses any number of sections with text around them."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    mark = ""  # prefix of all tags inside the section
    call_word, parameter_word = "invoke", "parameter"

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        call, parameter = f"{self.mark}{self.call_word}", f"{self.mark}{self.parameter_word}"
        self._call_tag, self._parameter_tag = f"<{call}", f"<{parameter}"
        self._end_call, self._end_parameter = f"</{call}>", f"</{parameter}>"
        super().__init__(tools, new_id)

    def parse(self) -> Steps[None]:
        stops = markers(*filter(None, self.section), self._call_tag)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker == self._call_tag:
                yield from self.attempt(self._call(), marker)

    def _call(self) -> Steps[None]:
        source, out = self.source, self.out
        name, _ = yield from self._name()
        name = call_name(name)
        source.commit()
        out.start(name)
        arguments = ArgumentsWriter(out, self.tools.get(name))
        while True:
            source.begin()
            yield from source.skip_space()
            if (yield from source.expect(self._parameter_tag, self._end_call)) == self._end_call:
                break
            key, kind = yield from self._name()
            yield from self._value(arguments, key, kind)
        source.commit()
        arguments.close()
        out.end()

    def _name(self) -> Steps[tuple[str, str]]:
        """Returns the name in an opening tag, and its `string` attribute."""
        head, _ = yield from self.source.read_until(markers(">"))
        match = _NAME.fullmatch(head)
        if match is None:
            raise Malformed
        return match[1], match[2] or ""

    def _value(self, arguments: ArgumentsWriter, key: str, kind: str) -> Steps[None]:
        source = self.source
        source.commit()
        stops = markers((yield from self._end_of_value()))
        kinds = arguments.kinds(key)
        if kind == "true" or (not kind and kinds == _STRING):
            arguments.begin_text(key)
            if not (yield from source.until(stops, arguments.text)):
                raise Malformed
            arguments.end_text()
            return
        source.begin(MAX_VALUE_CHARS)
        value, _ = yield from source.read_until(stops)
        source.commit()
        # Values marked as JSON are parsed as JSON for any schema.
        arguments.add(key, json_value(value, kinds - _STRING if kind else kinds))

    def _end_of_value(self) -> Steps[str]:
        """Reads what may stand before a value. Returns what ends it."""
        yield from ()
        return self._end_parameter


class MiniCpmParser(InvokeParser):
    """Parses <function name="f"><param name="k">v</param></function>. Values may be in CDATA sections."""

    section = ("", "")
    call_word, parameter_word = "function", "param"

    def _end_of_value(self) -> Steps[str]:
        in_section = yield from self.source.take("<![CDATA[")
        return f"]]>{self._end_parameter}" if in_section else self._end_parameter


class DsmlParser(InvokeParser):
    """Parses the same tags with DeepSeek's prefix."""

    mark = "｜DSML｜"
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")


class DeepSeekV4Parser(DsmlParser):
    """Parses the same in a section of another name."""

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")


class Step3Parser(InvokeParser):
    """Parses <call>function<sep><steptml:invoke ...>...</steptml:invoke><end>."""

    mark = "steptml:"
    section = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    call, sep, end_call = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"

    def parse(self) -> Steps[None]:
        stops = markers(*self.section, self.call, self._call_tag)
        while marker := (yield from self.source.until(stops, self.out.content)):
            if marker == self.call:
                yield from self.attempt(self._framed(), marker)
            elif marker == self._call_tag:
                yield from self.attempt(self._call(), marker)

    def _framed(self) -> Steps[None]:
        source = self.source
        yield from source.read_until(markers(self.sep))
        yield from source.skip_space()
        yield from source.expect(self._call_tag)
        yield from self._call()
        source.begin()
        yield from source.skip_space()
        yield from source.take(self.end_call)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a family writes between and around the tags."""

    line_break: str = "\n"  # after an opening tag and after each value
    typed: bool = False  # whether an attribute marks strings
    frame: tuple[str, str, str] | None = None  # a call's begin (the trigger), what follows it, and the call's end
    separator: str = "\n"  # between calls


def _syntax_of(parser: type[InvokeParser], layout: _Layout = _Layout()) -> CallSyntax:
    line_break = layout.line_break
    call, parameter = f"{parser.mark}{parser.call_word}", f"{parser.mark}{parser.parameter_word}"
    end, stops = f"</{parameter}>", (f"</{parameter}>",)
    trigger, after_trigger, after_call = layout.frame or (f"<{call}", "", "")
    if layout.frame:
        after_trigger += f"<{call}"

    def begin(key: str, string: str = "") -> str:
        return f'<{parameter} name="{key}"{string}>'

    def one(tool: Tool) -> Form:
        head = const(f'{after_trigger} name="{tool.name}">{line_break}')
        last = const(f"</{call}>{after_call}")
        if not tool.strict:
            return sequence(head, text(), last)
        of_kinds = (lambda key: const(begin(key, ' string="true"')), lambda key: const(begin(key, ' string="false"')))
        arguments = tagged_arguments(tool, begin, end, stops, line_break, of_kinds if layout.typed else None)
        return sequence(*(part for part in (head, arguments, last) if part))

    def calls(tools: Sequence[Tool]) -> Form:
        return either(map(one, tools))

    opened, closed = parser.section
    section = (f"{opened}{layout.separator}", f"{layout.separator}{closed}") if opened else parser.section
    neutral = parser.section if opened else ()
    return CallSyntax((Announced((trigger,), calls),), neutral=neutral, section=section, separator=layout.separator)


MINIMAX_SYNTAX = _syntax_of(InvokeParser)
MINICPM_SYNTAX = _syntax_of(MiniCpmParser, _Layout("", separator="\n"))
DSML_SYNTAX = _syntax_of(DsmlParser, _Layout(typed=True))
DEEPSEEK_V4_SYNTAX = _syntax_of(DeepSeekV4Parser, _Layout(typed=True))
STEP3_SYNTAX = _syntax_of(
    Step3Parser,
    _Layout("", frame=(Step3Parser.call, f"function{Step3Parser.sep}", Step3Parser.end_call), separator=""),
)
