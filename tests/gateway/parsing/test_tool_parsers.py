"""Tool parsers against the formats that models are documented to write, whole, cut anywhere, and broken."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.parsing_harness import DISTINCT, TOOLS, cut, parse, tool_parser

from baton.gateway.parsing.registry import TOOL_FORMATS

CALL = "get_weather"
FENCE = "```"


def deepseek(name, arguments):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{FENCE}json\n{arguments}\n{FENCE}<｜tool▁call▁end｜>"


def kimi(name, index, arguments):
    return f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def glm(name, **arguments):
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def qwen(name, **arguments):
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def step3(name, **arguments):
    pairs = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in arguments.items())
    invoked = f'<steptml:invoke name="{name}">{pairs}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoked}<｜tool_call_end｜>"


def harmony(name, arguments):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


# What the model writes, the text of the answer, the calls as (name, arguments).
SAMPLES = {
    "hermes one": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "",
        [(CALL, {"city": "Paris", "days": 2})],
    ),
    "hermes two with text": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [(CALL, {"city": "Rom"}), ("get_time", {})],
    ),
    "hermes arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"city": "a \\"b\\" }{ é"}, "name": "get_weather"}</tool_call>',
        "",
        [(CALL, {"city": 'a "b" }{ é'})],
    ),
    "hermes markup in a string": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        "",
        [(CALL, {"city": "</tool_call>"})],
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\ud83d\\ude00\\"}"}</tool_call>',
        "",
        [(CALL, {"city": "😀"})],
    ),
    "hermes a line break in a string": (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        "",
        [(CALL, {"city": "a\nb\tc"})],
    ),
    "hermes no arguments": ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", {})]),
    "hermes null arguments": (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        "",
        [("get_time", {})],
    ),
    "llama one": (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "llama typed, tagged, two": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {}}',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "llama 4": (
        "llama3_json",
        '<|python_start|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|python_end|>',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "llama an answer in JSON": (
        "llama3_json",
        '{"name": "Alice", "parameters": {"age": 3}}',
        '{"name": "Alice", "parameters": {"age": 3}}',
        [],
    ),
    "llama another answer in JSON": ("llama3_json", '{"result": [1, 2]}', '{"result": [1, 2]}', []),
    "mistral array": (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "mistral v11": (
        "mistral",
        'Sure.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}',
        "Sure.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "mistral v13": (
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "[ARGS]"}',
        "",
        [(CALL, {"city": "[ARGS]"})],
    ),
    "qwen one": (
        "qwen3_coder",
        qwen("get_weather", city="Paris", days=3, exact="true", at='{"lat": 1.5}', note="null"),
        "",
        [(CALL, {"city": "Paris", "days": 3, "exact": True, "at": {"lat": 1.5}, "note": None})],
    ),
    "qwen lines in a value": (
        "qwen3_xml",
        "I check.\n\n" + qwen("get_weather", city='def f():\n    return "<b>"\n', note="5"),
        "I check.",
        [(CALL, {"city": 'def f():\n    return "<b>"\n', "note": "5"})],
    ),
    "qwen forgot tags": (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n1\n</function>",
        "",
        [(CALL, {"city": "Paris", "days": 1})],
    ),
    "qwen Python's words": (
        "qwen3_coder",
        qwen("get_weather", city="x", exact="True") + "\n" + qwen("get_time"),
        "",
        [(CALL, {"city": "x", "exact": True}), ("get_time", {})],
    ),
    "deepseek v3": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>" + deepseek("get_weather", '{"city": "Paris"}') + "\n"
        + deepseek("get_time", "{}") + "<｜tool▁calls▁end｜>",
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "kimi": (
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|>" + kimi("get_weather", 0, '{"city": "Paris"}')
        + kimi("get_time", 1, "{}") + "<|tool_calls_section_end|>",
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "glm": (
        "glm45",
        "Ok.\n" + glm("get_weather", city="Paris\n", days=3, note="5") + "\n" + glm("get_time"),
        "Ok.",
        [(CALL, {"city": "Paris\n", "days": 3, "note": "5"}), ("get_time", {})],
    ),
    "glm on one line": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a <b></arg_value></tool_call>",
        "",
        [(CALL, {"city": "a <b>"})],
    ),
    "harmony": (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + harmony("get_weather", '{"city": "Paris"}'),
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "harmony preamble, recipient first, two": (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary"
        ' json<|message|>{"city": "Paris"}<|call|><|start|>assistant' + harmony("get_time", "{}"),
        "I look.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "harmony answer": ("gpt-oss", "<|channel|>final<|message|>Hello.", "Hello.", []),
    "pythonic": (
        "pythonic",
        "[get_weather(city=\"Paris 'x'\", days=3, exact=True, at={'lat': 1.5, 'l': [1, None]}), get_time()]",
        "",
        [(CALL, {"city": "Paris 'x'", "days": 3, "exact": True, "at": {"lat": 1.5, "l": [1, None]}}), ("get_time", {})],
    ),
    "pythonic escapes": (
        "pythonic",
        "<|python_start|>[get_weather(city='a\\'b\\n\\u00e9\\d]')]<|python_end|>",
        "",
        [(CALL, {"city": "a'b\né\\d]"})],
    ),
    "granite": (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "granite 3.1": (
        "granite",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>',
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "phi": (
        "phi4_mini_json",
        'Ok. functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "xlam": (
        "xlam",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "xlam behind a mark": (
        "xlam",
        'Ok.[TOOL_CALLS][{"name": "get_time", "arguments": {}}]',
        "Ok.",
        [("get_time", {})],
    ),
    "xlam an answer in JSON": ("xlam", '[{"name": "Al"}]', '[{"name": "Al"}]', []),
    "minimax": (
        "minimax_m2",
        'Ok.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Pa\nris</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3, "note": None}), ("get_time", {})],
    ),
    "deepseek v3.2": (
        "deepseek_v32",
        'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">5</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Ok.",
        [(CALL, {"city": "5", "days": 3})],
    ),
    "seed": (
        "seed_oss",
        "Ok.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris\n</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Ok.",
        [(CALL, {"city": "\nPa\nris\n", "days": 3})],
    ),
    "functiongemma": (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Pa{,}ris<escape>,days:3,exact:true,"
        "at:{lat:1.5,l:[1,<escape>a<escape>]}}<end_function_call><start_function_call>call:get_time{}<end_function_call>",
        "",
        [(CALL, {"city": "Pa{,}ris", "days": 3, "exact": True, "at": {"lat": 1.5, "l": [1, "a"]}}), ("get_time", {})],
    ),
    "gemma 4": (
        "gemma4",
        'Ok.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        "Ok.",
        [(CALL, {"city": "Paris", "days": 3}), ("get_time", {})],
    ),
    "glm 4.7": (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "",
        [(CALL, {"city": "Paris"})],
    ),
    "command a": (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "apertus": (
        "apertus",
        'Ok. <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"get_time": {}}]<|tools_suffix|>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "hunyuan 3": (
        "hy_v3",
        "Ok.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "days": 3}), ("get_time", {})],
    ),
    "deepseek v4": (
        "deepseek_v4",
        'Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "step 3": (
        "step3",
        "Ok.<｜tool_calls_begin｜>" + step3("get_weather", city="Pa\nris", days=3) + "\n" + step3("get_time")
        + "<｜tool_calls_end｜>",
        "Ok.",
        [(CALL, {"city": "Pa\nris", "days": 3}), ("get_time", {})],
    ),
    "longcat": (
        "longcat",
        'Ok.\n<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>\n'
        '<longcat_tool_call>\n{"name": "get_time"}\n</longcat_tool_call>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "granite 20b": (
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n<function_call> '
        '{"name": "get_time", "arguments": {}}',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "internlm": (
        "internlm",
        'Ok.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        "Ok.",
        [(CALL, {"city": "Paris"})],
    ),
    "minimax m1": (
        "minimax",
        'Ok.\n<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_time", "arguments": {}}\n</tool_calls>',
        "Ok.",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "jamba": (
        "jamba",
        ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris"}},\n'
        '    {"name": "get_time", "arguments": {}}\n]</tool_calls>',
        "",
        [(CALL, {"city": "Paris"}), ("get_time", {})],
    ),
    "hunyuan": (
        "hunyuan_a13b",
        '助手：Ok.<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "at": {"a": {"b": {}}}}}]'
        "</tool_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "at": {"a": {"b": {}}}})],
    ),
    "lfm2": (
        "lfm2",
        "Ok.<|tool_call_start|>[get_weather(city='Pa\"ris', days=3), get_time()]<|tool_call_end|>",
        "Ok.",
        [(CALL, {"city": 'Pa"ris', "days": 3}), ("get_time", {})],
    ),
    "olmo 3": (
        "olmo3",
        "Ok.\n<function_calls>get_weather(city=\"Paris\", exact=true, note=null)\nget_time()</function_calls>",
        "Ok.",
        [(CALL, {"city": "Paris", "exact": True, "note": None}), ("get_time", {})],
    ),
    "pythonic a list": ("pythonic", "[1] Paris, [2] Rome (city=1)", "[1] Paris, [2] Rome (city=1)", []),
}  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
def test_documented_formats(sample):
    name, text, content, calls = SAMPLES[sample]
    parsed = parse(tool_parser(name), [text])
    assert parsed.content == content
    assert [(called, json.loads(arguments)) for called, arguments in parsed.calls] == calls
    assert parsed.num_ended == len(calls)


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_character_alone_gives_the_same(sample):
    name, text, *_ = SAMPLES[sample]
    assert parse(tool_parser(name), text) == parse(tool_parser(name), [text])


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_end_is_an_end(sample):
    """A text truncated anywhere raises nothing, and keeps the start of the answer and complete calls."""
    name, text, _content, calls = SAMPLES[sample]
    for end in range(len(text)):
        parsed = parse(tool_parser(name), [text[:end]])
        whole = [called for called in parsed.calls if _is_json(called[1])]
        assert [called for called, _ in whole] == [called for called, _ in calls][: len(whole)]
        assert len(parsed.calls) <= len(calls)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_call_that_the_limit_cuts_shows_no_markup(sample):
    """Once a call is announced, its markup is no text, wherever the output ends."""
    name, text, content, calls = SAMPLES[sample]
    starts = TOOL_FORMATS[name].starts
    for end in range(len(text) + 1):
        parsed = parse(tool_parser(name), [text[:end]], is_cut=True)
        assert parse(tool_parser(name), text[:end], is_cut=True) == parsed
        assert [called for called, _ in parsed.calls] == [called for called, _ in calls][: len(parsed.calls)]
        announced = parsed.calls or any(start in text[:end] for start in starts)
        if announced:
            assert content.startswith(parsed.content)


@pytest.mark.parametrize("sample", SAMPLES)
def test_no_markup_is_ever_shown_before_a_call(sample):
    name, text, content, calls = SAMPLES[sample]
    if not calls:
        return
    parser, shown = tool_parser(name), ""
    for char in text:
        shown += "".join(getattr(event, "text", "") for event in parser.push(char) if "Content" in type(event).__name__)
        assert content.startswith(shown)


def _is_json(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_arguments_come_as_they_are_written():
    parser = tool_parser("hermes")
    parser.push('<tool_call>{"name": "get_weather", "arg')
    fragments = [parser.push(piece) for piece in ('uments": {"ci', 'ty": "P', 'aris"', "}")]
    assert [[event.fragment for event in events] for events in fragments] == [['{"ci'], ['ty": "P'], ['aris"'], ["}"]]


def test_text_values_come_as_they_are_written():
    parser = tool_parser("qwen3_coder")
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert [event.fragment for event in parser.push('a "b')] == ['a \\"b']


MARKUP = sorted(
    {token for one in TOOL_FORMATS.values() for token in one.special_tokens}
    | {
        '{"name": "get_weather", ', '"arguments": ', '"parameters": ', '{"city": ', '"Paris"', "{}", "}", "]", "[",
        "{", '"', "\\", "'", ",", ":", "(", ")", "=", ";", " ", "\n", "<", ">", "null", "1.5", "true", "get_weather",
        "get_time", "<function=", "<parameter=", "</parameter>", "</function>", "city", "days", "at",
        "get_weather(city=", "```json\n", "```", "functions.get_weather:0", "analysis", "final", "assistant",
        "commentary to=functions.get_weather", "\\u00e9", "\\ud83d", "\x00", "é", "😀", "　", " " * 70,
    }
)  # fmt: skip
WORDS = [f"w{number}w" for number in range(20)]


def _texts():
    pieces = st.lists(st.one_of(st.sampled_from(MARKUP), st.sampled_from(WORDS)), max_size=25).map("".join)
    samples = st.sampled_from([text for _, text, *_ in SAMPLES.values()])
    spliced = st.tuples(samples, st.integers(0, 200), pieces, st.integers(0, 200)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[3] :]
    )
    return st.one_of(pieces, spliced)


@pytest.mark.parametrize("name", DISTINCT)
@settings(deadline=None)
@given(text=_texts(), seed=st.integers(0, 2**32))
def test_cuts_change_nothing(name, text, seed):
    whole = parse(tool_parser(name), [text])
    assert parse(tool_parser(name), cut(text, seed)) == whole
    assert parse(tool_parser(name), text) == whole


@pytest.mark.parametrize("name", DISTINCT)
@settings(deadline=None)
@given(words=st.lists(st.one_of(st.sampled_from(MARKUP), st.sampled_from(WORDS)), max_size=25))
def test_no_word_is_lost(name, words):
    text = " ".join(words)
    parsed = parse(tool_parser(name), [text])
    everything = (
        parsed.content + parsed.reasoning + "".join(f" {called} {arguments} " for called, arguments in parsed.calls)
    )
    for word in set(words).intersection(WORDS):
        if word in _hidden_places(name, text):
            continue
        assert everything.count(word) >= text.count(word)


def _hidden_places(name, text):
    """What the formats have places for that no client sees: names of channels, ids."""
    return text if name in ("gpt-oss", "openai") or (name, "[CALL_ID]" in text) == ("mistral", True) else ""


@pytest.mark.parametrize("name", DISTINCT)
@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_plain_text_stays_as_it_is(name, text):
    if any(token in text for token in TOOL_FORMATS[name].special_tokens):
        return
    assert parse(tool_parser(name), [text]).content == text


@pytest.mark.parametrize("name", DISTINCT)
def test_held_back_text_is_bounded(name):
    """However much of a begun call comes, it is given up as text in the end."""
    begin = {
        "hermes": '<tool_call>{"x": "', "llama3_json": '{"name": "', "mistral": "[TOOL_CALLS]f", "pythonic": "[f",
        "qwen3_coder": "<tool_call><function=", "qwen3_xml": "<function=", "deepseek_v3": "<｜tool▁call▁begin｜>",
        "kimi_k2": "<|tool_call_begin|>", "glm45": "<tool_call>", "gpt-oss": "<|channel|>",
        "granite": '<|tool_call|>[{"x": "', "phi4_mini_json": 'functools[{"x": "', "xlam": '[{"name": "',
        "minimax_m2": '<invoke name="', "deepseek_v32": '<｜DSML｜invoke name="',
        "seed_oss": "<seed:tool_call><function=",
        "functiongemma": "<start_function_call>call:", "gemma4": "<|tool_call>call:", "openai": "<|channel|>",
        "deepseek_v31": "<｜tool▁call▁begin｜>", "glm47": "<tool_call>", "llama4_pythonic": "[f",
        "deepseek_v4": '<｜DSML｜invoke name="', "step3": "<｜tool_call_begin｜>",
        "granite-20b-fc": '<function_call> {"x": "', "internlm": '<|action_start|><|plugin|>{"x": "',
        "minimax": '<tool_calls>{"x": "', "jamba": '<tool_calls>[{"x": "', "hunyuan_a13b": '<tool_calls>[{"x": "',
        "longcat": '<longcat_tool_call>{"x": "',
        "cohere_command3": '<|START_ACTION|>[{"x": "', "apertus": '<|tools_prefix|>[{"', "hy_v3": "<tool_call>",
        "lfm2": "<|tool_call_start|>[f", "olmo3": "<function_calls>f",
    }[name]  # fmt: skip
    parser = tool_parser(name)
    events = [*parser.push(begin)]
    for _ in range(70):
        events += parser.push("y" * 1000)
    text = "".join(event.text for event in events)
    assert text.startswith(begin)
    assert len(text) == len(begin) + 70_000


def test_ids_are_the_models_own_or_of_its_form():
    parsed = parse(tool_parser("kimi_k2"), [SAMPLES["kimi"][1]])
    assert parsed.ids == ["functions.get_weather:0", "functions.get_time:1"]
    assert parse(tool_parser("mistral"), [SAMPLES["mistral v13"][1]]).ids == ["abcdef123"]
    (event, *_) = TOOL_FORMATS["mistral"].new_parser(TOOLS).push("[TOOL_CALLS]get_time{}")
    assert len(event.id) == 9
    assert event.id.isalnum()
    (event, *_) = TOOL_FORMATS["hermes"].new_parser(TOOLS).push('<tool_call>{"name": "f"')
    assert event.id.startswith("call_")
    assert len(event.id) == 29


@pytest.mark.parametrize("depth", [10, 100, 5000])
@pytest.mark.parametrize("name", ["pythonic", "hermes", "qwen3_coder"])
def test_deep_nesting_is_harmless(name, depth):
    value = "[" * depth + "]" * depth
    text = {
        "pythonic": f"[get_weather(city={value})]",
        "hermes": f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {value}}}}}</tool_call>',
        "qwen3_coder": qwen("get_weather", at=value),
    }[name]
    parsed = parse(tool_parser(name), [text])
    assert parsed.calls[0][0] == CALL
    assert value in parsed.content + parsed.calls[0][1]


def test_a_parser_that_fails_shows_the_rest_as_text(caplog):
    parser = tool_parser("hermes")
    events = parser.push("before ")
    parser.attempt = None
    events += parser.push('<tool_call>{"name"')
    events += parser.push(": 1}") + parser.finish()
    assert "".join(event.text for event in events) == 'before {"name": 1}'
    assert "HermesParser failed" in caplog.text
