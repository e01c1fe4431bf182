"""Tool parsers against the formats that models are documented to write, whole, truncated, and broken."""

import json

import pytest
from support.gateway.parsing_harness import TOOLS, parse, tool_parser
from support.gateway.tool_samples import CALL, SAMPLES, kimi_3, m3, qwen

from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool


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


LISTS = Tool(
    "save",
    parameters={
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}},
            "none": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "row": {"$ref": "#/$defs/Row"},
        },
        "$defs": {"Row": {"type": "object", "properties": {"id": {"type": "string"}, "n": {"type": "number"}}}},
    },
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("<tags><item>1</item><item>b</item></tags>", {"tags": ["1", "b"]}),
        ("<rows><item><id>1</id><n>2</n></item></rows>", {"rows": [{"id": "1", "n": 2}]}),
        ("<none></none><tags>\n</tags><row></row>", {"none": [], "tags": [], "row": {}}),
        ("<row><id>7</id>and <x>true</x></row>", {"row": {"id": "7", "x": True, "$text": "and "}}),
    ],
)
def test_elements_in_elements_are_lists_and_objects_by_the_schema(written, meant):
    text = m3(f'<tool_call><invoke name="save">{written}</invoke></tool_call>')
    ((called, arguments),) = parse(tool_parser("minimax_m3", [LISTS]), text).calls
    assert (called, json.loads(arguments)) == ("save", meant)


def test_quotes_in_names_are_unescaped():
    text = kimi_3("f", 1, ("a &quot;b&quot; &amp;amp;", "string", "x"))
    assert json.loads(parse(tool_parser("kimi_k3"), text).calls[0][1]) == {'a "b" &amp;': "x"}


def test_arguments_come_as_they_are_written():
    parser = tool_parser("hermes")
    parser.push('<tool_call>{"name": "get_weather", "arg')
    fragments = [parser.push(piece) for piece in ('uments": {"ci', 'ty": "P', 'aris"', "}")]
    assert [[event.fragment for event in events] for events in fragments] == [['{"ci'], ['ty": "P'], ['aris"'], ["}"]]


def test_text_values_come_as_they_are_written():
    parser = tool_parser("qwen3_coder")
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert [event.fragment for event in parser.push('a "b')] == ['a \\"b']


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
