"""Structured outputs: conversion of the client's fields to the workers' constraint, and refusals."""

import asyncio
import json

import pytest
from support.gateway.rest_harness import SAMPLE, rest_side, say, until

from baton.gateway.models.constraints.structured_output import (
    MAX_BYTES,
    MAX_CHOICES,
    check_constraint,
    name_field,
    with_reasoning,
)
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.reasoning_registry import REASONING_FORMATS
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.rpc.errors import InvalidRequest, Unavailable
from baton.v1 import types_pb2

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b", "a"]}
DEEP = json.loads('{"items":' * 70 + "{}" + "}" * 70)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def schema_format(schema=SCHEMA, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


def outputs(**structured):
    return {"structured_outputs": structured}


async def constraint_for(fields, path="/v1/chat/completions"):
    base = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, base | fields)
        assert answer.status == 200, answer.body
        return rest.generator.started[0].request


GOOD = {
    "text": ({"response_format": {"type": "text"}}, None, ""),
    "json_object": ({"response_format": {"type": "json_object"}}, ("json_object", None), "response_format"),
    "schema": (schema_format(), ("json_schema", SCHEMA), "response_format.json_schema.schema"),
    "schema true": (schema_format(True), ("json_schema", True), "response_format.json_schema.schema"),
    "tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ("structural_tag", {"type": "structural_tag", "format": {"type": "any_text"}}),
        "response_format",
    ),
    "json": (outputs(json=SCHEMA), ("json_schema", SCHEMA), "structured_outputs.json"),
    "json text": (outputs(json=json.dumps(SCHEMA)), ("json_schema", SCHEMA), "structured_outputs.json"),
    "regex": (outputs(regex="a+"), ("regex", "a+"), "structured_outputs.regex"),
    "choice": (outputs(choice=["a", "b"]), ("choices", ["a", "b"]), "structured_outputs.choice"),
    "grammar": (outputs(grammar="root ::= x"), ("grammar", "root ::= x"), "structured_outputs.grammar"),
    "object": (outputs(json_object=True), ("json_object", None), "structured_outputs.json_object"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "expected", "field"), GOOD.values(), ids=GOOD)
async def test_fields_become_a_constraint(path, fields, expected, field):
    request = await constraint_for(fields, path)
    assert request.constraint_field == field
    if expected is None:
        assert request.constraint is None
        return
    form, value = expected
    assert request.constraint.WhichOneof("form") == form
    if form == "choices":
        assert list(request.constraint.choices.texts) == value
    elif form in ("json_schema", "structural_tag"):
        text = getattr(request.constraint, form)
        assert json.loads(text) == value
        assert value is True or list(json.loads(text)) == list(value)
    elif value is not None:
        assert getattr(request.constraint, form) == value


async def test_options_and_strictness_go_along():
    options = {"disable_any_whitespace": True, "disable_additional_properties": True, "whitespace_pattern": " ?"}
    constraint = (await constraint_for(outputs(json=SCHEMA, **options))).constraint
    assert (constraint.no_whitespace, constraint.no_additional_properties) == (True, True)
    assert constraint.whitespace_pattern == " ?"
    assert not constraint.lenient
    assert (await constraint_for(schema_format())).constraint.lenient
    assert not (await constraint_for(schema_format(strict=True))).constraint.lenient


