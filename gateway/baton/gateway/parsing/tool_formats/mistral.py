"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and since tokenizer v11 [TOOL_CALLS]f[ARGS]{...}.

Newer models omit [ARGS], or write [CALL_ID] and an id before it.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import Announced, CallSyntax, parameters_of
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, regex, sequence
from baton.gateway.parsing.reading.call_object import read_call_list
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import Malformed, Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool
from baton.gateway.parsing.tool_formats.lists.listed_calls import call_list

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _calls(tools: Sequence[Tool]) -> Form:
    """Returns the form of a list of calls, or of one call after its function's name."""
    name_ends = (const(ARGS), None, sequence(const(CALL_ID), regex("[a-zA-Z0-9]{9}"), const(ARGS)))
    named = [
        sequence(const(tool.name), *(end for end in (name_end,) if end is not None), json_of(parameters_of(tool)))
        for tool in tools
        for name_end in name_ends
    ]
    return either([call_list(tools), *named])


SYNTAX = CallSyntax((Announced((CALLS,), _calls),), separator="")

_ID_CHARS = string.ascii_letters + string.digits


def mistral_call_id(name: str, index: int) -> str:
    """Returns an id of nine letters or digits, which Mistral's templates require."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class MistralParser(ToolParser):
    """Parses both forms."""

    def __init__(self, tools: Sequence[Tool], new_id: NewId | None = None) -> None:
        super().__init__(tools, new_id or mistral_call_id)

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers(CALLS), self.out.content)):
            yield from self.attempt(self._calls(), CALLS)

    def _calls(self) -> Steps[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()) == "[":
            yield from read_call_list(self.source, self.out)
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        source = self.source
        text, stop = yield from source.read_until(markers("{", ARGS, CALL_ID))
        name, call_id = call_name(text), ""
        if stop == CALL_ID:
            call_id, _ = yield from source.read_until(markers(ARGS))
        elif stop == "{":
            source.unread(1)
        yield from source.skip_space()
        if (yield from source.peek()) != "{":
            raise Malformed
        source.commit()
        self.out.start(name, call_id.strip())
        yield from source.pass_json(self.out.arguments)
        self.out.end()
