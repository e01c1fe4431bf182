"""Which format a model writes tool calls and reasoning in, by its chat template and its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.parsing.tool_formats.harmony import CHANNEL, MESSAGE

_END_THINK = "</think>"
_HARMONY = (CHANNEL, MESSAGE)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a format is recognized by."""

    templates: Sequence[str] = ()  # Jinja texts
    model_type: str = ""  # of config.json; empty: unknown


@dataclass(frozen=True, slots=True)
class Recognized:
    """The name of a format, and why it was chosen."""

    name: str  # empty: none was recognized
    why: str


@dataclass(frozen=True, slots=True)
class _Sign:
    """A format is recognized if all texts occur in the templates, and the model is of one of the types."""

    format: str
    texts: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()  # empty: any


# The first row that matches counts. Rows of texts come first: models are trained further with other templates.
_TOOL_SIGNS = (
    _Sign("gpt-oss", _HARMONY),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Sign("deepseek_v31", ("tool['function']['name'] + '<｜tool▁sep｜>'",)),
    _Sign("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    _Sign("deepseek_v4", ("<｜DSML｜tool_calls>",)),
    _Sign("deepseek_v32", ("<｜DSML｜",)),
    _Sign("step3", ("<steptml:invoke",)),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    _Sign("cohere_command3", ("<|START_ACTION|>",)),
    _Sign("solar_open2", ("<|tool_call:start|>",)),
    _Sign("minimax_m3", ("]<]minimax[>[",)),
    _Sign("kimi_k3", ("<|open|>", "<|sep|>")),
    _Sign("inkling", ("<|content_invoke_tool_json|>",)),
    _Sign("apertus", ("<|tools_prefix|>",)),
    _Sign("hy_v3", ("<tool_sep>", "<arg_key>")),
    _Sign("lfm2", ("<|tool_list_start|>",)),
    _Sign("internlm", ("<|action_start|>", "<|plugin|>")),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("gemma4", ("<|tool_call>",)),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("glm47", ("<tool_call>{function-name}<arg_key>",)),
    _Sign("glm45", ("<tool_call>", "<arg_key>")),
    _Sign("qwen3_coder", ("<function=", "<parameter=")),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    _Sign("minimax", ("<tool_calls>", "<beginning_of_sentence>")),
    _Sign("jamba", ("<tool_calls>", "<|bom|>")),
    _Sign("olmo3", ("<function_calls>",)),
    _Sign("granite-20b-fc", ("<function_call>",)),
    _Sign("pythonic", ("[func_name1(param",)),
    _Sign("xlam", ("make calls in a single JSON array",)),
    _Sign("llama3_json", ('{"name": function name, "parameters":',)),
    _Sign("pythonic", ("<|python_start|>",)),
    _Sign("llama3_json", ("<|python_tag|>",)),
    _Sign("phi4_mini_json", ("functools[",)),
)
_REASONING_SIGNS = (
    _Sign("gpt-oss", _HARMONY),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    _Sign("deepseek_r1", ("<｜Assistant｜>", _END_THINK)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("minimax_m2", ("<minimax:tool_call>", "<think>")),
    _Sign("seed_oss", ("<seed:think>", "</seed:think>")),
    _Sign("gemma4", ("<channel|>", "<|tool_call>")),
    _Sign("granite", ("Here is my thought process:",)),
    _Sign("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("solar_open2", ("<|think:start|>",)),
    _Sign("minimax_m3", ("<mm:think>",)),
    _Sign("kimi_k3", ("<|open|>", "<|sep|>")),
    _Sign("inkling", ("<|content_thinking|>",)),
    _Sign("hy_v3", ("<tool_sep>", "<think>")),
    _Sign("glm45", ("<arg_key>", "<think>")),
    _Sign("step3", ("<steptml:invoke", "<think>")),
    _Sign("hunyuan_a13b", ("<answer>", _END_THINK)),
    _Sign("ernie45", ("<response>", _END_THINK)),
    _Sign("qwen3", (_END_THINK,)),
    _Sign("qwen3", ("<think>",), ("olmo3",)),  # its template opens the reasoning, and leaves out earlier ones
)
# Of architectures whose models all write one format, for models that have no template at all.
_TOOLS_OF_TYPES = (
    _Sign("gpt-oss", model_types=("gpt_oss",)),
    _Sign("minimax_m2", model_types=("minimax_m2",)),
    _Sign("mistral", model_types=("ministral3", "mistral3")),
)
_REASONING_OF_TYPES = (
    _Sign("gpt-oss", model_types=("gpt_oss",)),
    _Sign("minimax_m2", model_types=("minimax_m2",)),
)


def recognized_tools(traits: Traits) -> Recognized:
    """Returns the format of tool calls."""
    return _recognized(traits, _TOOL_SIGNS, _TOOLS_OF_TYPES, "calls")


def recognized_reasoning(traits: Traits) -> Recognized:
    """Returns the format of reasoning."""
    return _recognized(traits, _REASONING_SIGNS, _REASONING_OF_TYPES, "reasoning")


def _recognized(traits: Traits, by_text: Sequence[_Sign], by_type: Sequence[_Sign], what: str) -> Recognized:
    template = "\n".join(traits.templates)
    for sign in by_text if template else by_type:
        if sign.model_types and traits.model_type not in sign.model_types:
            continue
        if all(text in template for text in sign.texts):
            return Recognized(sign.format, _reason(sign))
    if not template:
        return Recognized("", "there is no chat template")
    return Recognized("", f"the chat template has no {what} of a known format")


def _reason(sign: _Sign) -> str:
    parts = []
    if sign.texts:
        parts.append(f"the chat template has {' and '.join(sign.texts)}")
    if sign.model_types:
        parts.append(f"the model_type is {' or '.join(sign.model_types)}")
    return ", and ".join(parts)
