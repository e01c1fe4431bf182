"""DeepSeek V3 and R1 (arguments in a fenced block after the name), and V3.1 (arguments directly after the name)."""

from __future__ import annotations

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, json_calls
from baton.gateway.parsing.grammar.forms import either
from baton.gateway.parsing.reading.source import Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_FENCE = "```"

_FENCED = json_calls(lambda name: f"function{SEP}{name}\n{_FENCE}json\n", f"\n{_FENCE}{END_CALL}")
_PLAIN = json_calls(lambda name: f"{name}{SEP}", END_CALL)

SYNTAX = CallSyntax(
    (Announced((CALL,), lambda tools: either([_FENCED(tools), _PLAIN(tools)])),),
    neutral=(CALLS, END_CALLS),
    section=(CALLS, END_CALLS),
)
V31_SYNTAX = CallSyntax(
    (Announced((CALL,), _PLAIN),), neutral=(CALLS, END_CALLS), section=(CALLS, END_CALLS), separator=""
)


class DeepSeekV3Parser(ToolParser):
    """Parses <call>function<sep>f with a fenced block of JSON and <end>, or <call>f<sep>{...}<end>."""

    def parse(self) -> Steps[None]:
        while marker := (yield from self.source.until(markers(CALLS, CALL, END_CALLS), self.out.content)):
            if marker == CALL:
                yield from self.attempt(self._call(), CALL)

    def _call(self) -> Steps[None]:
        source = self.source
        head, _ = yield from source.read_until(markers(SEP))
        yield from source.skip_space()
        fenced = (yield from source.peek()) != "{"
        if fenced:
            head, _ = yield from source.read_until(markers(_FENCE))
            yield from source.take("json")
            yield from source.skip_space()
            if (yield from source.peek()) != "{":
                raise Malformed
        name = call_name(head)
        source.commit()
        self.out.start(name)
        yield from source.pass_json(self.out.arguments)
        self.out.end()
        source.begin()
        yield from source.skip_space()
        if fenced and (yield from source.take(_FENCE)):
            yield from source.skip_space()
        yield from source.take(END_CALL)
