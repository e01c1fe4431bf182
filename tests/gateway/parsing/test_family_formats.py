"""Each family's models get the parsers of their own chat templates, without a flag."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.gateway.rest_harness import SAMPLE

from baton.gateway.config import GatewayConfig
from baton.gateway.models.served import load_served_model
from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.reasoning_registry import REASONING_FORMATS
from baton.gateway.parsing.recognition import Traits
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.server import served_model
from baton.rpc.errors import InvalidRequest
from baton.worker.models.registry import FAMILIES


@dataclass(frozen=True)
class Model:
    """A model that people serve, and lines of its own template; empty: it has none."""

    model_type: str
    template: str
    tools: str = "none"
    reasoning: str = "none"


QWEN_TOOLS = (
    "{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}'
    '\\n</tool_call><|im_end|>\\n" }}'
)
QWEN_THINK = "{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0] %}{%- endif %}"
LLAMA_TOOLS = (
    "{{- 'Given the following functions, please respond with a JSON for a function call ' }}"
    """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its """
    """value}. Do not use variables.\\n\\n' }}"""
)
MISTRAL_TOOLS = (
    '{{- "[AVAILABLE_TOOLS] [" }} {%- if message.tool_calls is defined %} {{- "[TOOL_CALLS] [" }} {%- endif %}'
)
CHATML = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
GRANITE_3 = (
    "{%- if tools %}You are a helpful AI assistant with access to the following tools. When a tool is required to "
    "answer the user's query, respond with <|tool_call|> followed by a JSON list of tools used.{%- endif %}"
)
GRANITE_THINK = (
    "Write the thoughts after 'Here is my thought process:' and write the response after 'Here is my response:'"
)
HARMONY = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'
COMMAND_R = "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
GEMMA_3 = "{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}"
GLM_4 = "[gMASK]<sop>{%- if tools -%}<|system|>\n# 可用工具\n{% for tool in tools %}{%- set function = tool.function %}"
GLM_45 = (
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
    "{{ '\\n<think></think>' }}"
)
MINIMAX = "{{- '<minimax:tool_call>' }}<invoke name=\"tool-name-1\">{{- '<think>' ~ '\\n' }}</think>"
R1 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] "
    "+ '\\n' + '```json'}} {% if '</think>' in content %}{% endif %}{{'<｜Assistant｜>'}}"
)
V31 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
    "tool['function']['arguments'] + '<｜tool▁call▁end｜>'}} {{'<｜Assistant｜></think>'}}"
)
XLAM = "You have access to a set of tools. When using tools, make calls in a single JSON array: \n\n"

ERNIE_THINK = QWEN_TOOLS + QWEN_THINK + "{{- '<response>\n' + content + '\n</response>\n' }}"
HUNYUAN = "{%- set answer = '<answer>\\n助手：<tool_calls>[' %}{%- if '</think>' in content %}{%- endif %}"
STEP_3 = "{{- '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"' }}{{- '<think>\\n' }}"

