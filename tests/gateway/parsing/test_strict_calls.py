"""Strict tools among free text: whatever a grammar lets a model write, its parser reads as calls that are valid."""

import itertools
import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.gateway.parsing_harness import DISTINCT, parse, tool_parser
from support.gateway.scripted_gateway import model_folder

from baton.gateway.models.constraints.calls_or_text import calls_or_text
from baton.gateway.models.constraints.tools import check_tools, tool_constraint
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.sampling.grammar.messages import constraint_of
from baton.worker.sampling.grammar.translation.constraint import grammar_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "exact": {"type": "boolean"},
        "at": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Unit"}, "maxItems": 2},
        "note": {"type": ["string", "null"]},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "code": {"anyOf": [{"type": "string", "enum": ["a", "5", "null"]}, {"type": "integer", "minimum": 7}]},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    Tool("get_weather", parameters=SCHEMA, strict=True),
    Tool("get", parameters={**OPTIONAL, "additionalProperties": False}, strict=True),
    Tool("get_time", parameters=EMPTY, strict=True),
)
VALIDATORS = {tool.name: jsonschema.Draft202012Validator(tool.parameters) for tool in TOOLS}
# Those whose grammar is known.
OF_MESSAGES = [name for name in DISTINCT if TOOL_FORMATS[name].output_form]
FORMATS = [name for name in DISTINCT if name != "qwen3_xml" and (TOOL_FORMATS[name].syntax or name in OF_MESSAGES)]

PYTHONIC = ("pythonic", "lfm2", "olmo3")