BAD = {
    "unknown type": ({"response_format": {"type": "poem"}}, "response_format.type"),
    "no schema format": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    "a list": (schema_format([]), "response_format.json_schema.schema"),
    "too deep": (schema_format(DEEP), "response_format.json_schema.schema"),
    "too large": (schema_format({"title": "x" * 300_000}), "response_format.json_schema.schema"),
    "nothing": (outputs(), "structured_outputs"),
    "two": (outputs(regex="a", choice=["a"]), "structured_outputs"),
    "both": (schema_format() | outputs(regex="a"), "structured_outputs"),
    "a number": (outputs(regex=5), "structured_outputs.regex"),
    "empty regex": (outputs(regex=""), "structured_outputs.regex"),
    "large regex": (outputs(regex="a" * 300_000), "structured_outputs.regex"),
    "no choice": (outputs(choice=[]), "structured_outputs.choice"),
    "empty choice": (outputs(choice=["a", ""]), "structured_outputs.choice"),
    "many choices": (outputs(choice=["a"] * (MAX_CHOICES + 1)), "structured_outputs.choice"),
    "no JSON": (outputs(json="{"), "structured_outputs.json"),
    "deep text": (outputs(json=json.dumps(DEEP)), "structured_outputs.json"),
    "a large integer": (schema_format({"type": "integer", "maximum": 2**64}), "response_format.json_schema.schema"),
    "a large negative": (schema_format({"enum": ["a", [-(2**63) - 1]]}), "response_format.json_schema.schema"),
    "a huge integer": (outputs(json={"properties": {"a": {"const": 10**300}}}), "structured_outputs.json"),
    "only an integer": (outputs(json=10**30), "structured_outputs.json"),
    "a large tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "token", "token_id": 2**70}}},
        "response_format",
    ),
    "a long text": (outputs(json=json.dumps(["x" * MAX_BYTES])), "structured_outputs.json"),
    "many values": (
        outputs(structural_tag={"structures": [0] * (MAX_BYTES // 2 + 1)}),
        "structured_outputs.structural_tag",
    ),
    "pattern too long": (outputs(json={}, whitespace_pattern=" " * 257), "structured_outputs.whitespace_pattern"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
async def test_malformed_constraints_are_refused_by_name(path, fields, param):
    base = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    async with rest_side() as rest:
        answer = await rest.post(path, base | fields)
        assert not rest.generator.started
        assert rest.admission.in_use == 0
    assert answer.status == 400
    assert answer.error["param"] == param


async def test_a_large_integer_is_refused_with_the_allowed_range():
    async with rest_side() as rest:
        answer = await rest.chat(**schema_format({"type": "integer", "maximum": 2**64}))
    assert answer.error["message"] == (
        "response_format.json_schema.schema has 18446744073709551616; integers must be from -9223372036854775808 to"
        " 18446744073709551615"
    )
    largest = (await constraint_for(schema_format({"minimum": -(2**63), "maximum": 2**64 - 1}))).constraint
    assert json.loads(largest.json_schema) == {"minimum": -(2**63), "maximum": 2**64 - 1}


@pytest.mark.parametrize("choice", ["required", "auto", NAMED], ids=["required", "auto", "named"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schema", [{"properties": {"a": {"maximum": 2**64}}}, DEEP], ids=["large integer", "deep"])
async def test_schemas_of_tools_that_cannot_be_written_are_refused_by_name(choice, strict, schema):
    parameters = {"type": "object", **schema}
    wide = {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": strict}}
    async with rest_side(tool_call_parser="hermes") as rest:
        answer = await rest.chat(tools=[TOOL, wide], tool_choice=choice)
        assert not rest.generator.started
        assert rest.admission.in_use == 0
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "tools.1.function.parameters"


async def test_structured_outputs_and_a_named_tool_exclude_each_other():
    async with rest_side() as rest:
        answer = await rest.chat(tools=[TOOL], tool_choice=NAMED, **outputs(regex="a"))
    assert answer.status == 400
    assert answer.error["param"] == "structured_outputs"


def test_a_contract_without_form_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        check_constraint(types_pb2.Constraint())
    assert caught.value.field == "constraint"


TAGS = {"<think>": [7], "</think>": [8], "[THINK]": [1, 2]}
TAGS |= {"<|channel|>final<|message|>": [4, 5, 6], "<|content_text|>": [3]}


class Tokens(Tokenizer):
    """The sample's tokenizer, as if it had the tags of a reasoning model."""

    def encode(self, text, *, add_special_tokens):
        return TAGS.get(text, [9])

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join({7: "<think>", 8: "</think>"}.get(token_id, "x") for token_id in token_ids) + "\n"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "start", "end"),
    [
        (None, [9], None, []),
        ("qwen3", [9], 7, [8]),
        ("qwen3", [9, 7], None, [8]),
        ("qwen3", [9, 7, 8], None, []),
        ("deepseek_r1", [9], None, [8]),
        ("deepseek_r1", [9, 7, 8], None, []),
        ("mistral", [9], None, []),
        ("gpt-oss", [9], None, [4, 5, 6]),
        ("inkling", [9], None, [3]),
    ],
)
def test_a_constraint_starts_behind_the_reasoning(reasoning, prompt, start, end):
    formats = OutputFormat(reasoning=REASONING_FORMATS[reasoning] if reasoning else None)
    tokenizer = Tokens(SAMPLE / "tokenizer.json")
    constraint = with_reasoning(types_pb2.Constraint(regex="a"), formats, tokenizer, prompt)
    assert constraint.regex == "a"
    assert list(constraint.reasoning_end_token_ids) == end
    assert (constraint.reasoning_start_token_id if constraint.HasField("reasoning_start_token_id") else None) == start
    own = types_pb2.Constraint(regex="a", reasoning_end_token_ids=[3])
    assert with_reasoning(own, formats, tokenizer, prompt) == own


@pytest.mark.parametrize(("name", "end"), [("gpt-oss", [4, 5, 6]), ("inkling", [3])])
def test_answers_among_messages_begin_at_their_own(name, end):
    formats = OutputFormat(tools=TOOL_FORMATS[name])
    constraint = with_reasoning(types_pb2.Constraint(regex="a"), formats, Tokens(SAMPLE / "tokenizer.json"), [9])
    assert list(constraint.reasoning_end_token_ids) == end


def test_errors_of_workers_name_the_clients_fields():
    error = InvalidRequest("constraint.regex: unclosed group", field="constraint.regex")
    name_field(error, "structured_outputs.regex")
    assert (error.field, error.message) == ("structured_outputs.regex", "structured_outputs.regex: unclosed group")
    other = Unavailable("gone", field="prompt")
    name_field(other, "structured_outputs.regex")
    assert (other.field, other.message) == ("prompt", "gone")


async def test_an_early_error_of_a_stream_has_its_status():
    async with rest_side() as rest:
        task = rest.chat(stream=True, **outputs(regex="a"))

        async def fail():
            generation = await rest.generator.next()
            generation.sink.on_error(InvalidRequest("structured_outputs.regex: no", field="structured_outputs.regex"))

        answer, _ = await asyncio.gather(task, fail())
        await until(lambda: rest.admission.in_use == 0)
    assert answer.status == 400
    assert answer.error["param"] == "structured_outputs.regex"
