"""What outputs are held to so that tools are called, and how such outputs are read."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.parsing_harness import TOOLS, cut, parse

from baton.gateway.parsing.constrained_calls import CallListParser, NamedCallParser
from baton.gateway.parsing.grammar.tool_schemas import constraint_of
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}


def with_city(name, city):
    return Tool(name, parameters={**CITY, "$defs": {"City": city}})


def test_definitions_move_to_the_root():
    use = ToolUse((with_city("f", {"type": "string"}), with_city("g", {"type": "string"})), ToolMode.REQUIRED)
    schema = constraint_of(use)
    assert schema["$defs"] == {"City": {"type": "string"}}
    assert [one["properties"]["parameters"] for one in schema["items"]["anyOf"]] == [CITY, CITY]


def test_definitions_that_contradict_are_refused():
    use = ToolUse((with_city("f", {"type": "string"}), with_city("g", {"type": "object"})), ToolMode.REQUIRED)
    with pytest.raises(InvalidRequest, match="City") as refused:
        constraint_of(use)
    assert refused.value.field == "tools"


def test_free_choice_is_held_to_nothing():
    assert constraint_of(ToolUse(TOOLS, ToolMode.AUTO)) is None


CALLS = json.dumps([{"name": "f", "parameters": {"a": "]"}}, {"name": "g", "parameters": {}}])
JUNK = '[{]}," \\né'


@settings(deadline=None)
@given(extra=st.text(alphabet=JUNK, max_size=10), at=st.integers(0, 100), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("kind", ["list", "named"])
def test_cuts_change_nothing(kind, extra, at, seed):
    def new():
        if kind == "list":
            return CallListParser(TOOLS, lambda name, index: f"id{index}")
        return NamedCallParser("f", lambda name, index: f"id{index}")

    text = CALLS if kind == "list" else '{"a": "}"}'
    text = text[:at] + extra + text[at:]
    whole = parse(new(), [text])
    assert parse(new(), cut(text, seed)) == whole
    assert parse(new(), text) == whole


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("layout", [None, 1])
def test_a_forced_call_that_is_cut_anywhere_shows_no_markup(layout, is_cut):
    calls = [{"name": "get_weather", "parameters": {"city": 'a "]}, [{', "days": [1]}}, {"name": "get_time"}]
    text = json.dumps(calls, indent=layout)
    for end in range(len(text) + 1):
        for pieces in ([text[:end]], text[:end]):
            parsed = parse(CallListParser(TOOLS), pieces, is_cut)
            assert parsed.content == ""
            assert [name for name, _ in parsed.calls] == ["get_weather", "get_time"][: len(parsed.calls)]
    arguments = json.dumps(calls[0]["parameters"], indent=layout)
    for end in range(len(arguments) + 1):
        parsed = parse(NamedCallParser("f"), [" " + arguments[:end]], is_cut)
        assert (parsed.content, parsed.calls) == ("", [("f", arguments[:end])] if end else [])


def test_both_forms_are_read():
    assert parse(CallListParser(TOOLS), [CALLS]).calls == [("f", '{"a": "]"}'), ("g", "{}")]
    assert parse(NamedCallParser("f"), ['\n{"a": "}"}\n']).calls == [("f", '{"a": "}"}')]
    assert parse(NamedCallParser("f"), ["Sorry."]).content == "Sorry."
