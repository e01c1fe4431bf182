"""Which parsers a model gets: by its template, by flags, by a plugin of the user's own."""

from pathlib import Path

import pytest
from support.gateway.parsing_harness import parse

from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.reasoning_registry import REASONING_FORMATS
from baton.gateway.parsing.recognition import Traits
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool, ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest

# Lines that are in the models' own templates.
TEMPLATES = {
    "Qwen 2.5": ("{{- '<tool_call>\\n{\"name\": <function-name>' }}", "hermes", None),
    "Qwen 2.5's tools, with reasoning": (
        """{%- if tools %}<|im_start|>system
Within <tool_call></tool_call> XML tags: <tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>
{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>\n{{ message.content }}\n</tool_response>{%- endif %}{%- if message.reasoning_content %}
<think>\n{{ message.reasoning_content }}\n</think>\n\n{%- endif %}{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}
{%- endfor %}""",
        "hermes",
        "qwen3",
    ),
    "Qwen 3": ("{{- '<tool_call>' }} {%- if '</think>' in content %} {{- '<think>' }}", "hermes", "qwen3"),
    "Qwen 3 Coder": ("<tool_call>\\n<function=example>\\n<parameter=key>", "qwen3_coder", None),
    "Llama 3.1": ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json", None),
    "DeepSeek R1": (
        "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "R1 distilled into Qwen": ("<｜Assistant｜> content.split('</think>')", None, "deepseek_r1"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    "Kimi K2 Thinking": ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
    "GLM 4.5": ("<tool_call><arg_key> <think></think>", "glm45", "glm45"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss", "gpt-oss"),
    "Mistral": ("[TOOL_CALLS][AVAILABLE_TOOLS]", "mistral", None),
    "Magistral": ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
    "Llama 4": ('<|python_start|> {"name": function name, "parameters": dictionary', "llama3_json", None),
    "Llama 4, with calls as in Python": ("<|python_start|>[func_name1(param1=value1, param2=value2)", "pythonic", None),
    "Granite 3.0": ("<|start_of_role|>tools<|end_of_role|> <|tool_call|>", "granite", None),
    "Granite 3.2": ("Here is my thought process: Here is my response:", None, "granite"),
    "GLM 4.7": ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key> <think></think>", "glm47", "glm45"),
    "MiniMax M2": ('<minimax:tool_call><invoke name=""> <think></think>', "minimax_m2", "minimax_m2"),
    "DeepSeek V3.2": ("<｜Assistant｜><think></think> <｜DSML｜invoke", "deepseek_v32", "deepseek_r1"),
    "Seed-OSS": ("<seed:tool_call><function=f> <seed:think></seed:think>", "seed_oss", "seed_oss"),
    "FunctionGemma": ("<start_function_call>call:", "functiongemma", None),
    "Gemma 4": ("<|tool_call>call: <|channel>thought <channel|>", "gemma4", "gemma4"),
    "Phi 4 mini": ("functools[{", "phi4_mini_json", None),
    "a plain one": ("{{ message.content }}", None, None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_selects_the_format(model):
    template, tools, reasoning = TEMPLATES[model]
    chosen = choose_format(FormatFlags(), Traits([template]))
    assert chosen.tools is (None if tools is None else TOOL_FORMATS[tools])
    assert chosen.reasoning is (None if reasoning is None else REASONING_FORMATS[reasoning])


def test_flags_go_before_the_template():
    chosen = choose_format(FormatFlags("mistral", "none"), Traits([TEMPLATES["Qwen 3"][0]]))
    assert chosen.tools is TOOL_FORMATS["mistral"]
    assert chosen.reasoning is None


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequest, match="hermes") as refused:
        choose_format(FormatFlags(tools="herms"), Traits())
    assert refused.value.field == "tool_call_parser"
    for tools, reasoning in (("openai", "openai_gptoss"), ("deepseek_v31", "deepseek_v3"), ("xlam", "nemotron_v3")):
        chosen = choose_format(FormatFlags(tools=tools, reasoning=reasoning), Traits())
        assert (chosen.tools, chosen.reasoning) == (TOOL_FORMATS[tools], REASONING_FORMATS[reasoning])
    with pytest.raises(InvalidRequest, match="deepseek_r1") as refused:
        choose_format(FormatFlags(reasoning="r1"), Traits())
    assert refused.value.field == "reasoning_parser"


PLUGIN = '''
from baton.gateway.parsing.output_format import ToolFormat
from baton.gateway.parsing.reading.source import markers
from baton.gateway.parsing.reading.text_parser import ToolParser


class BangParser(ToolParser):
    """!name{...}"""

    def parse(self):
        while (yield from self.source.until(markers("!"), self.out.content)):
            yield from self.attempt(self.call(), "!")

    def call(self):
        name, _ = yield from self.source.read_until(markers("{"))
        self.source.unread(1)
        self.source.commit()
        self.out.start(name)
        yield from self.source.pass_json(self.out.arguments)
        self.out.end()


TOOL_FORMATS = {"bang": ToolFormat(BangParser)}
'''


def test_a_parser_of_the_users_own(tmp_path):
    path = tmp_path / "bang.py"
    path.write_text(PLUGIN)
    chosen = choose_format(FormatFlags(tools="bang", plugin=str(path)), Traits())
    parser = chosen.output_parsing(ToolUse((Tool("f"),), ToolMode.AUTO), "").new_parser()
    parsed = parse(parser, ["Well. ", '!f{"a":', "1}"])
    assert (parsed.content, parsed.calls) == ("Well.", [("f", '{"a":1}')])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1/0", "ZeroDivisionError"),
        ("TOOL_FORMATS = {'x': 1}", "must map names to ToolFormat"),
        ("REASONING_FORMATS = []", "must map names to ReasoningFormat"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_broken_plugin_is_named(tmp_path, text, problem):
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=problem) as refused:
        choose_format(FormatFlags(plugin=str(path)), Traits())
    assert refused.value.field == "tool_parser_plugin"
    assert str(path) in refused.value.message


@pytest.mark.parametrize("formats", [TOOL_FORMATS, REASONING_FORMATS])
def test_the_page_of_models_names_every_format(formats):
    page = (Path(__file__).parents[3] / "docs/guides/models.md").read_text()
    assert [name for name in formats if f"`{name}`" not in page] == []
