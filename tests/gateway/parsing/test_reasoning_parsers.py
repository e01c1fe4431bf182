"""Reasoning parsers against the formats that models are documented to write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.parsing_harness import TOOLS, Parsed, cut, parse, put_together

from baton.gateway.parsing.output_format import OutputFormat
from baton.gateway.parsing.output_parser import OutputOptions, OutputParser
from baton.gateway.parsing.reasoning_registry import REASONING_FORMATS
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import ToolMode, ToolUse

OPEN_PROMPT = "<｜Assistant｜><think>\n"
CLOSED_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

# The format, the prompt's end, what the model writes, its reasoning, its answer.
SAMPLES = {
    "r1": ("deepseek_r1", OPEN_PROMPT, "Let me see.\n</think>\n\nIt is 4.", "Let me see.", "It is 4."),
    "r1 repeats the tag": ("deepseek_r1", OPEN_PROMPT, "<think>\nHm.\n</think>\n4.", "Hm.", "4."),
    "r1 leaves the tag out": ("deepseek_r1", "<｜Assistant｜>", "Hm.</think>4.", "Hm.", "4."),
    "r1 is told not to": ("deepseek_r1", "<｜Assistant｜></think>", "It is 4.", "", "It is 4."),
    "r1 never ends": ("deepseek_r1", OPEN_PROMPT, "On and on ", "On and on ", ""),
    "qwen": ("qwen3", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "qwen thinks always": ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "qwen is told not to": ("qwen3", CLOSED_PROMPT, "Yes.", "", "Yes."),
    "qwen does not": ("qwen3", "<|im_start|>assistant\n", " Yes, <think> is a tag. ", "", " Yes, <think> is a tag. "),
    "qwen has nothing to think": ("qwen3", "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "glm": ("glm45", "<|assistant|>", "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
    "kimi": ("kimi_k2", "<|im_middle|>", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    "seed": ("seed_oss", "<seed:bos>assistant\n", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    "minimax": ("minimax_m2", "]~b]ai\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    "nemotron": ("nemotron_v3", "<|im_start|>assistant\n<think>\n", "Hm.</think>Yes.", "Hm.", "Yes."),
    "deepseek v3.1": ("deepseek_v3", "<｜Assistant｜><think>", "Hm.</think>Yes.", "Hm.", "Yes."),
    "deepseek v3.1 is told not to": ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", "", "Yes."),
    "gemma 4": ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    "ernie": ("ernie45", "Assistant: \n<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
    "ernie without tags": (
        "ernie45",
        "<think>\n",
        "Hm.\n</think>\nYes. </response> is a tag.",
        "Hm.",
        "Yes. </response> is a tag.",
    ),
    "ernie writes the tag": (
        "ernie45",
        "<think>\n",
        "Hm.</think><response>A </response> b.</response>",
        "Hm.",
        "A </response> b.",
    ),
    "hunyuan": ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    "hunyuan is told not to": ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\nYes.\n</answer>", "", "Yes."),
    "command a": (
        "cohere_command3",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
    ),
    "holo 2": ("holo2", "<|im_start|>assistant\n", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    "laguna": ("poolside_v1", "<assistant>\n<think>", "Hm.</think>Yes.", "Hm.", "Yes."),
    "minimax keeps it": ("minimax_m2_append_think", "<think>\n", "Hm.</think>\nYes.", "", "<think>Hm.</think>\nYes."),
    "minimax repeats the tag": ("minimax_m2_append_think", "", "<think>Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    "command a+": (
        "cohere_command4",
        "<|CHATBOT_TOKEN|><|START_THINKING|>",
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.",
        "Yes.",
    ),
    "solar": ("solar_open2", "<|im:start|>assistant<|think:start|>", "Hm.\n<|think:end|>\nYes.", "Hm.", "Yes."),
    "solar with reasoning switched off": ("solar_open2", "<|think:start|><|think:end|>", "Yes.", "", "Yes."),
    "minimax m3": ("minimax_m3", "]~b]ai\n", "<mm:think>\nHm.\n</mm:think>\nYes.", "Hm.", "Yes."),
    "minimax m3, opened": ("minimax_m3", "]~b]ai\n<mm:think>", "Hm.</mm:think>Yes.", "Hm.", "Yes."),
    "minimax m3, a stray end": ("minimax_m3", "]~b]ai\n", "</mm:think>Yes.</mm:think>", "", "Yes.</mm:think>"),
    "kimi 3": (
        "kimi_k3",
        "<|open|>think<|sep|>",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Hm.",
        "Yes.",
    ),
    "kimi 3 does not": ("kimi_k3", "<|open|>response<|sep|>", "Yes.<|close|>response<|sep|>", "", "Yes."),
    "inkling": (
        "inkling",
        "<|message_model|>",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>",
        "Hm.",
        "Yes.",
    ),
    "inkling, opened": (
        "inkling",
        "<|message_model|><|content_thinking|>",
        "Hm.<|end_message|><|message_model|><|content_text|>Yes.<|content_model_end_sampling|>",
        "Hm.",
        "Yes.",
    ),
    "hunyuan 3": ("hy_v3", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    "step 3": ("step3", "<｜BOT｜>assistant\n<think>\n", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    "granite": (
        "granite",
        "assistant<|end_of_role|>",
        "Here is my thought process:\nHm.\n\nHere is my response:\nYes.",
        "Hm.",
        "Yes.",
    ),
    "granite, shorter": (
        "granite",
        "assistant<|end_of_role|>",
        "Here's my thought process: Hm. Here's my response: Yes.",
        "Hm.",
        "Yes.",
    ),
    "granite does not": ("granite", "assistant<|end_of_role|>", "Here is my view.", "", "Here is my view."),
    "mistral": ("mistral", "[/INST]", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    "mistral later": ("mistral", "[/INST]", "Well.[THINK]Hm.[/THINK]Yes.", "Hm.", "Well.Yes."),
    "harmony": (
        "gpt-oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
    "harmony, a built-in tool": (
        "gpt-oss",
        "<|start|>assistant",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        "1+1",
        "",
    ),
}


def parser_of(sample):
    name, prompt, *_ = SAMPLES[sample]
    reasoning = REASONING_FORMATS[name]
    return reasoning.new_parser(reasoning.is_open(prompt))


@pytest.mark.parametrize("sample", SAMPLES)
def test_documented_formats(sample):
    _, _, text, reasoning, content = SAMPLES[sample]
    parsed = parse(parser_of(sample), [text])
    assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, [])


@pytest.mark.parametrize("sample", SAMPLES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), extra=st.text(alphabet="</think>[THINK]\n x", max_size=30))
def test_cuts_change_nothing(sample, seed, extra):
    text = SAMPLES[sample][2]
    text = text[: seed % (len(text) + 1)] + extra + text[seed % (len(text) + 1) :]
    whole = parse(parser_of(sample), [text])
    assert parse(parser_of(sample), cut(text, seed)) == whole
    assert parse(parser_of(sample), text) == whole
    if SAMPLES[sample][0] not in (
        "gpt-oss",
        "gemma4",
        "granite",
        "seed_oss",
        "ernie45",
        "hunyuan_a13b",
        "cohere_command3",
        "cohere_command4",
        "solar_open2",
        "minimax_m3",
        "kimi_k3",
        "inkling",
    ):  # whose marks have other letters
        assert _letters(whole.content + whole.reasoning) == _letters(text)


def _letters(text):
    """What cannot be markup."""
    return sorted(char for char in text if char not in ("</think>[THINK]\n x"))


@pytest.mark.parametrize("sample", SAMPLES)
def test_reasoning_comes_as_it_is_written(sample):
    _, _, text, reasoning, content = SAMPLES[sample]
    parser, shown = parser_of(sample), Parsed()
    for char in text:
        piece = put_together(parser.push(char))
        shown.reasoning += piece.reasoning
        shown.content += piece.content
        assert reasoning.startswith(shown.reasoning)
        assert content.startswith(shown.content)


USE = ToolUse(TOOLS, ToolMode.AUTO)


def test_calls_follow_reasoning():
    format = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    text = '<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for seed in range(20):
        parsed = parse(format.output_parsing(USE, "assistant\n").new_parser(), cut(text, seed))
        assert parsed.reasoning == "I call <tool_call>."
        assert (parsed.content, parsed.calls, parsed.order) == ("", [("get_time", "{}")], ["reasoning", "call"])


def test_a_section_of_calls_ends_kimis_reasoning():
    format = OutputFormat(TOOL_FORMATS["kimi_k2"], REASONING_FORMATS["kimi_k2"])
    text = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    parsed = parse(format.output_parsing(USE, "").new_parser(), text)
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("Hm.", "", [("f", "{}")])


def test_tokens_of_reasoning_are_counted_with_its_tags():
    parser = OutputFormat(None, REASONING_FORMATS["qwen3"]).output_parsing(ToolUse(), "").new_parser()
    for token in ["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "Yes", "."]:
        parser.push(token)
    assert parser.num_reasoning_tokens == 6


def test_a_prompt_that_opens_the_reasoning_counts_from_the_first_token():
    parser = OutputFormat(None, REASONING_FORMATS["qwen3"]).output_parsing(ToolUse(), "<think>\n").new_parser()
    for token in ["Hm", "</think>", "Yes"]:
        parser.push(token)
    assert parser.num_reasoning_tokens == 2


def test_harmony_counts_too():
    parser = OutputFormat(TOOL_FORMATS["gpt-oss"], REASONING_FORMATS["gpt-oss"]).output_parsing(USE, "").new_parser()
    for token in ["<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant"]:
        parser.push(token)
    assert parser.num_reasoning_tokens == 5


def test_unrequested_parts_are_omitted():
    format = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    use = ToolUse(TOOLS, ToolMode.AUTO, parallel=False)
    parser = format.output_parsing(use, "", include_reasoning=False).new_parser()
    parsed = parse(parser, ["<think>Hm.</think>", call, call])
    assert (parsed.reasoning, parsed.calls) == ("", [("get_time", "{}")])


@pytest.mark.parametrize(
    ("mode", "text", "reason", "expected"),
    [
        (ToolMode.AUTO, '<tool_call>{"name": "get_time"}</tool_call>', "stop", "tool_calls"),
        (ToolMode.AUTO, '<tool_call>{"name": "get_time"', "length", "length"),
        (ToolMode.AUTO, "Hello.", "stop", "stop"),
        (ToolMode.NAMED, '<tool_call>{"name": "get_time"}</tool_call>', "stop", "stop"),
    ],
)
def test_finish_reasons_are_openais(mode, text, reason, expected):
    parser = OutputFormat(TOOL_FORMATS["hermes"]).output_parsing(ToolUse(TOOLS, mode), "").new_parser()
    parser.push(text)
    parser.finish()
    assert parser.finish_reason(reason) == expected


def test_without_formats_there_is_no_parser():
    assert OutputFormat().output_parsing(USE, "") is None
    assert OutputFormat(TOOL_FORMATS["hermes"]).output_parsing(ToolUse(), "") is None


class Broken:
    """What a user's plugin may be like."""

    in_reasoning = True

    def push(self, text):
        raise RuntimeError("no")

    finish = push


@pytest.mark.parametrize("place", ["reasoning", "tools"])
def test_a_parser_that_raises_is_left_out(place, caplog):
    broken = {"reasoning": None, "tools": None, place: Broken()}
    parser = OutputParser(broken["reasoning"], broken["tools"], OutputOptions())
    assert parse(parser, ["Hel", "lo"]).content == "Hello"
    assert "Broken failed" in caplog.text
