"""Tools that may be called together with a form for the text: workers allow calls or such a text, and nothing else."""

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.gateway.scripted_gateway import model_folder

from baton.gateway.models.constraints.calls_or_text import calls_or_text
from baton.gateway.models.served import load_served_model
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.format_choice import FormatFlags
from baton.gateway.parsing.output_format import OutputFormat, ToolFormat
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.sampling.grammar.messages import constraint_of
from baton.worker.sampling.grammar.translation.constraint import grammar_of

SPECIAL = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("get_weather", parameters=CITY), Tool("get_time"))
USE = ToolUse(TOOLS, ToolMode.AUTO)
STRICT = ToolUse((Tool("get_weather", parameters=CITY, strict=True), Tool("get_time")), ToolMode.AUTO)
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
SCHEMA = types_pb2.Constraint(json_schema=json.dumps({**ANSWER, "additionalProperties": False}))

CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "llama3_json tag": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter></function></tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "pythonic": '[get_weather(city="Paris")]',
}
TEXTS = {
    "json_schema": (SCHEMA, '{"answer": 4}', '{"answer": "four"}'),
    "json_object": (types_pb2.Constraint(json_object=types_pb2.Constraint.JsonObject()), '{"a": [1]}', "[1]"),
    "regex": (types_pb2.Constraint(regex="[a-c]{3}"), "abc", "abd"),
    "choices": (
        types_pb2.Constraint(choices=types_pb2.Constraint.Choices(texts=[f"c{index};" for index in range(600)])),
        "c599;",
        "c600;",
    ),
    "grammar": (types_pb2.Constraint(grammar='root ::= "x" ("y" | "z")'), "xz", "xx"),
    "lark": (types_pb2.Constraint(grammar='start: "x" ("y" | "z")'), "xz", "xx"),
    "tag": (
        types_pb2.Constraint(structural_tag=json.dumps({"format": {"type": "const_string", "value": "hello"}})),
        "hello",
        "hullo",
    ),
    "structures": (
        types_pb2.Constraint(
            structural_tag=json.dumps(
                {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": ANSWER, "end": "</f>"}]}
            )
        ),
        'text <f=a>{"answer": 1}</f>',
        "text <f=b>",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("marks"), "{{ messages }}", SPECIAL)


@pytest.fixture(scope="module")
def allows(folder):
    """Whether a worker under this constraint can write the text, to its end."""
    tokenizer = Tokenizer(folder / "tokenizer.json")
    library = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=4096 + len(SPECIAL), eos_token=[2])

    def allows(constraint, text):
        matcher = LLMatcher(library, grammar_of(constraint_of(constraint)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return allows


def combined(folder, asked, name="hermes", use=USE):
    formats = OutputFormat(TOOL_FORMATS[name])
    return calls_or_text(asked, "response_format", use, formats, Tokenizer(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_model_or_the_text(folder, allows, name):
    constraint = combined(folder, SCHEMA, name.split()[0])
    assert allows(constraint, CALLS[name])
    assert allows(constraint, '{"answer": 4}')
    assert not allows(constraint, '{"answer": "four"}')
    assert not allows(constraint, "I would say that it is 4.")


@pytest.mark.parametrize(("asked", "good", "bad"), TEXTS.values(), ids=TEXTS)
def test_every_form_of_text_or_calls(folder, allows, asked, good, bad):
    constraint = combined(folder, asked)
    assert allows(constraint, good)
    assert not allows(constraint, bad)
    assert allows(constraint, CALLS["hermes"])


@pytest.mark.parametrize("text", ["[true, 1]", "[ 1]", "[]", '["get_weather(1)"]'])
def test_a_list_may_be_calls_or_json(folder, allows, text):
    constraint = combined(folder, types_pb2.Constraint(json_schema='{"type": "array"}'), "pythonic")
    assert allows(constraint, text)
    assert allows(constraint, CALLS["pythonic"])
    assert not allows(constraint, "[get_rich(1)]")


def test_strict_tools_hold_calls_to_their_schemas(folder, allows):
    constraint = combined(folder, SCHEMA, use=STRICT)
    call = CALLS["hermes"]
    assert allows(constraint, call)
    assert allows(constraint, call + "\n" + call.replace("Paris", "Rome"))
    assert not allows(constraint, call.replace('"Paris"', "5"))
    assert allows(constraint, '{"answer": 4}')
    assert not constraint.lenient
    single = combined(folder, SCHEMA, use=replace(STRICT, parallel=False))
    assert allows(single, call)
    assert not allows(single, call + "\n" + call)


def test_options_of_the_text_stay(folder):
    asked = types_pb2.Constraint(json_schema="{}", no_whitespace=True, lenient=True)
    constraint = combined(folder, asked)
    assert (constraint.no_whitespace, constraint.lenient) == (True, True)


@pytest.mark.parametrize("use", [ToolUse(), ToolUse(TOOLS, ToolMode.NONE)])
def test_without_tools_the_text_alone_counts(folder, use):
    assert combined(folder, SCHEMA, use=use) == SCHEMA


def test_calls_among_the_reasoning_may_end_the_output(folder):
    constraint = combined(folder, SCHEMA, "gpt-oss")
    assert constraint.may_end_in_reasoning
    assert constraint.json_schema == SCHEMA.json_schema


def test_a_plugin_without_the_begin_of_calls_is_refused(folder):
    formats = OutputFormat(ToolFormat(TOOL_FORMATS["hermes"].new_parser))
    with pytest.raises(InvalidRequest) as caught:
        calls_or_text(SCHEMA, "response_format", USE, formats, Tokenizer(folder / "tokenizer.json"))
    assert caught.value.field == "response_format"


def test_both_come_behind_the_reasoning(tmp_path):
    folder = model_folder(tmp_path / "thinker", "{{ messages }}", ["<think>", "</think>"])
    model = load_served_model(str(folder), formats=FormatFlags("hermes", "qwen3"))
    constraint = model.constraint(
        SCHEMA, "response_format", USE, model.tokenizer.encode("Hi", add_special_tokens=False)
    )
    assert constraint.WhichOneof("form") == "structural_tag"
    assert list(constraint.reasoning_end_token_ids) == [4097]
    assert constraint.reasoning_start_token_id == 4096