# What announces a call, after free text where the format has that.
BEGINS = {
    "hermes": ["Ok <b>.\n<tool_call>"],
    "llama3_json": ['{"name": "get_weather"', "Ok.<|python_tag|>"],
    "mistral": ["Ok [1].[TOOL_CALLS]"],
    "qwen3_coder": ["Ok <b>.\n<tool_call>", "Ok.<function="],
    "deepseek_v3": ["Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "kimi_k2": ["Ok.<|tool_calls_section_begin|><|tool_call_begin|>"],
    "glm45": ["Ok <b>.\n<tool_call>"],
    "pythonic": ["[get_weather(", "\n[get("],
    "granite": ["Ok.<|tool_call|>", "Ok <b>.<tool_call>"],
    "phi4_mini_json": ["Ok. functools"],
    "xlam": ['[{"name": "get_weather"', "Ok.[TOOL_CALLS]"],
    "minimax_m2": ["Ok.\n<minimax:tool_call>\n<invoke"],
    "deepseek_v32": ["Ok.\n<｜DSML｜function_calls>\n<｜DSML｜invoke"],
    "seed_oss": ["Ok <b>.\n<seed:tool_call>"],
    "functiongemma": ["Ok.<start_function_call>"],
    "gemma4": ["Ok.<|tool_call>"],
    "deepseek_v31": ["Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
    "glm47": ["Ok <b>.\n<tool_call>"],
    "deepseek_v4": ["Ok.\n<｜DSML｜tool_calls>\n<｜DSML｜invoke"],
    "step3": ["Ok.<｜tool_calls_begin｜><｜tool_call_begin｜>"],
    "minicpm5": ["Ok <b>.\n<function"],
    "gigachat3": ["Ok <b>.<|function_call|>", "Ok.<|message_sep|>\n\nfunction call<|role_sep|>"],
    "longcat": ["Ok <b>.\n<longcat_tool_call>"],
    "granite-20b-fc": ["Ok <b>.<function_call>"],
    "internlm": ["Ok.<|action_start|>"],
    "minimax": ["Ok <b>.\n<tool_calls>"],
    "jamba": ["Ok <b>.<tool_calls>"],
    "hunyuan_a13b": ["Ok <b>.<tool_calls>"],
    "cohere_command3": ["Ok.<|START_ACTION|>"],
    "apertus": ["Ok.<|tools_prefix|>"],
    "solar_open2": ["Ok.<|tool_call:start|>"],
    "hy_v3": ["Ok.<tool_calls>\n<tool_call>"],
    "lfm2": ["Ok.<|tool_call_start|>"],
    "olmo3": ["Ok <b>.<function_calls>"],
    "minimax_m3": ["Ok <b>.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke"],
    "kimi_k3": ["Ok.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call"],
    "inkling": [
        "<|content_thinking|>Hm.<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>",
        "Hm.<|end_message|><|message_model|><|content_text|>Ok.<|end_message|><|message_model|><|content_invoke_tool_json|>",
    ],
    "gpt-oss": [
        "<|channel|>analysis<|message|>Ok to=functions.get?<|end|><|start|>assistant<|channel|>commentary to=functions."
    ],
}
CONTENT = ("Ok <b>.", "Ok.", "Ok [1].", "")
# What lets a random text come to an end.
CLOSERS = [
    '"', '": ', '}', ']', ')', ', ', '}}', '{}', '1', 'true', 'null', 'Paris', '\n</parameter>\n', '</function>',
    '</tool_call>', '\n</tool_call>', '</arg_value>', '<arg_key>', '<｜tool▁sep｜>', '<｜tool▁call▁end｜>', '\n```',
    '<|tool_call_end|>', '<|call|>', '<|message|>', 'get_weather', '[{"name": "get_weather", "arguments": {',
     '_weather', '>', ' name="get_weather">\n', 'call:get_weather{city:', '<escape>', '<|"|>', ',unit:',
    '<|tool_arg:end|>\n', '<|tool_call:end|>',
    '0', '"}', '", "tool_name": "get_weather", "parameters": {"city": "', '<|END_ACTION|>', '<tool_sep>\n',
    '</param>', '</steptml:invoke>', '</steptml:parameter>', '</function_calls>', '</tool_calls>', '<|action_end|>',
    '</invoke>', '</｜DSML｜invoke>', '</parameter>\n', '</｜DSML｜parameter>\n', '<tool_call|>', '<end_function_call>',
    '[{"name": "get_weather", "arguments": ', '\n', '":', 'celsius', ' tool="get_weather" index="', '"<|sep|>',
    '<|close|>argument<|sep|>', '<|close|>call<|sep|>', '<|open|>argument key="', 'number', '<|end_message|>',
    ']<]minimax[>[</invoke>', ']<]minimax[>[</city>', ']<]minimax[>[</unit>', ']<]minimax[>[<unit>', ']<]minimax[>[</',
    '{"name": "get_weather", "args": {"city": "', '": "', 'city" type="string', 'unit" type="string',
]  # fmt: skip


@pytest.fixture(scope="module", params=["special tokens", "added tokens", "plain text"])
def vocabulary(request, tmp_path_factory):
    """The markup as tokens of its own, special or not, and as text."""
    texts = {text for name in FORMATS for text in TOOL_FORMATS[name].special_tokens}
    special = sorted(texts | {"<|return|>"}) if request.param != "plain text" else ["<|none|>"]
    folder = model_folder(
        tmp_path_factory.mktemp("marks"), "{{ messages }}", special, special=request.param != "added tokens"
    )
    tokenizer = Tokenizer(folder / "tokenizer.json")
    size = 4096 + len(special)
    yield tokenizer, LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=size, eos_token=[2]), size
    tokenizer.close()


def matcher_of(vocabulary, name, use=None):
    use = ToolUse(TOOLS, ToolMode.AUTO) if use is None else use
    if name in OF_MESSAGES and vocabulary[0].added_id("<|channel|>") is None:
        pytest.skip("its markup is special tokens in every vocabulary")
    tokenizer, library, _ = vocabulary
    constraint = tool_constraint(use, OutputFormat(TOOL_FORMATS[name]), tokenizer.added_id)
    matcher = LLMatcher(library, grammar_of(constraint_of(constraint)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(vocabulary, name, text, use=None):
    matcher, token_ids = matcher_of(vocabulary, name, use), vocabulary[0].encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def sampled(vocabulary, matcher, begin, seed):
    """A random output that begins like this, as token ids; None where it finds no end."""
    tokenizer, _, size = vocabulary
    choose = random.Random(seed)
    closers = [tokenizer.encode(text, add_special_tokens=False) for text in CLOSERS]
    token_ids = tokenizer.encode(begin, add_special_tokens=False)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids), begin
    for step in range(150):
        if matcher.is_stopped() or (matcher.is_accepting() and choose.random() < 0.5):
            return token_ids
        wild = choose.random() < (0.25 if step < 40 else 0.02)
        options = [] if wild else [ids for ids in closers if matcher.validate_tokens(ids) == len(ids)]
        if options:
            taken = choose.choice(options)
        else:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
            allowed = [at for at in np.flatnonzero(mask).tolist() if at > 2]
            if not allowed:
                assert matcher.is_accepting()
                return token_ids
            taken = [choose.choice(allowed)]
        assert matcher.consume_tokens(taken)
        token_ids += taken
    return token_ids if matcher.is_accepting() else None


def text_of(tokenizer, token_ids):
    detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
    pieces = [detokenizer.push((token_id,)) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", FORMATS)
def test_all_texts_of_the_grammar_are_parsed_as_valid_calls(vocabulary, name):
    tokenizer, fresh = vocabulary[0], matcher_of(vocabulary, name)
    names = set()
    num_read = 0
    for seed in range(16):
        begin = BEGINS[name][seed % len(BEGINS[name])]
        token_ids = sampled(vocabulary, fresh.deep_copy(), begin, seed)
        if token_ids is None:
            continue
        pieces = text_of(tokenizer, token_ids)
        text = "".join(pieces)
        parsed = parse(tool_parser(name, TOOLS), [text])
        assert parse(tool_parser(name, TOOLS), pieces) == parsed
        assert parsed.calls, text
        for called, arguments in parsed.calls:
            names.add(called)
            VALIDATORS[called].validate(json.loads(arguments))
        num_read += 1
    assert num_read >= 8
    assert "get_weather" in names


GOOD = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "get", "parameters": {"a": 1}}; {"name": "get", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]get{"a": 1}',
    "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "<tool_call>get\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "pythonic": "[get(a=1), get_time()]",
    "granite": '<|tool_call|>[{"name": "get", "arguments": {"a": 1}}]',
    "phi4_mini_json": 'functools[{"name": "get", "arguments": {"a": 1}}]',
    "xlam": '[{"name": "get", "arguments": {"a": 1}}]',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get">\n<parameter name="a">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="a" '
    'string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "seed_oss": "<seed:tool_call>\n<function=get>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
    "functiongemma": "<start_function_call>call:get{a:1}<end_function_call>",
    "gemma4": "<|tool_call>call:get{a:1}<tool_call|>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "glm47": "<tool_call>get<arg_key>a</arg_key><arg_value>1</arg_value>\n</tool_call>".replace("\n", ""),
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="a" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get">'
    '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "minicpm5": '<function name="get"><param name="a">1</param></function>',
    "gigachat3": '<|function_call|>{"name": "get", "arguments": {"a": 1}}',
    "longcat": '<longcat_tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</longcat_tool_call>',
    "granite-20b-fc": '<function_call> {"name": "get", "arguments": {"a": 1}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get", "parameters": {"a": 1}}\n<|action_end|>',
    "minimax": '<tool_calls>\n{"name": "get", "arguments": {"a": 1}}\n</tool_calls>',
    "jamba": '<tool_calls>[{"name": "get", "arguments": {"a": 1}}]</tool_calls>',
    "hunyuan_a13b": '<tool_calls>[{"name": "get", "arguments": {"a": 1}}]</tool_calls>',
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get", "parameters": {"a": 1}}\n]'
    "<|END_ACTION|>",
    "apertus": '<|tools_prefix|>[{"get": {"a": 1}}]<|tools_suffix|>',
    "hy_v3": "<tool_calls>\n<tool_call>get<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "</tool_calls>",
    "solar_open2": "<|tool_call:start|>get\n<|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>\n<|tool_call:end|>",
    "lfm2": "<|tool_call_start|>[get(a=1), get_time()]<|tool_call_end|>",
    "olmo3": "<function_calls>\nget(a=1)\n</function_calls>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get">]<]minimax[>[<a>1]<]minimax[>[</a>'
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|><|open|>argument key="a" type="number"'
    "<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "inkling": "<|content_thinking|>Hm.<|end_message|><|message_model|>get<|content_invoke_tool_json|>"
    '{"name": "get", "args": {"a": 1}}<|end_message|>',
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_follow_the_schema_and_text_is_free(vocabulary, name):
    good = GOOD[name]
    assert allows(vocabulary, name, good)
    assert not allows(vocabulary, name, good.replace("1", '"x"'))
    if name not in ("llama3_json", "pythonic", "xlam"):  # else it is text
        assert not allows(vocabulary, name, good.replace("get", "got"))
    free = 'Is it 4 < 5, [get] or {"name": "Al"}?\n`get(a="x")` ends.'
    assert allows(vocabulary, name, ANSWERS.get(name, "") + free)


FINAL = {
    "gpt-oss": "<|end|><|start|>assistant<|channel|>final<|message|>Ok.",
    "inkling": "<|end_message|><|message_model|><|content_text|>Ok.",
}


@pytest.mark.parametrize("name", OF_MESSAGES)
@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_a_format_of_messages_has_demanded_calls_after_its_reasoning(vocabulary, name, mode):
    time, loose = TOOLS[2], replace(TOOLS[1], strict=False)
    use = ToolUse((loose, time), mode, "get" if mode is ToolMode.NAMED else "")
    good = GOOD[name]
    assert allows(vocabulary, name, good, use)
    reasoning, call = good[: (at := good.index("Hm.") + 3)], good[at:]
    bare = call.split("assistant")[-1].split("<|message_model|>")[-1]
    assert allows(vocabulary, name, bare, use)
    assert not allows(vocabulary, name, good.replace("1", '"x"'), use)
    for text in (reasoning, reasoning + FINAL[name], ANSWERS[name] + "Ok.", good + FINAL[name], ""):
        assert not allows(vocabulary, name, text, use), text
    assert allows(vocabulary, name, good.replace("get", "get_time").replace('"a": 1', ""), use) == (
        mode is ToolMode.REQUIRED
    )
    twice = good.removesuffix("<|call|>").removesuffix("<|end_message|>") + call
    several = mode is ToolMode.REQUIRED
    assert allows(vocabulary, name, twice, use) == several
    assert not allows(vocabulary, name, twice, replace(use, parallel=False))
    parsed = parse(OutputFormat(TOOL_FORMATS[name]).output_parsing(use, "").new_parser(), [twice])
    assert (parsed.reasoning, parsed.calls) == ("Hm.", [("get", '{"a": 1}')] * 2)


ANSWERS = {"gpt-oss": "<|channel|>final<|message|>", "inkling": "<|content_text|>"}
FORM = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"], "additionalProperties": False}
FORMS = {'{"z": 1}': FORM, '[{"z": 1}]': {"type": "array", "items": FORM}, "[1]": {"items": {"type": "integer"}}}


BARE = [name for name in FORMATS if TOOL_FORMATS[name].bare_start]


@pytest.mark.parametrize(
    ("name", "answer"), [*((name, '{"z": 1}') for name in FORMATS), *itertools.product(BARE, list(FORMS)[1:])]
)
def test_the_output_is_calls_or_a_text_of_another_form(vocabulary, name, answer):
    tokenizer, library, _ = vocabulary
    if name in OF_MESSAGES and tokenizer.added_id("<|channel|>") is None:
        pytest.skip("its markup is special tokens in every vocabulary")
    requested = types_pb2.Constraint(json_schema=json.dumps(FORMS[answer]))
    use, formats = ToolUse(TOOLS, ToolMode.AUTO), OutputFormat(TOOL_FORMATS[name])
    combined = calls_or_text(requested, "response_format", use, formats, tokenizer)
    fresh = LLMatcher(library, grammar_of(constraint_of(combined)), log_level=0)
    assert not fresh.is_error(), fresh.get_error()

    def takes(text):
        matcher, token_ids = fresh.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    before = ANSWERS.get(name, "")
    assert takes(GOOD[name])
    assert takes(before + answer)
    assert not takes(GOOD[name].replace("1", '"x"'))
    assert not takes(before + answer.replace("1", '"x"'))
    assert not takes(before + "Free text.")


@pytest.mark.parametrize("name", FORMATS)
def test_tools_that_are_not_strict_stay_free_beside_strict_ones(vocabulary, name):
    use = ToolUse((Tool("get", parameters=OPTIONAL), TOOLS[0]), ToolMode.AUTO)
    text = GOOD[name].replace(", get_time()", "").replace("1", "[1]" if name in PYTHONIC else "11")
    assert allows(vocabulary, name, text, use)


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_an_answer_of_its_own_may_begin_like_calls(vocabulary, name):
    texts = {"llama3_json": ['{"name": "Al", "age": 3}', '{"type": "x", "a": {}}'], "pythonic": ["[1] Paris", "[get]"]}
    assert allows(vocabulary, name, f"\n\n{GOOD[name]}")
    for text in texts[name]:
        assert allows(vocabulary, name, text)
        assert parse(tool_parser(name, TOOLS), [text]).content == text


def test_what_tags_cannot_express_is_refused_by_name():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1}
    for name in ("qwen3_coder", "glm45", "pythonic"):
        use = ToolUse((TOOLS[1], Tool("f", parameters=schema, strict=True)), ToolMode.AUTO)
        with pytest.raises(InvalidRequest, match="minProperties") as refused:
            check_tools(use, OutputFormat(TOOL_FORMATS[name]), "m")
        assert refused.value.field == "tools.1.function.parameters"


def test_values_that_a_format_cannot_hold_are_refused_by_name():
    free = {"type": "object", "properties": {"a": {"type": "object"}}}
    loop = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "array"}}}
    loop["$defs"]["A"]["items"] = {"$ref": "#/$defs/A"}
    many = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 33}}}
    for schema, problem in ((free, "members of 'a'"), (loop, "depth of 'a'"), (many, "at most 32")):
        use = ToolUse((Tool("f", parameters=schema, strict=True),), ToolMode.AUTO)
        with pytest.raises(InvalidRequest, match=problem):
            check_tools(use, OutputFormat(TOOL_FORMATS["gemma4"]), "m")


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ('a:[[1],[]],b:{c:<|"|>x,]<|"|>},d:[1,2],e:[]', True),
        ('a:[],b:{},d:[1,2,3],e:<|"|>t<|"|>', True),
        ("a:[],b:{},d:[1,2,3,4],e:[]", False),
        ("a:[],b:{},d:[1],e:[]", False),
        ("a:[],b:{c:1},d:[1,2],e:[]", False),
        ("a:[],b:{},d:[1,2],e:[true]", False),
    ],
)
def test_lists_and_objects_are_held_to_their_schemas_between_quotes(vocabulary, arguments, allowed):
    numbers = {"type": "array", "items": {"type": "integer"}}
    properties = {
        "a": {"type": "array", "items": numbers},
        "b": {"type": "object", "properties": {"c": {"type": "string"}}, "additionalProperties": False},
        "d": {**numbers, "minItems": 2, "maxItems": 3},
        "e": {"type": ["array", "string"], "items": {"type": "integer"}},
    }
    tool = Tool("f", parameters={"type": "object", "properties": properties, "required": list(properties)}, strict=True)
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    assert allows(vocabulary, "gemma4", text, ToolUse((tool,), ToolMode.AUTO)) == allowed
    if allowed:
        (call,) = parse(tool_parser("gemma4", (tool,)), [text]).calls
        jsonschema.validate(json.loads(call[1]), tool.parameters)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ("<a><item>1</item></a><b><c>x]</c></b><d><item>1</item><item>2</item></d>", True),
        ("<a></a><b></b><d><item>1</item><item>2</item><item>3</item></d>", True),
        ("<a><item>x</item></a><b></b><d><item>1</item><item>2</item></d>", False),
        ("<a></a><b><e>1</e></b><d><item>1</item><item>2</item></d>", False),
        ("<a></a><b></b><d><item>1</item></d>", False),
        ("<a></a><d><item>1</item><item>2</item></d>", False),
    ],
)
def test_lists_and_objects_are_held_to_their_schemas_in_elements(vocabulary, arguments, allowed):
    numbers = {"type": "array", "items": {"type": "integer"}}
    text_in = {"type": "object", "properties": {"c": {"type": "string"}}, "additionalProperties": False}
    properties = {"a": numbers, "b": text_in, "d": {**numbers, "minItems": 2, "maxItems": 3}}
    tool = Tool("f", parameters={"type": "object", "properties": properties, "required": list(properties)}, strict=True)
    text = f'<tool_call>\n<invoke name="f">{arguments}</invoke>\n</tool_call>'.replace("<", "]<]minimax[>[<")
    assert allows(vocabulary, "minimax_m3", text, ToolUse((tool,), ToolMode.AUTO)) == allowed
    if allowed:
        (call,) = parse(tool_parser("minimax_m3", (tool,)), [text]).calls
        jsonschema.validate(json.loads(call[1]), tool.parameters)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"type": "object"}, "members of 'a'"),
        ({"type": ["array", "null"], "items": {}}, "may have no other type"),
        ({"anyOf": [{"type": "array"}, {"type": "array"}]}, "alternatives of 'a'"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 33}, "at most 32"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems of 'a'"),
    ],
)
def test_values_that_elements_cannot_hold_are_refused_by_name(value, problem):
    tool = Tool("f", parameters={"type": "object", "properties": {"a": value}}, strict=True)
    with pytest.raises(InvalidRequest, match=problem):
        check_tools(ToolUse((tool,), ToolMode.AUTO), OutputFormat(TOOL_FORMATS["minimax_m3"]), "m")
