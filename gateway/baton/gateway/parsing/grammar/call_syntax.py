"""The grammar of a model's tool calls: what announces a call, and what follows it under strict schemas.

A syntax and its parser describe one format: the parser reads everything that the syntax allows as calls whose arguments
follow the schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, repeat, sequence
from baton.gateway.parsing.grammar.tool_schemas import call_schema, with_definitions
from baton.gateway.parsing.tool import Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Calls without an announcement, which are the whole output."""

    calls: Callable[[Sequence[Tool]], Form]
    signs: Callable[[Sequence[Tool]], str]  # a regex: an output that begins with it consists of calls
    # The same calls in the lexemes of JSON, for outputs that may also be JSON of another form.
    beside_json: Callable[[Sequence[Tool]], Form]


@dataclass(frozen=True, slots=True)
class Announced:
    """The form that follows one of the triggers in free text."""

    triggers: tuple[str, ...]
    call: Callable[[Sequence[Tool]], Form]
    beside: Form | None = None  # what else may follow a trigger in free text, such as the tags of sections

    def content(self, tools: Sequence[Tool]) -> Form:
        """Returns the form of what follows a trigger in free text."""
        return self.call(tools) if self.beside is None else either([self.call(tools), self.beside])


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The grammar of calls. Texts may contain special tokens."""

    announced: tuple[Announced, ...] = ()
    bare: BareCalls | None = None
    neutral: tuple[str, ...] = ()  # special tokens of sections, allowed in free text
    section: tuple[str, str] = ("", "")  # text before and after all calls
    separator: str = "\n"  # text between two calls

    def within_text(self, tools: Sequence[Tool]) -> Form:
        """Returns the form of free text that may contain calls."""
        tags = [
            {"triggers": [const(trigger) for trigger in each.triggers], "content": each.content(tools)}
            for each in self.announced
        ]
        if not tags:
            assert self.bare is not None, "a syntax has calls"
            free: Form = {"type": "any_text", "not_matches": [f"({self.bare.signs(tools)})(.|\\n)*"]}
            return either([self.bare.calls(tools), free])
        form: Form = {"type": "triggered", "tags": tags}
        if self.neutral:
            form["special"] = list(self.neutral)
        if self.bare is None:
            return form
        form["not_beginning"] = self.bare.signs(tools)
        return either([self.bare.calls(tools), form])

    def without_text(self, tools: Sequence[Tool], parallel: bool) -> list[Form]:
        """Returns the alternative forms of calls without free text."""
        forms = [] if self.bare is None else [self.bare.beside_json(tools)]
        for each in self.announced:
            call = sequence(const(each.triggers[0]), each.call(tools))
            several = repeat(call, self.separator) if parallel else call
            begin, end = self.section
            forms.append(sequence(const(begin), several, const(end)) if begin else several)
        return forms


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Returns the schema of the tool's arguments."""
    return dict(tool.parameters) if tool.strict and tool.parameters is not None else dict(ANY_OBJECT)


def call_object(tool: Tool, key: str) -> Form:
    """Returns the form of a call as a JSON object, with its arguments under this key."""
    return json_of(with_definitions(lambda definitions: call_schema(tool.name, parameters_of(tool), key, definitions)))


def call_array(tools: Sequence[Tool], key: str) -> Form:
    """Returns the form of a JSON list of such objects."""

    def made(definitions: dict[str, Any]) -> dict[str, Any]:
        calls = [call_schema(tool.name, parameters_of(tool), key, definitions) for tool in tools]
        return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}

    return json_of(with_definitions(made))


def json_calls(begin: Callable[[str], str], end: str) -> Callable[[Sequence[Tool]], Form]:
    """Returns the form of calls with JSON arguments between two texts, the first of which contains the function's
    name.
    """

    def calls(tools: Sequence[Tool]) -> Form:
        return either(_between(begin(tool.name), json_of(parameters_of(tool)), end) for tool in tools)

    return calls


def _between(begin: str, content: Form, end: str) -> Form:
    return sequence(const(begin), content, const(end)) if end else sequence(const(begin), content)