MODELS = {
    "Llama 2": Model("llama", "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"),
    "Llama 3.1, 3.2 and 3.3": Model("llama", LLAMA_TOOLS, "llama3_json"),
    "Hermes 3 on Llama 3.1": Model("llama", QWEN_TOOLS, "hermes"),
    "xLAM 2 on Llama 3.1": Model("llama", XLAM, "xlam"),
    "DeepSeek R1 distilled into Llama": Model("llama", R1, "deepseek_v3", "deepseek_r1"),
    "Mistral 7B v0.3": Model("mistral", MISTRAL_TOOLS, "mistral"),
    "Magistral Small": Model("mistral", MISTRAL_TOOLS + "[THINK]", "mistral", "mistral"),
    "Ministral 8B": Model("ministral", MISTRAL_TOOLS, "mistral"),
    "Ministral 3": Model("ministral3", MISTRAL_TOOLS, "mistral"),
    "Ministral 3 in Mistral's own format": Model("ministral3", "", "mistral"),
    "Mistral Small 3.1": Model("mistral3", MISTRAL_TOOLS, "mistral"),
    "Mixtral": Model("mixtral", MISTRAL_TOOLS, "mistral"),
    "Qwen 2.5": Model("qwen2", QWEN_TOOLS, "hermes"),
    "QwQ": Model("qwen2", QWEN_TOOLS + QWEN_THINK, "hermes", "qwen3"),
    "DeepSeek R1 distilled into Qwen": Model("qwen2", R1, "deepseek_v3", "deepseek_r1"),
    "Qwen 3": Model("qwen3", QWEN_TOOLS + QWEN_THINK, "hermes", "qwen3"),
    "Qwen 3, 30B-A3B Instruct 2507": Model("qwen3_moe", QWEN_TOOLS, "hermes"),
    "Qwen 3 Coder": Model("qwen3_moe", "<tool_call>\n<function=example_function_name>\n<parameter=p>", "qwen3_coder"),
    "Qwen 1.5 MoE": Model("qwen2_moe", CHATML),
    "SmolLM3": Model("smollm3", QWEN_TOOLS + "{{ '<think>\\n\\n</think>\\n' }}", "hermes", "qwen3"),
    "Phi-3 and Phi-4": Model("phi3", "{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}"),
    "Phi-4 mini with tools": Model("phi3", 'functools[{"name": <function name>, "arguments": {}}]', "phi4_mini_json"),
    "Phi-4 reasoning": Model(
        "phi3", "Thought section: <think> {Thought section} </think> {Solution}", reasoning="qwen3"
    ),
    "Phi-3.5 MoE": Model("phimoe", "{{'<|user|>' + '\\n' + message['content'] + '<|end|>' + '\\n'}}"),
    "Granite 3.3": Model("granite", GRANITE_3 + GRANITE_THINK, "granite", "granite"),
    "Granite 3 MoE": Model("granitemoe", GRANITE_3, "granite"),
    "Granite 4": Model("granitemoehybrid", QWEN_TOOLS, "hermes"),
    "OLMo 1": Model("olmo", "{{ '<|user|>\\n' + message['content'] }}"),
    "OLMo 2": Model("olmo2", "{{ '<|user|>\\n' + message['content'] + '\\n' }}"),
    "OLMo 3 Instruct": Model("olmo3", CHATML + "{{ '<functions>' + functions + '</functions>' }}"),
    "OLMo 3 Think": Model("olmo3", "{{ '<|im_start|>assistant\\n<think>' }}", reasoning="qwen3"),
    "OLMoE": Model("olmoe", "{{ '<|user|>\\n' + message['content'] }}"),
    "GLM 4 9B": Model("glm", GLM_4),
    "GLM 4 32B": Model("glm4", GLM_4),
    "GLM 4.5": Model("glm4_moe", GLM_45.replace("{function-name}\n", "{function-name}\\n"), "glm45", "glm45"),
    "GLM 4.7": Model("glm4_moe", GLM_45.replace("{function-name}\n", "{function-name}"), "glm47", "glm45"),
    "Command R": Model("cohere", COMMAND_R),
    "Command R7B and A": Model("cohere2", COMMAND_R),
    "Gemma 1": Model("gemma", GEMMA_3),
    "Gemma 2": Model("gemma2", GEMMA_3),
    "Gemma 3": Model("gemma3_text", GEMMA_3),
    "Gemma 3 with images": Model("gemma3", GEMMA_3),
    "FunctionGemma": Model("gemma3_text", "<start_function_call>call:{{ name }}", "functiongemma"),
    "StarCoder2": Model("starcoder2", ""),
    "GPT-NeoX": Model("gpt_neox", ""),
    "GPT-2": Model("gpt2", ""),
    "ERNIE 4.5": Model("ernie4_5_moe", '{{- "User: " + message["content"] + "\n" -}}'),
    "ERNIE 4.5 Thinking": Model("ernie4_5_moe", QWEN_TOOLS + QWEN_THINK, "hermes", "qwen3"),
    "ERNIE 4.5 Thinking with tagged answers": Model("ernie4_5_moe", ERNIE_THINK, "hermes", "ernie45"),
    "Hunyuan A13B": Model("hunyuan_v1_moe", HUNYUAN, "hunyuan_a13b", "hunyuan_a13b"),
    "Step 3": Model("step3_text", STEP_3, "step3", "step3"),
    "Command A": Model(
        "cohere2", "<|START_THINKING|>plan<|END_THINKING|><|START_ACTION|>[", "cohere_command3", "cohere_command3"
    ),
    "Command A+": Model(
        "cohere2_moe",
        "<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[{{ calls }}<|START_TEXT|>{{ text }}<|END_TEXT|>",
        "cohere_command4",
        "cohere_command4",
    ),
    "Solar Open 2": Model(
        "solar_open2", "{{ '<|think:start|>' }}{{ '<|tool_call:start|>' + name }}", "solar_open2", "solar_open2"
    ),
    "MiniMax M3": Model("minimax_m3", "{{ ']<]minimax[>[<tool_call>' }}<mm:think>", "minimax_m3", "minimax_m3"),
    "Kimi K3": Model("kimi_k3", "{{ '<|open|>think<|sep|>' }}", "kimi_k3", "kimi_k3"),
    "Inkling": Model(
        "inkling", "{{ '<|content_thinking|>' }}{{ '<|content_invoke_tool_json|>' }}", "inkling", "inkling"
    ),
    "Apertus": Model("apertus", "{{ '<|tools_prefix|>[' + calls + ']<|tools_suffix|>' }}", "apertus"),
    "Hunyuan 3": Model("hy_v3", "<tool_call>{name}<tool_sep><arg_key>{{ '<think></think>' }}", "hy_v3", "hy_v3"),
    "Jamba": Model("jamba", "{{- '<|bom|><|system|>' }}{{- '<tool_calls>[' }}", "jamba"),
    "MiniMax M1": Model("minimax_m1", "{{- '<beginning_of_sentence>ai' }}{{- '<tool_calls>' }}", "minimax"),
    "InternLM 3": Model("internlm3", "{{- '<|action_start|><|plugin|>' }}", "internlm"),
    "LFM2": Model("lfm2", "{{- '<|tool_list_start|>[' + tools + ']<|tool_list_end|>' }}", "lfm2"),
    "Nemotron-H": Model(
        "nemotron_h", "{{ '<SPECIAL_11>User\\n' + message['content'] + '\\n<SPECIAL_11>Assistant\\n' }}"
    ),
    "Kimi-Linear": Model("kimi_linear", "{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
    "LongCat": Model("longcat_flash", "{{- '<longcat_tool_call>' }}", "longcat"),
    "OLMo 3 with calls": Model("olmo3", "{{ '<function_calls>' + calls + '</function_calls>' }}", "olmo3"),
    "Granite 20B with calls": Model("gpt_bigcode", "{{- '<function_call> ' + call }}", "granite-20b-fc"),
    "DeepSeek V4": Model(
        "deepseek_v4", "<｜DSML｜tool_calls> <｜Assistant｜><think></think>", "deepseek_v4", "deepseek_r1"
    ),
    "MiniMax M2": Model("minimax_m2", MINIMAX, "minimax_m2", "minimax_m2"),
    "gpt-oss": Model("gpt_oss", HARMONY, "gpt-oss", "gpt-oss"),
    "gpt-oss without a template": Model("gpt_oss", "", "gpt-oss", "gpt-oss"),
    "gpt-oss, trained on ChatML": Model("gpt_oss", CHATML),
    "DeepSeek V3.1": Model("deepseek_v3", V31, "deepseek_v31", "deepseek_r1"),
    "DeepSeek V2": Model("deepseek_v2", "{{ 'User: ' + message['content'] + '\n\n' }}{{ 'Assistant:' }}"),
    "GLM 4.7 Flash": Model("glm4_moe_lite", GLM_45.replace("{function-name}\n", "{function-name}"), "glm47", "glm45"),
    "MiniCPM3": Model("minicpm3", CHATML),
    "Youtu-LLM": Model("youtu", "{{ '<|User|>' + message['content'] + '<|Assistant|>' }}"),
    "Qwen3-Next": Model("qwen3_next", QWEN_TOOLS, "hermes"),
    "Qwen3-Next Thinking": Model("qwen3_next", QWEN_TOOLS + QWEN_THINK, "hermes", "qwen3"),
    "Qwen3.5": Model(
        "qwen3_5_text",
        "<tool_call>\n<function=example_function_name>\n<parameter=p>" + QWEN_THINK,
        "qwen3_coder",
        "qwen3",
    ),
}


def traits_of(model: Model) -> Traits:
    return Traits([model.template] if model.template else [], model.model_type)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_formats_are_chosen_by_its_template_and_architecture(name: str) -> None:
    model = MODELS[name]
    chosen = choose_format(FormatFlags(), traits_of(model))
    assert (chosen.tools_choice.name, chosen.reasoning_choice.name) == (model.tools, model.reasoning)
    assert chosen.tools is TOOL_FORMATS.get(model.tools)
    assert chosen.reasoning is REASONING_FORMATS.get(model.reasoning)
    assert chosen.tools_choice.why
    assert chosen.reasoning_choice.why


def test_every_family_has_a_row() -> None:
    generating = {family.model_type for family in FAMILIES.values() if family.generates}
    assert generating <= {model.model_type for model in MODELS.values()}


def test_the_choice_says_why() -> None:
    chosen = choose_format(FormatFlags(), traits_of(MODELS["Qwen 3"]))
    assert chosen.tools_choice.why == "the chat template has <tool_call>"
    bare = choose_format(FormatFlags(), traits_of(MODELS["gpt-oss without a template"]))
    assert bare.tools_choice.why == "the model_type is gpt_oss"
    none = choose_format(FormatFlags("none"), traits_of(MODELS["GLM 4 9B"]))
    assert (none.tools_choice.why, none.reasoning_choice.why) == (
        "it is set",
        "the chat template has no reasoning of a known format",
    )


@pytest.mark.parametrize(
    ("flags", "field", "meant"),
    [
        (FormatFlags(tools="herms"), "tool_call_parser", "hermes"),
        (FormatFlags(tools="qwen3_code"), "tool_call_parser", "qwen3_coder"),
        (FormatFlags(reasoning="deepseek_r2"), "reasoning_parser", "deepseek_r1"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(flags: FormatFlags, field: str, meant: str) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"{field}: unknown parser .*; did you mean {meant}\?; give one of"
    ) as error:
        choose_format(flags, Traits())
    assert error.value.field == field


def test_a_name_that_resembles_none_is_refused_with_all() -> None:
    with pytest.raises(InvalidRequest, match="unknown parser 'xyz'; give one of auto, none, hermes"):
        choose_format(FormatFlags(tools="xyz"), Traits())


def test_the_architecture_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLE, tmp_path / "model"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert load_served_model(str(folder)).output_format.tools_choice.name == "gpt-oss"
    (folder / "config.json").unlink()
    assert load_served_model(str(folder)).output_format.tools_choice.name == "none"


def test_the_gateway_logs_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        served_model(GatewayConfig(model=str(SAMPLE), reasoning_parser="qwen3")).close()
    assert "reasoning as qwen3 (it is set)" in caplog.text
