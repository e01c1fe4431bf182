"""Tool parsers on random texts: cuts change nothing, no word is lost, and what is no call is shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.parsing_harness import DISTINCT, cut, parse, tool_parser
from support.gateway.tool_samples import SAMPLES

from baton.gateway.parsing.registry import TOOL_FORMATS

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
    """What the formats have places for that no client sees: names of channels and messages, ids."""
    return text if name in ("gpt-oss", "openai", "inkling") or (name, "[CALL_ID]" in text) == ("mistral", True) else ""


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
        "minicpm5": '<function name="', "gigachat3": '<|function_call|>{"x": "',
        "solar_open2": "<|tool_call:start|>", "minimax_m3": "]<]minimax[>[<invoke", "kimi_k3": "<|open|>call ",
        "inkling": '<|content_invoke_tool_json|>{"x": "',
        "lfm2": "<|tool_call_start|>[f", "olmo3": "<function_calls>f",
    }[name]  # fmt: skip
    parser = tool_parser(name)
    events = [*parser.push(begin)]
    for _ in range(70):
        events += parser.push("y" * 1000)
    text = "".join(event.text for event in events)
    assert text.startswith(begin)
    assert len(text) == len(begin) + 70_000
