"""Schemas of strict tools that expand without end, or are none: refused by name, at the cost of what was sent."""

import pytest
from support.gateway.parsing_harness import DISTINCT

from baton.gateway.models.constraints.structured_output import MAX_BYTES
from baton.gateway.models.constraints.tools import check_tools, tool_constraint
from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.reading.schema_kinds import ALL_KINDS, kinds_of, visited_kinds
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

OF_TAGS = ("qwen3_coder", "glm45", "pythonic", "gemma4", "minimax_m2", "minimax_m3", "kimi_k3", "solar_open2")
A = "#/$defs/a"


def arguments(value, **defs):
    schema = {"type": "object", "properties": {"a": value}, "additionalProperties": False}
    return {**schema, "$defs": defs} if defs else schema


def lists(depth):
    value = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "array", "items": value, "minItems": 32, "maxItems": 32}
    return value


def objects(depth):
    below = {f"p{index}": {"$ref": f"#/$defs/d{depth + 1}"} for index in range(20)}
    return {"type": "object", "properties": below, "additionalProperties": False}


def many(kind):
    return {f"d{index}": {"type": kind} for index in range(2000)}


HOSTILE = {
    "lists in lists": arguments(lists(7)),
    "objects by references": arguments(
        {"$ref": "#/$defs/d0"}, d6={"type": "null"}, **{f"d{depth}": objects(depth) for depth in range(6)}
    ),
    "definitions of each property": {
        "type": "object",
        "properties": many("integer"),
        "additionalProperties": False,
        "$defs": many("string"),
    },
    "definitions of each value": arguments({"enum": [*range(2000), "x"]}, **many("string")),
    "alternatives of itself": arguments({"$ref": A}, a={"anyOf": [{"$ref": A}] * 3}),
    "mixed alternatives of itself": arguments({"$ref": A}, a={"anyOf": [{"$ref": A}, {"type": ["string", "null"]}]}),
    "many alternatives for each property": {
        "type": "object",
        "properties": {f"p{index}": {"$ref": A} for index in range(2000)},
        "$defs": {"a": {"anyOf": [{"const": index} for index in range(5000)]}},
    },
}


def text_of(name, schema, mode):
    use, formats = ToolUse((Tool("f", parameters=schema, strict=True),), mode), OutputFormat(TOOL_FORMATS[name])
    check_tools(use, formats, "m")
    constraint = tool_constraint(use, formats, lambda text: 5)
    return "" if constraint is None else constraint.structural_tag or constraint.json_schema


def refusal_of(name, schema, mode):
    """Returns the error's field, or an empty text."""
    try:
        text_of(name, schema, mode)
    except InvalidRequest as error:
        return error.field
    return ""


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", DISTINCT)
def test_the_grammar_of_calls_is_no_larger_than_workers_take(name, schema):
    for mode in (ToolMode.AUTO, ToolMode.REQUIRED):
        field = refusal_of(name, schema, mode)
        assert field.startswith("tools") or len(text_of(name, schema, mode)) <= 4 * MAX_BYTES  # with special tokens


def test_the_error_says_what_expands():
    with pytest.raises(InvalidRequest, match=r"tools\.0\.function\.parameters: .* more than 262144 bytes"):
        text_of("gemma4", HOSTILE["lists in lists"], ToolMode.AUTO)
    with pytest.raises(InvalidRequest, match="cannot express more than 16384 members"):
        text_of("gemma4", HOSTILE["objects by references"], ToolMode.AUTO)


def test_each_alternative_of_a_type_is_looked_at_once():
    schema = HOSTILE["alternatives of itself"]
    kinds, num_visited = visited_kinds({"$ref": A}, schema)
    assert kinds == ALL_KINDS
    assert num_visited < 10
    texts = {"$defs": {"a": {"anyOf": [{"$ref": A}, {"type": "string"}, {"oneOf": [{"const": 1}, {"$ref": A}]}]}}}
    assert kinds_of({"$ref": A}, texts) == {"string", "integer"}
    assert visited_kinds({"anyOf": [{"type": "null"} for _ in range(100_000)]}, {})[1] < 2000


ODD = (None, True, 5, "x", [], [5], [{}], {"a": 5})
FIELDS = ("", "tools", "tools.0.function.parameters", "tools.0.function.strict")
KEYS = ("type", "properties", "required", "$defs", "$ref", "enum", "const", "anyOf", "items", "minItems", "maxLength")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", OF_TAGS)
def test_a_schema_that_is_none_is_no_defect(name, key):
    for odd in ODD:
        for kind in ("object", "array", "string"):
            value = {"items": {"type": "integer"}} if kind == "array" else {}
            schema = {**value, "type": kind, key: odd}
            for given in (schema, arguments(schema)):
                assert refusal_of(name, given, ToolMode.AUTO) in FIELDS
